"""Wrong command lines of ``halley train`` and ``halley trace``, and what the user must read."""

# Command line: standard error behind "halley: error: ". Words in braces stand for paths and lists,
# see test_commands.py.
TRAIN: dict[str, str] = {
    "train --nonsense 3": "No such option: --nonsense",
    "train --nprok 3": "No such option: --nprok, did you mean --nproc",
    "train --nproc": "Option '--nproc' requires an argument.",
    "train --nproc two": "--nproc (two) must be an integer",
    "train --nproc 1.5": "--nproc (1.5) must be an integer",
    "train --nproc -1": "nproc (-1) must be at least 1, or 0 for one rank a GPU",
    "train now": "Got unexpected extra argument(s) (now)",
    "train --config {folder}/none.toml": (
        "config ({folder}/none.toml) must be a readable file: No such file or directory"
    ),
    "train --config {folder}": "config ({folder}) must be a readable file: Is a directory",
    "train --config {folder}/broken.toml": (
        "config ({folder}/broken.toml) must be TOML: Expected ']' at the end of a table "
        "declaration (at line 1, column 7)"
    ),
    "train --config {folder}/binary.toml": (
        "config ({folder}/binary.toml) must be UTF-8 text: the byte at offset 0 is not"
    ),
    "train --config {folder}/unknown.toml": (
        "key (train.num_stepz) must be one of {train_keys}, did you mean train.num_steps"
    ),
    "train --config ''": "--config () must not be empty",
    "train --config {long}": "config ({long}) must be a readable file: File name too long",
    "train --data ''": "--data () must not be empty",
    "train --output=": "--output () must not be empty",
    "train --data {folder}/none": (
        "text ({folder}/none) must be a file or a folder: No such file or directory"
    ),
    "train --data {folder}/empty": (
        "text ({folder}/empty) must hold at least one byte; no file with text is there"
    ),
    "train --data {folder}/short.txt": (
        "text of 3 bytes in 1 files must hold at least one window of 257 bytes"
    ),
    "train --output {folder}/short.txt/run": (
        "folder ({folder}/short.txt/run/checkpoints) must be writable: Not a directory"
    ),
    "train --output {long}": "folder ({long}/checkpoints) must be writable: File name too long",
    "train --strategy magic": "strategy (magic) must be one of {strategies}",
    "train --strategy fused:half": "strategy (fused:half) must be one of {strategies}, {saving}",
    "train --strategy ''": "--strategy () must not be empty",
    "train --strategy chunked --set num_chunks=5 --nproc 2": (
        "num_chunks (5) must be between 1 and num_local_experts (4)"
    ),
    "train --set num_steps": "--set (num_steps) must be KEY=VALUE",
    "train --set =3": "--set (=3) must be KEY=VALUE",
    "train --set ''": "--set () must not be empty",
    "train --set train.num_steps=0": "train.num_steps (0) must be at least 1",
    "train --set train.num_steps=-1": "train.num_steps (-1) must be at least 1",
    "train --set train.num_steps=ten": "train.num_steps ('ten') must be of type int",
    "train --set train.num_steps=1.5": "train.num_steps (1.5) must be of type int",
    "train --set train.num_steps=nan": "train.num_steps (nan) must be of type int",
    "train --set train=3": "train (3) must be a table",
    "train --set train.batch_size=0": "train.batch_size (0) must be at least 1",
    "train --set train.seed=-1": "train.seed (-1) must be at least 0",
    "train --set train.dtype=float64": (
        "train.dtype ('float64') must be one of 'float32', 'bfloat16'"
    ),
    "train --set train.num_stepz=3": (
        "key (train.num_stepz) must be one of {train_keys}, did you mean train.num_steps"
    ),
    "train --set optimizer.learning_rat=1": (
        "key (optimizer.learning_rat) must be one of optimizer.kind, "
        "optimizer.learning_rate, optimizer.warmup_steps, optimizer.final_fraction, "
        "optimizer.weight_decay, optimizer.beta1, optimizer.beta2, optimizer.eps, "
        "optimizer.clip_norm, did you mean optimizer.learning_rate"
    ),
    "train --set optimizer.learning_rate=-1": "optimizer.learning_rate (-1.0) must be above 0",
    "train --set optimizer.learning_rate=nan": "optimizer.learning_rate (nan) must be finite",
    "train --set optimizer.learning_rate=inf": "optimizer.learning_rate (inf) must be finite",
    "train --set data.seq_len=0": "data.seq_len (0) must be at least 1",
    "train --set device=tpu": "device ('tpu') must be one of 'auto', 'cpu', 'cuda'",
    "train --set model=tinny": "model (tinny) must be one of {models}, did you mean tiny",
    "train --set model=zzz": "model (zzz) must be one of {models}",
    "train --set placement={folder}/none.json": (
        "placement ({folder}/none.json) must be a readable file: No such file or directory"
    ),
    "train --set checkpoint.keep=0": "checkpoint.keep (0) must be at least 1",
    "train --set ep_size=4 --nproc 6": "ep_size (4) must divide the number of ranks (6)",
    "train --set ep_size=4 --set device=cpu": "ep_size (4) must divide the number of ranks (2)",
    "train --set expert_tp_size=3 --nproc 4": "expert_tp_size (3) must divide ep_size (4)",
    "train --set expert_tp_size=4 --set model.moe.intermediate_size=24 --nproc 4": (
        "model.moe.intermediate_size (6) must be a multiple of 4 for torch.float32: {grouped_rows}"
    ),
    "train --set expert_tp_size=2 --set model.moe.expert_bias=true --nproc 2": (
        "model.moe.expert_bias (true) must be false with expert_tp_size (2)"
    ),
    "train --set expert_tp_size=2 --set placement=none.json --nproc 2": (
        "placement (none.json) must be empty with expert_tp_size (2): ranks that share "
        "experts have the plain one"
    ),
    "train --set max_load=0.5": "max_load (0.5) must be 0 or at least 1",
    "train --set num_chunks=-1": "num_chunks (-1) must be at least 0",
    "train --set passes=all": "passes ('all') must be one of 'none', 'wgrad', 'partition', 'both'",
    "train --set passes=both": (
        "strategy (sequential) must be functional, unfused or fused for passes both: "
        "others are no part of a graph"
    ),
    "train --set model.moe.num_experts=7 --set device=cpu": (
        "num_experts (7) must be divisible by ep_size (2)"
    ),
    "train --nproc 3": "num_experts (8) must be divisible by ep_size (3)",
}
TRAIN_MODEL: dict[str, str] = {
    "train --set model.moe.top_k=9": "top_k (9) must be between 1 and num_experts (8)",
    "train --set model.num_heads=3": "num_heads (3) must be divisible by num_kv_heads (2)",
    "train --set model.head_dim=7": "head_dim (7) must be even, >= 2",
    "train --set model.hidden_size=130": (
        "model.hidden_size (130) must be a multiple of 4 for torch.float32: {grouped_rows}"
    ),
    "train --set model.hidden_size=132 --set train.dtype=bfloat16": (
        "model.hidden_size (132) must be a multiple of 8 for torch.bfloat16: {grouped_rows}"
    ),
    "train --set model.moe.intermediate_size=33": (
        "model.moe.intermediate_size (33) must be a multiple of 4 for torch.float32: {grouped_rows}"
    ),
    "train --set model.vocab_size=100": "model.vocab_size (100) must be at least 256, for bytes",
    "train --set model.moe.router.kind=top2": (
        "capacity_factor (0.0) must be above 0 for the top2 router"
    ),
    "train --set model.moe.router.kind=switch --set model.moe.router.capacity_factor=1": (
        "top_k (2) must be 1 for switch"
    ),
    "train --set model.moe.router.num_groups=3": (
        "num_experts (8) must be divisible by num_groups (3)"
    ),
    "train --set model.num_dense_layers=1": (
        "dense_intermediate_size (0) must be at least 1 for dense layers"
    ),
    "train --set model.moe.shared_intermediate_size=-1": (
        "shared_intermediate_size (-1) must be at least 0"
    ),
}
TRACE: dict[str, str] = {
    "trace --nonsense": "No such option: --nonsense",
    "trace now": "Got unexpected extra argument(s) (now)",
    "trace --nproc -1": "nproc (-1) must be at least 1, or 0 for one rank a GPU",
    "trace --config {folder}/none.toml": (
        "config ({folder}/none.toml) must be a readable file: No such file or directory"
    ),
    "trace --data {folder}/none": (
        "text ({folder}/none) must be a file or a folder: No such file or directory"
    ),
    "trace --strategies magic": "strategy (magic) must be one of {strategies}",
    "trace --strategies ,": "strategies (,) must name at least one",
    "trace --strategies ''": "--strategies () must not be empty",
    "trace --strategies sequential,chunked:inputs": (
        "strategy (chunked:inputs) must be one of {strategies}, {saving}"
    ),
    "trace --strategies sequential,chunked,sequential": (
        "strategies (sequential,chunked,sequential) must name each once, and names sequential twice"
    ),
    "trace --set passes=both --strategies functional,sequential": (
        "strategy (sequential) must be functional, unfused or fused for passes both: "
        "others are no part of a graph"
    ),
    "trace --steps 0": "steps (0) must be at least 1",
    "trace --steps -3": "steps (-3) must be at least 1",
    "trace --steps 1000000000000": "steps (1000000000000) must be at most 1000000",
    "trace --steps many": "--steps (many) must be an integer",
    "trace --set train.num_stepz=3": (
        "key (train.num_stepz) must be one of {train_keys}, did you mean train.num_steps"
    ),
    "trace --set num_chunks=5 --nproc 2": (
        "num_chunks (5) must be between 1 and num_local_experts (4)"
    ),
    "trace --output {folder}/short.txt/trace": (
        "output ({folder}/short.txt/trace/timeline.png) must be a file to write: Not a directory"
    ),
    "trace --output {folder}/short.txt": (
        "output ({folder}/short.txt/timeline.png) must be a file to write: File exists"
    ),
    "trace --output {folder}/taken": (
        "output ({folder}/taken/timeline.png) must be a new file or hold a chart of "
        "Halley's: it holds something else"
    ),
    "trace --output {folder}/taken_too": (
        "output ({folder}/taken_too/trace-chunked.json.gz) must be a new file or hold a "
        "trace of Halley's: it holds something else"
    ),
}
