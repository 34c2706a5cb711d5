"""Mistakes that a user may make on the command line, and what they must be told."""

# Name of the case: arguments, and what the line must say. Words of the form {folder}/... are
# paths that the fixture ``folder`` has laid out.
WRONG_COMMANDS: dict[str, tuple[str, str]] = {
    "unknown command": ("nonsense", "nonsense"),
    "unknown benchmark": ("bench nonsense", "nonsense"),
    "unknown option of train": ("train --nonsense 3", "--nonsense"),
    "unknown option of doctor": ("doctor --nonsense", "--nonsense"),
    "unknown option of trace": ("trace --nonsense", "--nonsense"),
    "unknown option of export": ("export run --nonsense", "--nonsense"),
    "an argument too many": ("doctor now", "(now)"),
    "an option without its value": ("train --nproc", "--nproc"),
    "not a number": ("train --nproc two", "--nproc"),
    "too few ranks": ("train --nproc -1", "nproc (-1) must be at least 1"),
}
WRONG_CONFIGS: dict[str, tuple[str, str]] = {
    "missing file": (
        "train --config {folder}/none.toml",
        "config ({folder}/none.toml) must be a readable file: No such file",
    ),
    "folder for a file": ("train --config {folder}", "must be a readable file: Is a directory"),
    "broken TOML": ("train --config {folder}/broken.toml", "must be TOML: Expected"),
    "no text": ("train --config {folder}/binary.toml", "must be TOML: 'utf-8'"),
    "unknown key in a file": (
        "train --config {folder}/unknown.toml",
        "key (train.num_stepz) must be one of train.num_steps, ",
    ),
    "unknown key, nearest name": (
        "train --set optimizer.learning_rat=1",
        "did you mean optimizer.learning_rate",
    ),
    "no key": ("train --set num_steps", "--set (num_steps) must be KEY=VALUE"),
    "wrong type": ("train --set train.num_steps=ten", "num_steps ('ten') must be of type int"),
    "fraction": ("train --set train.num_steps=1.5", "num_steps (1.5) must be of type int"),
    "value for a table": ("train --set train=3", "train (3) must be a table"),
    "unknown model": ("train --set model=tinny", "model (tinny) must be one of tiny, mixtral"),
    "unknown model, nearest name": ("train --set model=tinny", "did you mean tiny"),
    "no steps": ("train --set train.num_steps=0", "train.num_steps (0) must be at least 1"),
    "no batch": ("train --set train.batch_size=0", "train.batch_size (0) must be at least 1"),
    "no sequence": ("train --set data.seq_len=0", "data.seq_len (0) must be at least 1"),
    "negative rate": (
        "train --set optimizer.learning_rate=-1",
        "optimizer.learning_rate (-1.0) must be above 0",
    ),
    "negative seed": ("train --set train.seed=-1", "train.seed (-1) must be at least 0"),
    "unknown dtype": (
        "train --set train.dtype=float64",
        "train.dtype ('float64') must be one of 'float32', 'bfloat16'",
    ),
    "unknown device": ("train --set device=tpu", "device ('tpu') must be one of 'auto', 'cpu'"),
    "missing placement": (
        "train --set placement={folder}/none.json",
        "placement ({folder}/none.json) must be a readable file: No such file",
    ),
    "no checkpoint kept": ("train --set checkpoint.keep=0", "checkpoint.keep (0) must be"),
}
WRONG_MODELS: dict[str, tuple[str, str]] = {
    "top_k too large": (
        "train --set model.moe.top_k=9",
        "top_k (9) must be between 1 and num_experts (8)",
    ),
    "heads do not divide": (
        "train --set model.num_heads=3",
        "num_heads (3) must be divisible by num_kv_heads (2)",
    ),
    "odd head": ("train --set model.head_dim=7", "head_dim (7) must be even"),
    "hidden size not aligned": (
        "train --set model.hidden_size=130",
        "model.hidden_size (130) must be a multiple of 4 for torch.float32",
    ),
    "hidden size not aligned for half the bytes": (
        "train --set model.hidden_size=132 --set train.dtype=bfloat16",
        "model.hidden_size (132) must be a multiple of 8 for torch.bfloat16",
    ),
    "experts not aligned": (
        "train --set model.moe.intermediate_size=33",
        "model.moe.intermediate_size (33) must be a multiple of 4",
    ),
    "vocabulary below bytes": (
        "train --set model.vocab_size=100",
        "model.vocab_size (100) must be at least 256",
    ),
    "top2 without capacity": (
        "train --set model.moe.router.kind=top2",
        "capacity_factor (0.0) must be above 0 for the top2 router",
    ),
    "switch with two experts a token": (
        "train --set model.moe.router.kind=switch --set model.moe.router.capacity_factor=1",
        "top_k (2) must be 1 for switch",
    ),
    "groups do not divide": (
        "train --set model.moe.router.num_groups=3",
        "num_experts (8) must be divisible by num_groups (3)",
    ),
    "dense layers without a size": (
        "train --set model.num_dense_layers=1",
        "dense_intermediate_size (0) must be at least 1 for dense layers",
    ),
    "negative shared experts": (
        "train --set model.moe.shared_intermediate_size=-1",
        "shared_intermediate_size (-1) must be at least 0",
    ),
}
WRONG_RUNS: dict[str, tuple[str, str]] = {
    "experts shared by too many ranks": (
        "train --nproc 4 --set expert_tp_size=3",
        "expert_tp_size (3) must divide ep_size (4)",
    ),
    "shards that are not aligned": (
        "train --nproc 4 --set expert_tp_size=4 --set model.moe.intermediate_size=24",
        "model.moe.intermediate_size (6) must be a multiple of 4",
    ),
    "shared experts with biases": (
        "train --nproc 2 --set expert_tp_size=2 --set model.moe.expert_bias=true",
        "model.moe.expert_bias (true) must be false with expert_tp_size (2)",
    ),
    "shared experts with a placement": (
        "train --nproc 2 --set expert_tp_size=2 --set placement=none.json",
        "placement (none.json) must be empty with expert_tp_size (2)",
    ),
    "room for less than a balanced load": (
        "train --set max_load=0.5",
        "max_load (0.5) must be 0 or at least 1",
    ),
    "layers shared by too many ranks": (
        "bench layer --nproc 4 --tp-size 3",
        "tp_size (3) must be at least 1 and divide the ranks of the group (4)",
    ),
    "graphs without a GPU": (
        "bench layer --max-load 1.5 --device cpu",
        "max_load (1.5) must be 0 without a GPU: graphs are CUDA's",
    ),
    "a link that only some emulate": (
        "bench layer --link 25 --strategies sequential,fused --device cpu",
        "strategies (sequential) must be fused or unfused with link (25)",
    ),
    "a link that is no rate": (
        "bench layer --link 25,fast --strategies fused --device cpu",
        "link (fast) must be at least 0.001 GB/s, or 0 for the link there is",
    ),
    "experts over ranks": (
        "train --nproc 3",
        "num_experts (8) must be divisible by ep_size (3)",
    ),
    "experts over the default ranks": (
        "train --set model.moe.num_experts=7 --set device=cpu",
        "num_experts (7) must be divisible by ep_size (2)",
    ),
    "ep_size over ranks": (
        "train --set ep_size=4 --nproc 6",
        "ep_size (4) must divide the number of ranks (6)",
    ),
    "ep_size over the default ranks": (
        "train --set ep_size=4 --set device=cpu",
        "ep_size (4) must divide the number of ranks (2)",
    ),
    "unknown strategy": (
        "train --strategy magic",
        "strategy (magic) must be one of sequential, chunked",
    ),
    "unknown passes": (
        "train --set passes=all",
        "passes ('all') must be one of 'none', 'wgrad', 'partition', 'both'",
    ),
    "passes without a whole graph": (
        "train --set passes=both",
        "strategy (sequential) must be functional, unfused or fused for passes both",
    ),
    "strategy that keeps nothing of the kind": (
        "train --strategy fused:half",
        "strategy (fused:half) must be one of sequential, chunked, gathered, functional",
    ),
    "too many chunks": (
        "train --strategy chunked --set num_chunks=5 --nproc 2",
        "num_chunks (5) must be between 1 and num_local_experts (4)",
    ),
    "negative chunks": ("train --set num_chunks=-1", "num_chunks (-1) must be at least 0"),
    "missing text": (
        "train --data {folder}/none",
        "text ({folder}/none) must be a file or a folder that exists",
    ),
    "text without a name": ("train --data=", "data.path () must be a file or a folder, or"),
    "folder without text": ("train --data {folder}/empty", "must hold at least one byte"),
    "short text": (
        "train --data {folder}/short.txt",
        "text of 3 bytes in 1 files must hold at least one window of 257 bytes",
    ),
    "output below a file": (
        "train --output {folder}/short.txt/run",
        "({folder}/short.txt/run/checkpoints) must be writable: Not a directory",
    ),
    "trace: unknown strategy": ("trace --strategies magic", "strategy (magic) must be one of"),
    "trace: strategy without anything to keep": (
        "trace --strategies sequential,chunked:inputs",
        "strategy (chunked:inputs) must be one of sequential, chunked",
    ),
    "trace: no strategy": ("trace --strategies ,", "strategy () must be one of"),
    "trace: strategy that breaks graphs": (
        "trace --set passes=both --strategies functional,sequential",
        "strategy (sequential) must be functional, unfused or fused",
    ),
    "trace: no steps": ("trace --steps 0", "steps (0) must be at least 1"),
    "trace: unknown key": ("trace --set train.num_stepz=3", "did you mean train.num_steps"),
    "trace: output below a file": (
        "trace --output {folder}/short.txt/trace",
        "({folder}/short.txt/trace) must be writable: Not a directory",
    ),
    "trace: too many chunks": (
        "trace --set num_chunks=5 --nproc 2",
        "num_chunks (5) must be between 1 and num_local_experts (4)",
    ),
}
WRONG_BENCHES: dict[str, tuple[str, str]] = {
    "unknown skew": (
        "--skew steep",
        "skew (steep) must be balanced, std:NUMBER, cv:NUMBER, zipf:NUMBER or one-hot",
    ),
    "skew without a number": ("--skew zipf:x", "skew (zipf:x) must be balanced"),
    "std too large": (
        "--skew std:9 --models tiny",
        "std (9.0) must be between 0 and 0.0818 for num_experts 8 and top_k 2",
    ),
    "negative exponent": ("--skew zipf:-1", "exponent (-1.0) must be at least 0"),
    "tokens that are no number": ("--tokens 12,a", "tokens (12,a) must be positive integers"),
    "no tokens": ("--tokens 0", "tokens (0) must be positive integers"),
    "no samples": ("--samples 0", "samples (0) must be at least 1"),
    "negative seed": ("--seed -1", "seed (-1) must be at least 0"),
    "negative spare": ("--spare -1", "spare (-1) must be at least 0"),
    "too many spare": (
        "--spare 5 --models tiny --nproc 2",
        "spare (5) must leave a rank at most all experts (8), and it has 4 without",
    ),
    "unknown dtype": ("--dtype int8", "dtype (int8) must be one of float32, float16, bfloat16"),
    "unknown device": ("--device tpu", "device (tpu) must be one of auto, cpu, cuda"),
    "unknown model": ("--models tiny,tinny", "model (tinny) must be one of"),
    "no model": ("--models ,", "models (,) must name at least one"),
    "unknown strategy": ("--strategies magic", "strategy (magic) must be one of"),
    "experts over ranks": (
        "--models tiny --nproc 3 --device cpu",
        "num_experts (8) must be divisible by ep_size (3)",
    ),
    "output below a file": (
        "--output {folder}/short.txt/results",
        "({folder}/short.txt/results) must be writable: Not a directory",
    ),
}
WRONG_MODEL_BENCHES: dict[str, tuple[str, str]] = {
    "unknown model": ("--models tinny", "model (tinny) must be one of tiny"),
    "no layers": ("--layers 0", "layers (0) must be positive integers"),
    "only dense layers": (
        "--models deepseek-v3 --layers 3",
        "layers (3) must be above 3, the dense layers that model deepseek-v3 begins with",
    ),
    "no tokens": ("--tokens 1,x", "tokens (1,x) must be positive integers"),
    "sequences of another length": (
        "--tokens 100 --seq-len 64",
        "seq_len (64) must divide tokens (100)",
    ),
    "default sequences": ("--tokens 6000", "seq_len (4096) must divide tokens (6000)"),
    "negative sequences": ("--seq-len -1", "seq_len (-1) must be at least 1, or 0 for all"),
    "unknown strategy": ("--strategies magic", "strategy (magic) must be one of sequential"),
    "no strategy": ("--strategies ,", "strategies (,) must name at least one"),
    "no samples": ("--samples 0", "samples (0) must be at least 1"),
    "negative seed": ("--seed -1", "seed (-1) must be at least 0"),
    "dtype without training": (
        "--dtype float16",
        "dtype (torch.float16) must be float32 or bfloat16 in training",
    ),
    "experts over ranks": ("--nproc 3", "num_experts (8) must be divisible by ep_size (3)"),
    "more than a rank's memory": (
        "--models mixtral-8x7b --layers 2000 --nproc 2",
        "layers (2000) of model mixtral-8x7b must fit the memory of a rank",
    ),
    "output below a file": (
        "--output {folder}/short.txt/results",
        "({folder}/short.txt/results) must be writable: Not a directory",
    ),
}
WRONG_GRAPH_BENCHES: dict[str, tuple[str, str]] = {
    "unknown model": ("--models gpt2", "model (gpt2) must be one of gpt2-s-moe, gpt2-l-moe"),
    "no model": ("--models ,", "models (,) must name at least one"),
    "unknown variant": ("--variants none,magic", "variants (magic) must be of none, sequential"),
    "unknown compiler": ("--inner magic", "inner (magic) must be one of inductor, eager"),
    "unknown gate": ("--gate magic", "gate (magic) must be one of switch, top2"),
    "negative batch": ("--batch -1", "batch (-1) must be at least 1, or 0 for the model's"),
    "parts of no batch": ("--num-parts 4", "num_parts (4) must divide batch (6)"),
    "negative margin": ("--memory-margin -1", "memory_margin (-1.0) must be finite and at least 0"),
    "no number for a margin": ("--memory-margin nan", "memory_margin (nan) must be finite"),
    "unknown link": ("--slow-link pigeons", "slow_link (pigeons) must be one of none, channels"),
    "NCCL's link": ("--slow-link sockets", "slow_link (sockets) must be none without a GPU"),
    "unknown dtype": ("--dtype float12", "dtype (float12) must be one of"),
    "no samples": ("--samples 0", "samples (0) must be at least 1"),
    "negative seed": ("--seed -1", "seed (-1) must be at least 0"),
    "one rank": ("--nproc 1", "nproc (1) must be at least 2: one rank has no all-to-alls"),
    "output below a file": (
        "--output {folder}/short.txt/results",
        "({folder}/short.txt/results) must be writable: Not a directory",
    ),
}
WRONG_DOCTORS: dict[str, tuple[str, str]] = {
    "unknown model": ("--model tinny", "model (tinny) must be one of tiny"),
    "no tokens": ("--model tiny --tokens 0", "tokens (0) must be at least 1"),
    "unknown dtype": (
        "--model tiny --dtype int8",
        "dtype (int8) must be one of float32, float16, bfloat16",
    ),
    "unknown device": ("--model tiny --device tpu", "device (tpu) must be one of auto, cpu, cuda"),
    "negative ranks": ("--model tiny --nproc -1", "nproc (-1) must be at least 1"),
    "experts over ranks": (
        "--model tiny --nproc 3 --device cpu",
        "num_experts (8) must be divisible by ep_size (3)",
    ),
    "tokens without a model": ("--tokens 64", "tokens (64) must come with a model: add --model"),
    "ranks without a model": ("--nproc 2", "nproc (2) must come with a model: add --model"),
}
WRONG_EXPORTS: dict[str, tuple[str, str]] = {
    "no output": ("export run", "--output"),
    "no run": ("export --output out", "run"),
    "missing run": (
        "export {folder}/none --output {folder}/out",
        "run ({folder}/none) must be the output folder of halley train",
    ),
    "damaged configuration": (
        "export {folder}/damaged --output {folder}/out",
        "{folder}/damaged/config.json must be as halley train wrote it",
    ),
    "no checkpoint": (
        "export {folder}/tiny --output {folder}/out",
        "run ({folder}/tiny) must hold a whole checkpoint in checkpoints/",
    ),
    "no family": (
        "export {folder}/deepseek-v3 --output {folder}/out",
        "deepseek-v3 differs in: ",
    ),
}

