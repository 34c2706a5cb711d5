"""A layer on several ranks equals the reference, for each router and strategy."""

import re

import pytest
import torch

from halley.core.reference import moe_reference
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.moe.experts import GroupedExperts
from halley.moe.layer import MoELayer
from halley.strategies.registry import build_strategy
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from tests.moe.model_case import CPU, MODELS, destroy
from tests.rank_pool import RunRanks


HIDDEN = 16
NUM_TOKENS = (11, 0, 7, 20)  # of each rank


def _build(kind: str, groups: ParallelGroups, strategy: str) -> MoELayer:
    layer = MoELayer(
        MODELS[kind].moe,
        HIDDEN,
        strategy=build_strategy(
            strategy, groups.ep, recorder=Recorder(CPU), device=CPU, tp_size=groups.tp_size
        ),
        groups=groups,
    )
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(layer.named_parameters()):
            generator = torch.Generator().manual_seed(seed)
            if not name.startswith("experts."):
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
                continue
            short = name.removeprefix("experts.")
            shape = (layer.config.num_experts, *layer.experts.full_shape(short))
            values = 0.4 * torch.randn(shape, generator=generator)
            parameter.copy_(_local_shard(layer.experts, short, values))
    return layer


def _local_shard(experts: GroupedExperts, name: str, values: torch.Tensor) -> torch.Tensor:
    """Return the shard of a rank, of values for all experts."""
    return experts.local_shard(name, values[list(experts.expert_ids)])


def _tokens(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    shape = (NUM_TOKENS[rank], HIDDEN)
    x_TD = torch.randn(shape, generator=generator).requires_grad_()
    return x_TD, torch.randn(shape, generator=generator)


def _expected(kind: str, num_ranks: int, rank: int) -> dict[str, torch.Tensor]:
    """Route the tokens of each rank separately, as capacity and losses are per rank; sum losses."""
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


def _check(rank: int, num_ranks: int, kind: str, strategy: str, tp_size: int = 1) -> None:
    groups = build_groups(0, device_type="cpu", tp_size=tp_size)
    layer = _build(kind, groups, strategy)
    x_TD, grad_TD = _tokens(rank)
    out = layer(x_TD)
    ((out.y * grad_TD).sum() + out.router_loss).backward()
    got = {"y": out.y.detach(), "x": x_TD.grad, "router": layer.router.weight.grad}
    got |= _expert_gradients(layer.experts)
    destroy(groups)
    for name, want in _expected(kind, num_ranks, rank).items():
        if name not in ("y", "x", "router"):
            want = _local_shard(layer.experts, name, want)
        value = got[name]
        assert value is not None
        error = relative_error(value, want)
        assert error <= RELATIVE_TOLERANCE[torch.float32], f"{name} is off by {error:.2e}"


@pytest.mark.parametrize(("strategy", "num_ranks"), [("sequential", 2), ("chunked", 4)])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "switch", "top2", "biases"])
def test_layer_on_several_ranks_equals_the_reference(
    run_ranks: RunRanks, kind: str, num_ranks: int, strategy: str
) -> None:
    run_ranks(_check, num_ranks, kind, strategy)


@pytest.mark.parametrize("strategy", ["sequential", "chunked", "functional", "fused"])
@pytest.mark.parametrize(("num_ranks", "tp_size"), [(2, 2), (4, 2)])
def test_layer_whose_ranks_share_experts_equals_the_reference(
    run_ranks: RunRanks, num_ranks: int, tp_size: int, strategy: str
) -> None:
    run_ranks(_check, num_ranks, "sigmoid", strategy, tp_size)


def _mismatched(rank: int, num_ranks: int) -> None:
    groups = build_groups(0, device_type="cpu", tp_size=2)
    try:
        with pytest.raises(ValueError, match=re.escape("expert_bias (true) must be false")):
            _build("biases", groups, "sequential")
        sequential = build_strategy("sequential", groups.ep, recorder=Recorder(CPU), device=CPU)
        wanted = re.escape("strategy's tp_size (1) must be that of groups (2)")
        with pytest.raises(ValueError, match=wanted):
            MoELayer(MODELS["softmax"].moe, HIDDEN, strategy=sequential, groups=groups)
    finally:
        destroy(groups)


def test_experts_that_ranks_cannot_share_are_an_error(run_ranks: RunRanks) -> None:
    run_ranks(_mismatched, 2)
