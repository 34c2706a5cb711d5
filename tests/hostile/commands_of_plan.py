"""Wrong command lines of ``halley plan``, and what the user must read."""

# Command line: standard error behind "halley: error: ". Words in braces stand for paths and lists,
# see test_commands.py.
PLAN: dict[str, str] = {
    "plan nonsense": "No such command 'nonsense'.",
    "plan graph now": "Got unexpected extra argument(s) (now)",
    "plan graph --nonsense": "No such option: --nonsense",
    "plan graph --config {folder}/none.toml": (
        "config ({folder}/none.toml) must be a readable file: No such file or directory"
    ),
    "plan graph --set strategy=chunked": (
        "strategy (chunked) must be functional, unfused or fused for passes both: others "
        "are no part of a graph"
    ),
    "plan graph --set strategy=fused,fused,fused": (
        "strategy (fused,fused,fused) must be one, or as many as MoE layers (4)"
    ),
    "plan graph --passes none": "passes (none) must be one of wgrad, partition, both",
    "plan graph --passes ''": "--passes () must not be empty",
    "plan graph --measure -1": "measure (-1) must be a number of steps, or 0",
    "plan graph --measure 1000000000000": "measure (1000000000000) must be at most 1000000",
    "plan graph --measure 3 --link 5": (
        "link (5.0) must be left out with measure, which runs on this host"
    ),
    "plan graph --measure 3 --device abacus": (
        "device (abacus) must be left out with measure, which runs on this host"
    ),
    "plan graph --measure 3 --set strategy=functional,fused,functional,fused": (
        "strategy (functional,fused,functional,fused) must be functional with measure: "
        "fused layers are one operator, of which no part is seen"
    ),
    "plan graph --measure 3 --fill": (
        "profiles and fill must be left out with measure, which has its own"
    ),
    "plan graph --measure 3 --profiles {folder}/counts.json": (
        "profiles and fill must be left out with measure, which has its own"
    ),
    "plan graph --ranks 1": "ranks (1) must be at least 2: one rank has no all-to-alls",
    "plan graph --ranks 0": "ranks (0) must be at least 2: one rank has no all-to-alls",
    "plan graph --ranks -4": "ranks (-4) must be at least 2: one rank has no all-to-alls",
    "plan graph --ranks 3": "num_experts (8) must be divisible by ep_size (3)",
    "plan graph --ranks 1000000000000": "ranks (1000000000000) must be at most 65536",
    "plan graph --ranks eight": "--ranks (eight) must be an integer",
    "plan graph --ranks 4 --set expert_tp_size=3": "expert_tp_size (3) must divide ep_size (4)",
    "plan graph --ranks 4 --set ep_size=1": (
        "ep_size (1) must be above 1: one rank has no all-to-alls"
    ),
    "plan graph --ranks 4 --set ep_size=3": "ep_size (3) must divide the number of ranks (4)",
    "plan graph --link nan": "link (nan) must be at least 0.001 GB/s, or 0 for the device's own",
    "plan graph --link inf": "link (inf) must be at least 0.001 GB/s, or 0 for the device's own",
    "plan graph --link -1": "link (-1) must be at least 0.001 GB/s, or 0 for the device's own",
    "plan graph --device abacus": (
        "device (abacus) must be one of those with figures: NVIDIA H200, NVIDIA H100, "
        "NVIDIA A100, cpu"
    ),
    "plan graph --profiles {folder}/none.jsonl": (
        "profiles ({folder}/none.jsonl) must be a readable file: No such file or directory"
    ),
    "plan graph --profiles {folder}": (
        "profiles ({folder}) must be a readable file: Is a directory"
    ),
    "plan graph --profiles {folder}/binary.toml": (
        "profiles ({folder}/binary.toml) must be UTF-8 text: the byte at offset 0 is not"
    ),
    "plan graph --fill": "fill must come with profiles, the file to fill",
    "plan graph --fill --profiles x.jsonl": (
        "fill must run where the GPU (none) is the device (NVIDIA H200)"
    ),
    "plan graph --num-parts 9": "num_parts (9) must be 0, or 2 to 8",
    "plan graph --num-parts -1": "num_parts (-1) must be 0, or 2 to 8",
    "plan graph --memory-margin -1": "memory_margin (-1.0) must be finite and at least 0",
    "plan graph --memory-margin nan": "memory_margin (nan) must be finite and at least 0",
    "plan graph --timeline {folder}": "timeline ({folder}) must be named .png",
    "plan graph --timeline {folder}/step.jpg": "timeline ({folder}/step.jpg) must be named .png",
    "plan graph --timeline {folder}/short.txt/step.png": (
        "timeline ({folder}/short.txt/step.png) must be a file to write: File exists"
    ),
    "plan graph --timeline {folder}/taken/notes.png": (
        "timeline ({folder}/taken/notes.png) must be a new file or hold a chart of "
        "Halley's: it holds something else"
    ),
    "plan balance": "Missing argument 'counts'.",
    "plan balance {folder}/counts.json --ranks 2": "Missing option '--output'.",
    "plan balance {folder}/counts.json --output {folder}/out.json": "Missing option '--ranks'.",
    "plan balance {folder}/none.json --ranks 2 --output {folder}/out.json": (
        "counts ({folder}/none.json) must be a readable file: No such file or directory"
    ),
    "plan balance {folder} --ranks 2 --output {folder}/out.json": (
        "counts ({folder}) must be a readable file: Is a directory"
    ),
    "plan balance {folder}/binary.toml --ranks 2 --output {folder}/out.json": (
        "counts ({folder}/binary.toml) must be UTF-8 text: the byte at offset 0 is not"
    ),
    "plan balance {folder}/broken.toml --ranks 2 --output {folder}/out.json": (
        "counts ({folder}/broken.toml) must be JSON: Expecting value: line 1 column 2 (char 1)"
    ),
    "plan balance {folder}/negative.json --ranks 2 --output {folder}/out.json": (
        "counts ({folder}/negative.json) must be numbers of at least 0, and -1 is none"
    ),
    "plan balance {folder}/counts.json --ranks 0 --output {folder}/out.json": (
        "ranks (0) must be at least 1"
    ),
    "plan balance {folder}/counts.json --ranks -1 --output {folder}/out.json": (
        "ranks (-1) must be at least 1"
    ),
    "plan balance {folder}/counts.json --ranks 1000000000000 --output {folder}/out.json": (
        "ranks (1000000000000) must be at most 65536"
    ),
    "plan balance {folder}/counts.json --ranks two --output {folder}/out.json": (
        "--ranks (two) must be an integer"
    ),
    "plan balance {folder}/counts.json --ranks 2 --spare -1 --output {folder}/out.json": (
        "spare (-1) must be at least 0"
    ),
    "plan balance {folder}/counts.json --ranks 2 --spare 3 --output {folder}/out.json": (
        "spare (3) must leave a rank at most all experts (4), and it has 2 without"
    ),
    "plan balance {folder}/counts.json --ranks 2 --model tinny --output {folder}/out.json": (
        "model (tinny) must be one of {models}, did you mean tiny"
    ),
    "plan balance {folder}/counts.json --ranks 2 --model tiny --output {folder}/out.json": (
        "model (tiny) must have the experts of the counts (4) and has 8"
    ),
    "plan balance {folder}/counts.json --ranks 2 --output ''": "--output () must not be empty",
    "plan balance {folder}/counts.json --ranks 2 --output {folder}": (
        "output ({folder}) must be a file to write: Is a directory"
    ),
    "plan balance {folder}/counts.json --ranks 2 --output {folder}/short.txt": (
        "output ({folder}/short.txt) must be a new file or hold a placement of halley plan "
        "balance: it holds something else"
    ),
    "plan balance {folder}/counts.json --ranks 2 --output {folder}/short.txt/out.json": (
        "output ({folder}/short.txt/out.json) must be a file to write: File exists"
    ),
    "plan balance {folder}/counts.json --ranks 2 --output {long}": (
        "output ({long}) must be a file to write: File name too long"
    ),
}
