"""Wrong command lines of ``halley bench``, and what the user must read."""

# Command line: standard error behind "halley: error: ". Words in braces stand for paths and lists,
# see test_commands.py.
BENCH_LAYER: dict[str, str] = {
    "bench nonsense": "No such command 'nonsense'.",
    "bench layer now": "Got unexpected extra argument(s) (now)",
    "bench layer --device cpu --nonsense": "No such option: --nonsense",
    "bench layer --device cpu --models tiny,tinny": (
        "model (tinny) must be one of {models}, did you mean tiny"
    ),
    "bench layer --device cpu --models zzz": "model (zzz) must be one of {models}",
    "bench layer --device cpu --models ,": "models (,) must name at least one",
    "bench layer --device cpu --models tiny,tiny": (
        "models (tiny,tiny) must name each once, and names tiny twice"
    ),
    "bench layer --device cpu --models ''": "--models () must not be empty",
    "bench layer --device cpu --tokens 12,a": (
        "tokens (12,a) must be positive integers with commas between"
    ),
    "bench layer --device cpu --tokens 0": (
        "tokens (0) must be positive integers with commas between"
    ),
    "bench layer --device cpu --tokens -5": (
        "tokens (-5) must be positive integers with commas between"
    ),
    "bench layer --device cpu --tokens 1.5": (
        "tokens (1.5) must be positive integers with commas between"
    ),
    "bench layer --device cpu --tokens ,": "tokens (,) must name at least one",
    "bench layer --device cpu --tokens 64,064": (
        "tokens (64,064) must name each once, and names 64 twice"
    ),
    "bench layer --device cpu --samples 0": "samples (0) must be at least 1",
    "bench layer --device cpu --samples 1000000000000": (
        "samples (1000000000000) must be at most 1000000"
    ),
    "bench layer --device cpu --samples few": "--samples (few) must be an integer",
    "bench layer --device cpu --seed -1": "seed (-1) must be at least 0",
    "bench layer --device cpu --seed 1000000000000000000000": (
        "seed (1000000000000000000000) must be at most 9223344366820"
    ),
    "bench layer --device cpu --dtype int8": (
        "dtype (int8) must be one of float32, float16, bfloat16"
    ),
    "bench layer --device tpu": "device (tpu) must be one of auto, cpu, cuda",
    "bench layer --device cpu --nproc -1": (
        "nproc (-1) must be at least 1, or 0 for one rank a GPU"
    ),
    "bench layer --device cpu --nproc 3 --models tiny": (
        "num_experts (8) must be divisible by ep_size (3)"
    ),
    "bench layer --device cpu --strategies magic": "strategy (magic) must be one of {strategies}",
    "bench layer --device cpu --strategies ,": "strategies (,) must name at least one",
    "bench layer --device cpu --strategies chunked,chunked": (
        "strategies (chunked,chunked) must name each once, and names chunked twice"
    ),
    "bench layer --device cpu --output {folder}/short.txt/results": (
        "output ({folder}/short.txt/results/cpu-{machine}x2/layer.jsonl) must be a file to "
        "write: Not a directory"
    ),
    "bench layer --device cpu --output {long}": (
        "output ({long}/cpu-{machine}x2/layer.jsonl) must be a file to write: File name too long"
    ),
    "bench layer --device cpu --tokens 1000000000000": (
        "model (tiny) with tokens (1000000000000) must fit the memory of a rank (11.8 "
        "GiB): weights and tokens of a layer take 3814697.3 GiB on each of 2 ranks"
    ),
    "bench layer --device cpu --skew steep": (
        "skew (steep) must be balanced, std:NUMBER, cv:NUMBER, zipf:NUMBER or one-hot"
    ),
    "bench layer --device cpu --skew zipf:x": (
        "skew (zipf:x) must be balanced, std:NUMBER, cv:NUMBER, zipf:NUMBER or one-hot"
    ),
    "bench layer --device cpu --skew zipf:nan": (
        "skew (zipf:nan) must be balanced, std:NUMBER, cv:NUMBER, zipf:NUMBER or one-hot"
    ),
    "bench layer --device cpu --skew std:9 --models tiny": (
        "std (9.0) must be between 0 and 0.0818 for num_experts 8 and top_k 2"
    ),
    "bench layer --device cpu --skew zipf:-1": "exponent (-1.0) must be at least 0",
    "bench layer --device cpu --skew ,": "skew (,) must name at least one",
    "bench layer --device cpu --skew balanced,balanced": (
        "skew (balanced,balanced) must name each once, and names balanced twice"
    ),
    "bench layer --device cpu --spare -1": "spare (-1) must be at least 0",
    "bench layer --device cpu --spare 5 --models tiny --nproc 2": (
        "spare (5) must leave a rank at most all experts (8), and it has 4 without"
    ),
    "bench layer --device cpu --spare 1 --tp-size 2 --nproc 2": (
        "spare (1) must be left out where ranks share experts"
    ),
    "bench layer --device cpu --tp-size 3 --nproc 4": (
        "tp_size (3) must be at least 1 and divide the ranks of the group (4)"
    ),
    "bench layer --device cpu --tp-size 0": (
        "tp_size (0) must be positive integers with commas between"
    ),
    "bench layer --device cpu --tp-size 1,1": (
        "tp_size (1,1) must name each once, and names 1 twice"
    ),
    "bench layer --device cpu --max-load 1.5": (
        "max_load (1.5) must be 0 without a GPU: graphs are CUDA's"
    ),
    "bench layer --device cpu --max-load 0.5": (
        "max_load (0.5) must be finite and at least 1, or 0 for no CUDA graphs"
    ),
    "bench layer --device cpu --max-load -1": (
        "max_load (-1.0) must be finite and at least 1, or 0 for no CUDA graphs"
    ),
    "bench layer --device cpu --max-load nan": (
        "max_load (nan) must be finite and at least 1, or 0 for no CUDA graphs"
    ),
    "bench layer --device cpu --max-load inf": (
        "max_load (inf) must be finite and at least 1, or 0 for no CUDA graphs"
    ),
    "bench layer --device cpu --nproc 2 --output {folder}/taken": (
        "output ({folder}/taken/cpu-{machine}x2/layer.jsonl) must be a new file or hold "
        "result lines of halley bench: it holds something else"
    ),
}
BENCH_MODEL: dict[str, str] = {
    "bench model now": "Got unexpected extra argument(s) (now)",
    "bench model --device cpu --nonsense": "No such option: --nonsense",
    "bench model --device cpu --models tiny,tinny": (
        "model (tinny) must be one of {models}, did you mean tiny"
    ),
    "bench model --device cpu --models zzz": "model (zzz) must be one of {models}",
    "bench model --device cpu --models ,": "models (,) must name at least one",
    "bench model --device cpu --models tiny,tiny": (
        "models (tiny,tiny) must name each once, and names tiny twice"
    ),
    "bench model --device cpu --models ''": "--models () must not be empty",
    "bench model --device cpu --tokens 12,a": (
        "tokens (12,a) must be positive integers with commas between"
    ),
    "bench model --device cpu --tokens 0": (
        "tokens (0) must be positive integers with commas between"
    ),
    "bench model --device cpu --tokens -5": (
        "tokens (-5) must be positive integers with commas between"
    ),
    "bench model --device cpu --tokens 1.5": (
        "tokens (1.5) must be positive integers with commas between"
    ),
    "bench model --device cpu --tokens ,": "tokens (,) must name at least one",
    "bench model --device cpu --tokens 64,064": (
        "tokens (64,064) must name each once, and names 64 twice"
    ),
    "bench model --device cpu --samples 0": "samples (0) must be at least 1",
    "bench model --device cpu --samples 1000000000000": (
        "samples (1000000000000) must be at most 1000000"
    ),
    "bench model --device cpu --samples few": "--samples (few) must be an integer",
    "bench model --device cpu --seed -1": "seed (-1) must be at least 0",
    "bench model --device cpu --seed 1000000000000000000000": (
        "seed (1000000000000000000000) must be at most 9223344366820"
    ),
    "bench model --device cpu --dtype int8": (
        "dtype (int8) must be one of float32, float16, bfloat16"
    ),
    "bench model --device tpu": "device (tpu) must be one of auto, cpu, cuda",
    "bench model --device cpu --nproc -1": (
        "nproc (-1) must be at least 1, or 0 for one rank a GPU"
    ),
    "bench model --device cpu --nproc 3 --models tiny": (
        "num_experts (8) must be divisible by ep_size (3)"
    ),
    "bench model --device cpu --strategies magic": "strategy (magic) must be one of {strategies}",
    "bench model --device cpu --strategies ,": "strategies (,) must name at least one",
    "bench model --device cpu --strategies chunked,chunked": (
        "strategies (chunked,chunked) must name each once, and names chunked twice"
    ),
    "bench model --device cpu --output {folder}/short.txt/results": (
        "output ({folder}/short.txt/results/cpu-{machine}x2/model.jsonl) must be a file to "
        "write: Not a directory"
    ),
    "bench model --device cpu --output {long}": (
        "output ({long}/cpu-{machine}x2/model.jsonl) must be a file to write: File name too long"
    ),
    "bench model --device cpu --layers 0": (
        "layers (0) must be positive integers with commas between"
    ),
    "bench model --device cpu --layers 2,2": "layers (2,2) must name each once, and names 2 twice",
    "bench model --device cpu --layers two": (
        "layers (two) must be positive integers with commas between"
    ),
    "bench model --device cpu --models deepseek-v3 --layers 3": (
        "layers (3) must be above 3, the dense layers that model deepseek-v3 begins with"
    ),
    "bench model --device cpu --models mixtral-8x7b --layers 2000 --nproc 2": (
        "layers (2000) of model mixtral-8x7b must fit the memory of a rank (11.8 GiB): "
        "with any strategy, weights, gradients and optimizer take 22254.9 GiB on each of 2 "
        "ranks"
    ),
    "bench model --device cpu --tokens 100 --seq-len 64": "seq_len (64) must divide tokens (100)",
    "bench model --device cpu --tokens 6000": "seq_len (4096) must divide tokens (6000)",
    "bench model --device cpu --seq-len -1": (
        "seq_len (-1) must be at least 1, or 0 for all tokens up to 4096"
    ),
    "bench model --device cpu --dtype float16": (
        "dtype (torch.float16) must be float32 or bfloat16 in training"
    ),
    "bench model --device cpu --nproc 2 --output {folder}/taken": (
        "output ({folder}/taken/cpu-{machine}x2/model.jsonl) must be a new file or hold "
        "result lines of halley bench: it holds something else"
    ),
}
BENCH_GRAPH: dict[str, str] = {
    "bench graph now": "Got unexpected extra argument(s) (now)",
    "bench graph --nonsense": "No such option: --nonsense",
    "bench graph --device tpu": "device (tpu) must be one of auto, cpu, cuda",
    "bench graph --device cpu --models gpt2": (
        "model (gpt2) must be one of gpt2-s-moe, gpt2-l-moe, gpt2-tiny-moe"
    ),
    "bench graph --device cpu --models ,": "models (,) must name at least one",
    "bench graph --device cpu --models gpt2-tiny-moe,gpt2-tiny-moe": (
        "models (gpt2-tiny-moe,gpt2-tiny-moe) must name each once, and names gpt2-tiny-moe twice"
    ),
    "bench graph --device cpu --variants none,magic": (
        "variants (magic) must be of none, sequential, both, wgrad, partition, chunked, "
        "inductor-overlap, or all"
    ),
    "bench graph --device cpu --variants ,": "variants (,) must name at least one",
    "bench graph --device cpu --variants wgrad,wgrad": (
        "variants (wgrad,wgrad) must name each once, and names wgrad twice"
    ),
    "bench graph --device cpu --inner magic": "inner (magic) must be one of inductor, eager",
    "bench graph --device cpu --gate magic": (
        "gate (magic) must be one of switch, top2, prioritized, dropless"
    ),
    "bench graph --device cpu --batch -1": "batch (-1) must be at least 1, or 0 for the model's",
    "bench graph --device cpu --batch six": "--batch (six) must be an integer",
    "bench graph --device cpu --num-parts 4": "num_parts (4) must divide batch (6)",
    "bench graph --device cpu --num-parts -1": "num_parts (-1) must be 0, or 2 to 8",
    "bench graph --device cpu --memory-margin -1": (
        "memory_margin (-1.0) must be finite and at least 0"
    ),
    "bench graph --device cpu --memory-margin nan": (
        "memory_margin (nan) must be finite and at least 0"
    ),
    "bench graph --device cpu --memory-margin inf": (
        "memory_margin (inf) must be finite and at least 0"
    ),
    "bench graph --device cpu --slow-link pigeons": (
        "slow_link (pigeons) must be one of none, channels, sockets"
    ),
    "bench graph --device cpu --slow-link sockets": (
        "slow_link (sockets) must be none without a GPU: it is NCCL's"
    ),
    "bench graph --device cpu --dtype float12": (
        "dtype (float12) must be one of float32, float16, bfloat16"
    ),
    "bench graph --device cpu --samples 0": "samples (0) must be at least 1",
    "bench graph --device cpu --samples 1000000000000": (
        "samples (1000000000000) must be at most 1000000"
    ),
    "bench graph --device cpu --seed -1": "seed (-1) must be at least 0",
    "bench graph --device cpu --nproc 1": (
        "nproc (1) must be at least 2: one rank has no all-to-alls"
    ),
    "bench graph --device cpu --nproc -1": (
        "nproc (-1) must be at least 1, or 0 for one rank a GPU"
    ),
    "bench graph --device cpu --output {folder}/short.txt/results": (
        "output ({folder}/short.txt/results/cpu-{machine}x2/graph.jsonl) must be a file to "
        "write: Not a directory"
    ),
    "bench graph --device cpu --nproc 2 --output {folder}/taken": (
        "output ({folder}/taken/cpu-{machine}x2/graph.jsonl) must be a new file or hold "
        "result lines of halley bench: it holds something else"
    ),
}
