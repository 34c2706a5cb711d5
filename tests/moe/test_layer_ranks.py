"""A layer over several ranks, with each router and strategy, against the reference on one."""

import pytest
import torch

from halley.core.reference import moe_reference
from halley.core.timeline import Recorder
from halley.core.tolerance import RELATIVE_TOLERANCE, relative_error
from halley.moe.layer import MoELayer
from halley.moe.parallel import GroupedExperts, ParallelGroups, build_groups
from halley.moe.strategy import build_strategy
from tests.moe.model_case import CPU, MODELS, destroy
from tests.rank_pool import RunRanks


HIDDEN = 16
NUM_TOKENS = (11, 0, 7, 20)  # of each rank


def _build(kind: str, groups: ParallelGroups, strategy: str) -> MoELayer:
    layer = MoELayer(
        MODELS[kind].moe,
        HIDDEN,
        strategy=build_strategy(strategy, groups.ep, recorder=Recorder(CPU), device=CPU),
        groups=groups,
    )
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(layer.named_parameters()):
            generator = torch.Generator().manual_seed(seed)
            num_experts = layer.config.num_experts if name.startswith("experts.") else 1
            shape = (num_experts, *parameter.shape[num_experts > 1 :])
            values = 0.4 * torch.randn(shape, generator=generator)
            first = layer.experts.expert_ids[0] if num_experts > 1 else 0
            count = parameter.shape[0] if num_experts > 1 else 1
            parameter.copy_(values[first : first + count].view_as(parameter))
    return layer


def _tokens(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    shape = (NUM_TOKENS[rank], HIDDEN)
    x_TD = torch.randn(shape, generator=generator).requires_grad_()
    return x_TD, torch.randn(shape, generator=generator)


def _expected(kind: str, num_ranks: int, rank: int) -> dict[str, torch.Tensor]:
    """Route each rank's tokens by themselves, as capacity and losses are a rank's; sum the loss."""
    layer = _build(kind, ParallelGroups(), "sequential")
    results: dict[str, torch.Tensor] = {}
    for source in range(num_ranks):
        x_TD, grad_TD = _tokens(source)
        routed = layer.router(x_TD)
        y_TD = moe_reference(x_TD, routed.routing, layer.local_experts())
        layer.router.weight.grad = None  # of this rank's tokens alone
        ((y_TD * grad_TD).sum() + routed.loss).backward()
        if source == rank:
            assert x_TD.grad is not None
            assert layer.router.weight.grad is not None
            results |= {"y": y_TD.detach(), "x": x_TD.grad, "router": layer.router.weight.grad}
    return results | _expert_gradients(layer.experts)


def _expert_gradients(experts: GroupedExperts) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in experts.named_parameters() if p.grad is not None}


def _check(rank: int, num_ranks: int, kind: str, strategy: str) -> None:
    groups = build_groups(0, device_type="cpu")
    layer = _build(kind, groups, strategy)
    x_TD, grad_TD = _tokens(rank)
    out = layer(x_TD)
    ((out.y * grad_TD).sum() + out.router_loss).backward()
    got = {"y": out.y.detach(), "x": x_TD.grad, "router": layer.router.weight.grad}
    got |= _expert_gradients(layer.experts)
    destroy(groups)
    num_local = layer.config.num_experts // num_ranks
    for name, want in _expected(kind, num_ranks, rank).items():
        if name not in ("y", "x", "router"):
            want = want[rank * num_local : (rank + 1) * num_local]
        value = got[name]
        assert value is not None
        error = relative_error(value, want)
        assert error <= RELATIVE_TOLERANCE[torch.float32], f"{name} is off by {error:.2e}"


@pytest.mark.parametrize("strategy", ["sequential", "chunked"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "switch", "top2", "biases"])
def test_every_router_over_ranks(
    run_ranks: RunRanks, kind: str, num_ranks: int, strategy: str
) -> None:
    run_ranks(_check, num_ranks, kind, strategy)
