"""One MoE layer on several ranks, and the same layer by the reference in one process."""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import torch

from halley.core.reference import moe_reference
from halley.core.routing import sharded_dims
from halley.core.timeline import Recorder
from halley.core.types import Activation, Experts, Routing, Save
from halley.fused.buffers import Workspaces
from halley.strategies.fused import FusedStrategy
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from halley.tools.skew import parse_load, sample_routing


CPU = torch.device("cpu")
SAVES: tuple[Save, ...] = get_args(Save)
# Rows of 16 bytes in float32 and bfloat16.
SIZES: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 16}


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """The sizes and the routing of a layer under test.

    ``skew`` is a load as for ``parse_load``, or "empty-expert": no token chooses the last expert.
    """

    num_tokens_W: tuple[int, ...]  # of each rank; may be 0
    num_experts: int = 8
    top_k: int = 2
    tp_size: int = 1  # ranks that share each expert
    skew: str = "balanced"
    activation: Activation = "swiglu"
    bias: bool = False
    dtype: torch.dtype = torch.float32
    dropped: float = 0.0  # fraction of the slots
    seed: int = 0


def make_experts(case: LayerCase) -> Experts:
    """Return all experts of the case, as leaves that require gradients."""
    generator = torch.Generator().manual_seed(case.seed)
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    up_size = inner * (2 if case.activation == "swiglu" else 1)

    def leaf(*shape: int) -> torch.Tensor:
        values = torch.randn(case.num_experts, *shape, generator=generator) * 0.2
        return values.to(case.dtype).requires_grad_()

    return Experts(
        up_LGD=leaf(up_size, hidden),
        down_LDF=leaf(hidden, inner),
        up_bias_LG=leaf(up_size) if case.bias else None,
        down_bias_LD=leaf(hidden) if case.bias else None,
        activation=case.activation,
    )


def make_tokens(case: LayerCase, rank: int) -> tuple[torch.Tensor, Routing, torch.Tensor]:
    """Return a rank's tokens and routing, which require gradients, and its output's gradient."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank + 1)
    num_tokens = case.num_tokens_W[rank]
    shape = (num_tokens, SIZES["hidden_size"])
    x_TD = torch.randn(shape, generator=generator).to(case.dtype).requires_grad_()
    grad_TD = torch.randn(shape, generator=generator).to(case.dtype)
    load_num = case.num_experts - (case.skew == "empty-expert")
    skew = "balanced" if case.skew == "empty-expert" else case.skew
    load_E = parse_load(skew, num_experts=load_num, top_k=case.top_k)
    routing = sample_routing(load_E, num_tokens, top_k=case.top_k, generator=generator)
    idx_TK, weights_TK = routing.topk_idx_TK, routing.topk_weights_TK
    if case.dropped:
        dropped_TK = torch.rand(idx_TK.shape, generator=generator) < case.dropped
        idx_TK = idx_TK.masked_fill(dropped_TK, -1)
        weights_TK = weights_TK.masked_fill(dropped_TK, 0.0)
    routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK.requires_grad_())
    return x_TD, routing, grad_TD


@torch.enable_grad()
def expected(case: LayerCase, rank: int) -> dict[str, torch.Tensor]:
    """Return the rank's output and gradients by the reference, on all ranks' tokens at once."""
    parts = [make_tokens(case, r) for r in range(len(case.num_tokens_W))]
    x_TD = torch.cat([x.detach() for x, _, _ in parts]).requires_grad_()
    weights_TK = torch.cat([r.topk_weights_TK.detach() for _, r, _ in parts]).requires_grad_()
    routing = Routing(
        topk_idx_TK=torch.cat([r.topk_idx_TK for _, r, _ in parts]), topk_weights_TK=weights_TK
    )
    experts = make_experts(case)
    y_TD = moe_reference(x_TD, routing, experts)
    y_TD.backward(torch.cat([grad for _, _, grad in parts]).float())
    start = sum(case.num_tokens_W[:rank])
    own = slice(start, start + case.num_tokens_W[rank])
    assert x_TD.grad is not None
    assert weights_TK.grad is not None
    values = {
        "y": y_TD.detach()[own],
        "x.grad": x_TD.grad[own],
        "weights.grad": weights_TK.grad[own],
    }
    grads = gradients(experts)
    mine = _own_part(case, rank, replace(experts, **grads))
    return values | {f"{name}.grad": getattr(mine, name) for name in grads}


def check_values(got: dict[str, torch.Tensor], case: LayerCase, rank: int) -> None:
    """Compare the output and gradients of a rank, by the names of ``expected``."""
    wants = expected(case, rank)
    assert list(got) == list(wants)
    for name, want in wants.items():
        assert_close(got[name].cpu(), want, f"{name}: {case}", dtype=case.dtype)


def assert_close(
    got: torch.Tensor, want: torch.Tensor, what: str, *, dtype: torch.dtype | None = None
) -> None:
    """Compare a result with the reference, with the tolerance of a dtype, by default its own."""
    error = relative_error(got, want)
    assert error <= RELATIVE_TOLERANCE[dtype or got.dtype], f"off by {error:.2e}: {what}"


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: object) -> None:
    """Check that tensors of the same name are bitwise equal; ``what`` is for the message."""
    for name, value in want.items():
        assert torch.equal(got[name], value), f"{name} differs, {what}"


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a matrix, stored column by column."""
    return tensor.detach().t().contiguous().t()


