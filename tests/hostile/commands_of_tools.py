"""Wrong command lines of ``halley doctor``, ``export``, ``tune``, ``run``, and their errors."""

# Command line: standard error behind "halley: error: ". Words in braces stand for paths and lists,
# see test_commands.py.
TOOLS: dict[str, str] = {
    "nonsense": "No such command 'nonsense'.",
    "doctor now": "Got unexpected extra argument(s) (now)",
    "doctor --nonsense": "No such option: --nonsense",
    "doctor --model tinny": "model (tinny) must be one of {models}, did you mean tiny",
    "doctor --model zzz": "model (zzz) must be one of {models}",
    "doctor --model ''": "--model () must not be empty",
    "doctor --model tiny --tokens 0": "tokens (0) must be at least 1",
    "doctor --model tiny --tokens -1": "tokens (-1) must be at least 1",
    "doctor --model tiny --tokens many": "--tokens (many) must be an integer",
    "doctor --model tiny --device cpu --tokens 1000000000000": (
        "model (tiny) with tokens (1000000000000) must fit the memory of a rank (11.8 "
        "GiB): weights and tokens of a layer take 1907348.6 GiB on each of 2 ranks"
    ),
    "doctor --model tiny --dtype int8": "dtype (int8) must be one of float32, float16, bfloat16",
    "doctor --model tiny --device tpu": "device (tpu) must be one of auto, cpu, cuda",
    "doctor --model tiny --nproc -1": "nproc (-1) must be at least 1, or 0 for one rank a GPU",
    "doctor --model tiny --nproc 3 --device cpu": (
        "num_experts (8) must be divisible by ep_size (3)"
    ),
    "doctor --model tiny --time-limit 0": "time_limit (0) must be above 0 and at most 10000000 s",
    "doctor --model tiny --time-limit -1": (
        "time_limit (-1) must be above 0 and at most 10000000 s"
    ),
    "doctor --model tiny --time-limit nan": (
        "time_limit (nan) must be above 0 and at most 10000000 s"
    ),
    "doctor --model tiny --time-limit inf": (
        "time_limit (inf) must be above 0 and at most 10000000 s"
    ),
    "doctor --model tiny --time-limit soon": "--time-limit (soon) must be a number",
    "doctor --tokens 64": "tokens (64) must come with a model: add --model",
    "doctor --nproc 2": "nproc (2) must come with a model: add --model",
    "doctor --dtype float32": "dtype (float32) must come with a model: add --model",
    "doctor --device cpu": "device (cpu) must come with a model: add --model",
    "doctor --time-limit 5": "time_limit (5.0) must come with a model: add --model",
    "export": "Missing argument 'run'.",
    "export run": "Missing option '--output'.",
    "export --output out": "Missing argument 'run'.",
    "export run --nonsense": "No such option: --nonsense",
    "export '' --output {folder}/out": "argument () must not be empty",
    "export {folder}/none --output {folder}/out": (
        "run ({folder}/none) must be the output folder of halley train, with a config.json"
    ),
    "export {folder}/short.txt --output {folder}/out": (
        "run ({folder}/short.txt) must be the output folder of halley train, with a config.json"
    ),
    "export {folder}/damaged --output {folder}/out": (
        "run configuration ({folder}/damaged/config.json) must be JSON: Expecting value: "
        "line 1 column 11 (char 10)"
    ),
    "export {folder}/tiny --output {folder}/out": (
        "run ({folder}/tiny) must hold a whole checkpoint in checkpoints/"
    ),
    "export {folder}/deepseek-v3 --output {folder}/out": (
        "model.hf_family ('') must be one of mixtral, qwen2_moe, qwen3_moe, olmoe to be "
        "exported; from mixtral, the nearest, deepseek-v3 differs in: moe.router.kind is "
        "'sigmoid', not 'softmax'; number of dense layers is 3, not 0; "
        "moe.shared_intermediate_size is 2048, not 0"
    ),
    "export {folder}/tiny --output {folder}/taken": (
        "run ({folder}/tiny) must hold a whole checkpoint in checkpoints/"
    ),
    "tune now": "Got unexpected extra argument(s) (now)",
    "tune --nonsense": "No such option: --nonsense",
    "tune --device tpu": "device (tpu) must be one of auto, cpu, cuda",
    "tune --device cpu --nproc -1": "nproc (-1) must be at least 1, or 0 for one rank a GPU",
    "tune --device cpu --tp-size 3 --nproc 2": (
        "tp_size (3) must be at least 1 and divide the ranks of the group (2)"
    ),
    "tune --device cpu --tp-size 0": (
        "tp_size (0) must be at least 1 and divide the ranks of the group (2)"
    ),
    "tune --device cpu --knobs combine_rows,turbo": "knobs (turbo) must be of {knobs}, or all",
    "tune --device cpu --knobs ,": "knobs (,) must name at least one",
    "tune --device cpu --knobs up,up": "knobs (up,up) must name each once, and names up twice",
    "tune --device cpu --samples 0": "samples (0) must be at least 1",
    "tune --device cpu --samples 1000000000000": "samples (1000000000000) must be at most 1000000",
    "tune --device cpu --models tinny": "model (tinny) must be one of {models}, did you mean tiny",
    "tune --device cpu --models ,": "models (,) must name at least one",
    "tune --device cpu --models tiny,tiny": (
        "models (tiny,tiny) must name each once, and names tiny twice"
    ),
    "tune --device cpu --tokens 0": "tokens (0) must be positive integers with commas between",
    "tune --device cpu --tokens 64,64": "tokens (64,64) must name each once, and names 64 twice",
    "tune --device cpu --tokens 1000000000000": (
        "model (tiny) with tokens (1000000000000) must fit the memory of a rank (11.8 "
        "GiB): weights and tokens of a layer take 3814697.3 GiB on each of 2 ranks"
    ),
    "tune --device cpu --dtype int8": "dtype (int8) must be one of float32, float16, bfloat16",
    "tune --device cpu --show --merge {folder}/none.jsonl": (
        "show must be left out with merge, which shows the result"
    ),
    "tune --device cpu --merge {folder}/none.jsonl --path {folder}/merged.jsonl": (
        "merge ({folder}/none.jsonl) must be a readable file: No such file or directory"
    ),
    "tune --device cpu --merge {folder} --path {folder}/merged.jsonl": (
        "merge ({folder}) must be a readable file: Is a directory"
    ),
    "tune --device cpu --merge {folder}/short.txt --path {folder}/merged.jsonl": (
        "{folder}/short.txt:1 must be a line of tuned knobs: it must be JSON: Expecting "
        "value: line 1 column 1 (char 0)"
    ),
    "tune --device cpu --show --path {folder}/unknown.toml": (
        "{folder}/unknown.toml:1 must be a line of tuned knobs: it must be JSON: Expecting "
        "value: line 1 column 2 (char 1)"
    ),
    "tune --device cpu --show --path {folder}/binary.toml": (
        "tuned knobs ({folder}/binary.toml) must be UTF-8 text: the byte at offset 0 is not"
    ),
    "tune --device cpu --show --path {folder}": (
        "tuned knobs ({folder}) must be a readable file: Is a directory"
    ),
    "tune --device cpu --path {folder}/short.txt": (
        "{folder}/short.txt:1 must be a line of tuned knobs: it must be JSON: Expecting "
        "value: line 1 column 1 (char 0)"
    ),
    "tune --device cpu --path {folder}/short.txt/knobs.jsonl": (
        "tuned knobs ({folder}/short.txt/knobs.jsonl) must be a readable file: Not a directory"
    ),
    "tune --device cpu --path {long}": (
        "tuned knobs ({long}) must be a readable file: File name too long"
    ),
    "tune --device cpu --chart {folder}/knobs.txt": (
        "chart ({folder}/knobs.txt) must be named .png"
    ),
    "tune --device cpu --chart {folder}/taken/notes.png": (
        "chart ({folder}/taken/notes.png) must be a new file or hold a chart of Halley's: "
        "it holds something else"
    ),
    "run": "Missing argument 'script'.",
    "run none.py": "script (none.py) must be a readable file: No such file or directory",
    "run ''": "script (.) must be a readable file: Is a directory",
    "run {folder}": "script ({folder}) must be a readable file: Is a directory",
    "run {long}": "script ({long}) must be a readable file: File name too long",
    "run {folder}/binary.toml": (
        "script ({folder}/binary.toml) must be Python: (unicode error) 'utf-8' codec can't "
        "decode byte 0xff in position 0: invalid start byte (binary.toml, line 1)"
    ),
    "run {folder}/broken.toml": (
        "script ({folder}/broken.toml) must be Python: '[' was never closed (broken.toml, line 1)"
    ),
    "run --nonsense {folder}/script.py": "No such option: --nonsense",
    "run --strategy fastest {folder}/script.py": "strategy (fastest) must be one of {strategies}",
    "run --nproc -1 {folder}/script.py": "nproc (-1) must be at least 1, or 0 for one rank a GPU",
    "run --nproc two {folder}/script.py": "--nproc (two) must be an integer",
}
