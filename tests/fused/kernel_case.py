"""Sizes, inputs and expected results of a small layer, for tests of the fused kernels."""

from dataclasses import dataclass, field, replace

import torch

from halley.core.reference import moe_reference
from halley.core.types import DROPPED, Activation, Experts, Routing
from halley.fused.config import KernelConfig
from halley.fused.kernels.layout import Layout, make_layout
from halley.ops.kernels.tiles import GemmTile
from halley.tools.skew import parse_load, sample_routing


TIMEOUT_S = 60.0

GARBAGE = -858993460  # content of a plan before it is made

# The interpreter takes as long for a small tensor as for a large one: tasks are few and large.
_TILE = GemmTile(block_n=32, block_k=32, group=2, num_warps=4, num_stages=1)
SMALL_CONFIG = KernelConfig(
    num_programs=4, block_m=16, up=_TILE, down=_TILE, down_grad=_TILE, up_grad=_TILE,
    weight=replace(_TILE, block_k=16), fetch_elements=512, combine_rows=64, combine_stages=2,
    chunk_columns=32, sum_rows=16,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """Sizes of one layer and of its calls."""

    num_tokens_CW: tuple[tuple[int, ...], ...] = ((20, 13),)  # of each rank, for each call
    num_experts: int = 4
    top_k: int = 2
    hidden_size: int = 40
    intermediate_size: int = 24
    load: str = "balanced"  # see ``parse_load``; "empty-expert": no token has the last expert
    dropped: float = 0.0  # fraction of the slots that the router dropped
    has_negative_weights: bool = False  # may be negative, and their sum is not 1
    activation: Activation = "swiglu"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    max_tokens: int = 0  # of the layout; 0 for the most tokens of a call
    block_slots: int = 32
    max_marks: int = 0
    config: KernelConfig = field(default=SMALL_CONFIG)

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens_CW[0])

    @property
    def num_projections(self) -> int:
        """Projections that the activation consumes."""
        return 2 if self.activation == "swiglu" else 1

    def layout(self) -> Layout:
        """Return the layout that all ranks share."""
        return make_layout(
            num_ranks=self.num_ranks, num_experts=self.num_experts, top_k=self.top_k,
            max_tokens=self.max_tokens or max(map(max, self.num_tokens_CW)),
            block_m=self.config.block_m, block_slots=self.block_slots, max_marks=self.max_marks,
        )  # fmt: skip


def make_experts(case: KernelCase) -> Experts:
    """Return all experts of the case."""
    generator = torch.Generator().manual_seed(case.seed)

    def weight(*shape: int) -> torch.Tensor:
        values = torch.randn(case.num_experts, *shape, generator=generator)
        return (values * shape[-1] ** -0.5).to(case.dtype)

    hidden, inner = case.hidden_size, case.intermediate_size
    return Experts(
        up_LGD=weight(case.num_projections * inner, hidden),
        down_LDF=weight(hidden, inner),
        activation=case.activation,
    )


def share_of(experts: Experts, rank: int, *, num_ranks: int) -> Experts:
    """Return the experts of one rank."""
    return experts.split([experts.num_local_experts // num_ranks] * num_ranks)[rank]


def make_tokens(case: KernelCase, rank: int, *, call: int = 0) -> tuple[torch.Tensor, Routing]:
    """Return a rank's tokens and their routing in one call."""
    generator = torch.Generator().manual_seed(1000 * case.seed + 10 * call + rank + 1)
    num_tokens = case.num_tokens_CW[call][rank]
    x_TD = torch.randn(num_tokens, case.hidden_size, generator=generator).to(case.dtype)
    num_loaded = case.num_experts - (case.load == "empty-expert")
    load = "balanced" if case.load == "empty-expert" else case.load
    load_E = parse_load(load, num_experts=num_loaded, top_k=case.top_k)
    routing = sample_routing(load_E, num_tokens, top_k=case.top_k, generator=generator)
    idx_TK, weights_TK = routing.topk_idx_TK, routing.topk_weights_TK
    if case.has_negative_weights:
        weights_TK = weights_TK * -3.0 + rank
    if case.dropped:
        dropped_TK = torch.rand(num_tokens, case.top_k, generator=generator) < case.dropped
        idx_TK = idx_TK.masked_fill(dropped_TK, DROPPED)
        weights_TK = weights_TK.masked_fill(dropped_TK, 0.0)
    return x_TD, Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK)


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradients of one rank."""

    x_TD: torch.Tensor
    weights_TK: torch.Tensor
    up_LGD: torch.Tensor
    down_LDF: torch.Tensor


def make_dy(case: KernelCase, rank: int, *, call: int = 0) -> torch.Tensor:
    """Return a random gradient of a rank's output in one call."""
    generator = torch.Generator().manual_seed(1000 * case.seed + 10 * call + rank + 501)
    shape = (case.num_tokens_CW[call][rank], case.hidden_size)
    return torch.randn(shape, generator=generator).to(case.dtype)


def expected_gradients(case: KernelCase, *, call: int = 0) -> list[Gradients]:
    """Return the gradients of the reference by rank, from autograd in float64."""
    experts = make_experts(case)
    up, down = (w.double().requires_grad_() for w in (experts.up_LGD, experts.down_LDF))
    experts = replace(experts, up_LGD=up, down_LDF=down)
    leaves: list[tuple[torch.Tensor, torch.Tensor]] = []
    for rank in range(case.num_ranks):
        x_TD, routing = make_tokens(case, rank, call=call)
        x_TD = x_TD.double().requires_grad_()
        weights_TK = routing.topk_weights_TK.double().requires_grad_()
        y_TD = moe_reference(x_TD, replace(routing, topk_weights_TK=weights_TK), experts)
        y_TD.backward(make_dy(case, rank, call=call).double())
        leaves.append((x_TD, weights_TK))
    assert up.grad is not None
    assert down.grad is not None
    ups, downs = up.grad.chunk(case.num_ranks), down.grad.chunk(case.num_ranks)
    return [
        Gradients(x_TD=x.grad, weights_TK=w.grad, up_LGD=ups[rank], down_LDF=downs[rank])
        for rank, (x, w) in enumerate(leaves)
        if x.grad is not None and w.grad is not None
    ]