def build(workspaces: Workspaces, *, fused: bool = True, save: Save = "all") -> FusedStrategy:
    """Return a fused strategy that records nothing."""
    recorder = Recorder(workspaces.device, enabled=False)
    return FusedStrategy(workspaces, recorder=recorder, fused=fused, save=save)


def gradients(experts: Experts) -> dict[str, Any]:
    """Return the gradient of each weight that the experts have."""
    return {name: weight.grad for name, weight in experts.tensors().items()}


def _own_part(case: LayerCase, rank: int, experts: Experts) -> Experts:
    """Return the part of all experts, or of their gradients, that a rank holds."""
    tp_rank, num_sets = rank % case.tp_size, len(case.num_tokens_W) // case.tp_size
    mine = experts.split([case.num_experts // num_sets] * num_sets)[rank // case.tp_size]
    if case.tp_size == 1:
        return mine
    up, down = sharded_dims(parts=mine.up_LGD.shape[1] // mine.down_LDF.shape[2])
    place = {"tp_rank": tp_rank, "tp_size": case.tp_size}
    return replace(
        mine,
        up_LGD=up.shard(mine.up_LGD, **place).contiguous(),
        down_LDF=down.shard(mine.down_LDF, **place).contiguous(),
    )


def local_experts_of(case: LayerCase, rank: int) -> Experts:
    """Return the experts of a rank, as separate leaves."""
    experts = _own_part(case, rank, make_experts(case))
    return experts.with_tensors(
        {name: t.detach().clone().requires_grad_() for name, t in experts.tensors().items()}
    )


class Inputs(NamedTuple):
    """The inputs of a layer on one rank, leaves that require gradients."""

    x_TD: torch.Tensor
    routing: Routing
    experts: Experts

    def leaves(self) -> dict[str, torch.Tensor]:
        """Return the tensors that require gradients, by name."""
        return {"x": self.x_TD, "weights": self.routing.topk_weights_TK, **self.experts.tensors()}


def make_inputs(case: LayerCase, rank: int, *, device: torch.device = CPU) -> Inputs:
    """Return the arguments of ``AbstractStrategy.forward`` on one rank."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device).requires_grad_()

    x_TD, routing, _ = make_tokens(case, rank)
    experts = local_experts_of(case, rank)
    routing = Routing(
        topk_idx_TK=routing.topk_idx_TK.to(device), topk_weights_TK=leaf(routing.topk_weights_TK)
    )
    weights = {name: leaf(weight) for name, weight in experts.tensors().items()}
    return Inputs(leaf(x_TD), routing, experts.with_tensors(weights))


class Call(NamedTuple):
    """A layer after its forward pass."""

    y_TD: torch.Tensor  # the output
    leaves: dict[str, torch.Tensor]  # those that require gradients, by name
    grad_TD: torch.Tensor  # of the output

    def values(self) -> dict[str, torch.Tensor]:
        """Return the output and all gradients, by the names of ``expected``."""
        grads = {f"{name}.grad": leaf.grad for name, leaf in self.leaves.items()}
        values = {name: grad for name, grad in grads.items() if grad is not None}
        return {"y": self.y_TD.detach()} | values


def run_forward(
    forward: Callable[[torch.Tensor, Routing, Experts], torch.Tensor],
    case: LayerCase,
    rank: int,
    *,
    frozen: tuple[str, ...] = (),
    device: torch.device = CPU,
) -> Call:
    """Run the forward pass of a case on one rank; the frozen leaves require no gradients."""
    inputs = make_inputs(case, rank, device=device)
    leaves = inputs.leaves()
    for name in frozen:
        leaves[name].requires_grad_(False)
    grad_TD = make_tokens(case, rank)[2].to(device)
    return Call(y_TD=forward(*inputs), leaves=leaves, grad_TD=grad_TD)


def train(
    forward: Callable[[torch.Tensor, Routing, Experts], torch.Tensor],
    case: LayerCase,
    rank: int,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Run forward and backward, with the options of ``run_forward``; return all values."""
    call = run_forward(forward, case, rank, **options)
    call.y_TD.backward(call.grad_TD)
    return call.values()


def import_inductor() -> None:
    """Import Inductor here, because its import warns."""
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module("torch._inductor.compile_fx")
