"""Models with MoE layers that torch.compile traces as one graph.

The all-to-alls of the padded one have fixed sizes, so that Inductor compiles it in seconds.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.config
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.graph_bench.gpt2_moe import Gate, GPT2MoE, GPT2Shape
from halley.distributed.mesh import ParallelGroups
from halley.strategies.traceable import TraceableStrategy


SEQ_LEN = 8  # of the narrow GPT-2
HIDDEN_SIZE, NUM_TOKENS, NUM_LAYERS = 16, 24, 2  # of the padded model


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
def fresh_graphs() -> Iterator[None]:
    """Ignore warnings of PyTorch about tracing, and forget all graphs of Dynamo afterwards."""
    with warnings.catch_warnings(action="ignore"):
        try:
            yield
        finally:
            torch._dynamo.reset()


@contextlib.contextmanager
def whole_graphs() -> Iterator[None]:
    """Let Dynamo read sizes without a graph break or a warning; forget all graphs afterwards."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True), fresh_graphs():
        yield


def build_narrow(
    gate: Gate, groups: ParallelGroups, *, num_layers: int, hidden_size: int = 32, **sizes: int
) -> GPT2MoE:
    """Return a narrow GPT-2 with experts in every other layer, and weights large enough to matter.

    The experts are distributed over the expert-parallel group.
    """
    sizes = {"vocab_size": 32, "seq_len": SEQ_LEN, **sizes}
    shape = GPT2Shape(
        name="narrow", num_layers=num_layers, num_heads=4, hidden_size=hidden_size, **sizes
    )
    strategy = TraceableStrategy(groups.ep)
    return GPT2MoE(shape, gate, groups, strategy=strategy, std=0.2, embedding_std=0.2)


def make_input(rank: int) -> torch.Tensor:
    """Return the tokens of a rank, which need a gradient."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator, requires_grad=True)


class PaddedMoE(nn.Module):
    """Top-1 experts, one per rank, with a capacity; a token above it adds nothing."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, num_ranks = group, group.size()
        self.num_ranks, self.capacity = num_ranks, NUM_TOKENS // num_ranks
        self.gate = nn.Linear(HIDDEN_SIZE, num_ranks, bias=False)
        self.up = nn.Linear(HIDDEN_SIZE, 2 * HIDDEN_SIZE, bias=False)
        self.down = nn.Linear(2 * HIDDEN_SIZE, HIDDEN_SIZE, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weight_T, expert_T = self.gate(x_TD).softmax(dim=-1).max(dim=-1)
        chosen_TE = F.one_hot(expert_T, self.num_ranks)
        place_T = (chosen_TE.cumsum(dim=0) * chosen_TE).sum(dim=-1) - 1
        kept_T = place_T < self.capacity
        slot_T = expert_T * self.capacity + place_T.clamp(max=self.capacity - 1)
        sent_ND = x_TD.new_zeros(self.num_ranks * self.capacity, HIDDEN_SIZE)
        sent_ND = sent_ND.index_add(0, slot_T, x_TD * kept_T[:, None])
        back_ND = self._exchange(self.down(torch.relu(self.up(self._exchange(sent_ND)))))
        return back_ND[slot_T] * (weight_T * kept_T)[:, None]

    def _exchange(self, rows_ND: torch.Tensor) -> torch.Tensor:
        splits = [self.capacity] * self.num_ranks
        return fc.wait_tensor(fc.all_to_all_single_autograd(rows_ND, splits, splits, self.group))


class PaddedModel(nn.Module):
    """Residual layers of a dense network and experts, which are distributed over all ranks.

    With ``breaks``, the graph breaks before the experts of each layer.
    """

    def __init__(self, *, num_layers: int = NUM_LAYERS, breaks: bool = False) -> None:
        super().__init__()
        group = dist.group.WORLD
        assert group is not None
        self.breaks = breaks
        self.dense = nn.ModuleList(
            nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=False) for _ in range(num_layers)
        )
        self.moe = nn.ModuleList(PaddedMoE(group) for _ in range(num_layers))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, 0.3, generator=generator)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        for dense, moe in zip(self.dense, self.moe, strict=True):
            x_TD = x_TD + torch.relu(dense(x_TD))
            if self.breaks:
                torch._dynamo.graph_break()
            x_TD = x_TD + moe(x_TD)
        return x_TD
