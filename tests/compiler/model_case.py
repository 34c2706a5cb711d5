"""Build a model with MoE layers that torch.compile traces as one graph."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.config
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.graph_bench.gpt2_moe import Gate, GPT2MoE, GPT2Shape
from halley.distributed.mesh import ParallelGroups
from halley.strategies.traceable import TraceableStrategy


SEQ_LEN = 8  # of the narrow GPT-2


class AllToAllCalls(TorchDispatchMode):
    """Appends "all-to-all" to a list of events whenever one starts."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_to_all_single" in str(func):
            self._events.append("all-to-all")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def whole_graphs() -> Iterator[None]:
    """Let Dynamo read sizes from tensors without a graph break; forget all graphs afterwards."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        try:
            yield
        finally:
            torch._dynamo.reset()


def build_narrow(gate: Gate, groups: ParallelGroups, *, num_layers: int) -> GPT2MoE:
    """Return a narrow GPT-2 with experts in every other layer, and weights large enough to matter.

    Args:
        gate: kind of its routers.
        groups: process groups; the experts are distributed over the expert-parallel one.
        num_layers: number of transformer layers.
    """
    shape = GPT2Shape(
        name="narrow",
        num_layers=num_layers,
        hidden_size=32,
        num_heads=4,
        vocab_size=32,
        seq_len=SEQ_LEN,
    )
    return GPT2MoE(shape, gate, groups, strategy=TraceableStrategy(groups.ep), std=0.2)