WRONG_TUNINGS: dict[str, tuple[str, str]] = {
    "nothing to merge": (
        "--merge {folder}/nowhere.jsonl --path {folder}/merged.jsonl",
        "merge ({folder}/nowhere.jsonl) must be a file of tuned knobs",
    ),
    "tp_size": ("--tp-size 3 --device cpu --nproc 2", "tp_size (3) must"),
    "unknown knob": ("--knobs num_combiners,turbo", "knobs (turbo) must be of dispatch, "),
    "no samples": ("--samples 0", "samples (0) must be at least 1"),
    "unknown model": ("--models tinny", "model (tinny) must be one of tiny, mixtral"),
    "broken file": (
        "--show --path {folder}/unknown.toml",
        "{folder}/unknown.toml:1 must be a line of tuned knobs",
    ),
}

CASES = {
    **WRONG_COMMANDS,
    **WRONG_CONFIGS,
    **WRONG_MODELS,
    **WRONG_RUNS,
    **{f"bench: {name}": (f"bench layer {a}", t) for name, (a, t) in WRONG_BENCHES.items()},
    **{
        f"bench {what}: {name}": (f"bench {what} --device cpu {a}", t)
        for what, cases in (("model", WRONG_MODEL_BENCHES), ("graph", WRONG_GRAPH_BENCHES))
        for name, (a, t) in cases.items()
    },
    **{f"doctor: {name}": (f"doctor {a}", t) for name, (a, t) in WRONG_DOCTORS.items()},
    **{f"tune: {name}": (f"tune {a}", t) for name, (a, t) in WRONG_TUNINGS.items()},
    **{f"export: {name}": case for name, case in WRONG_EXPORTS.items()},
}
