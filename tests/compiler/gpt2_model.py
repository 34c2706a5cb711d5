"""A narrow GPT-2 with experts in every other layer, its weights so large that all of it matters."""

from benchmarks.graph_bench.gpt2_moe import Gate, GPT2MoE, GPT2Shape
from halley.distributed.mesh import ParallelGroups
from halley.strategies.traceable import TraceableStrategy


SEQ_LEN = 8


def build_narrow(gate: Gate, groups: ParallelGroups, *, num_layers: int) -> GPT2MoE:
    """Return a model of so many layers.

    Args:
        gate: of its routers.
        groups: over which the experts are spread.
        num_layers: of it.
    """
    shape = GPT2Shape(
        name="narrow",
        num_layers=num_layers,
        hidden_size=32,
        num_heads=4,
        vocab_size=32,
        seq_len=SEQ_LEN,
    )
    strategy = TraceableStrategy(groups.ep)
    return GPT2MoE(shape, gate, groups, strategy=strategy, std=0.2)
