"""A layer on several ranks equals the reference: routers, strategies, shards and replicas."""

import itertools
import re

import pytest
import torch

from halley.core.placement import ExpertPlacement
from halley.core.reference import moe_reference
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.moe.layer import GroupedExperts, MoELayer
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from tests.moe.model_case import HIDDEN, LOADS, build_layer, destroy
from tests.rank_pool import RunRanks


NUM_TOKENS = (11, 0, 7, 20)  # of each rank
PLACEMENTS = {
    2: ((0, 1, 3, 5, 6), (0, 2, 3, 4, 7)),
    4: ((0, 1, 2), (0, 1, 3), (0, 1, 4), (5, 6, 7)),  # the last rank has no replica
}

Tensors = dict[str, torch.Tensor]


def _placement(num_ranks: int) -> ExpertPlacement:
    return ExpertPlacement(num_experts=8, experts_WL=PLACEMENTS[num_ranks])


def _tokens(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    shape = (NUM_TOKENS[rank], HIDDEN)
    x_TD = torch.randn(shape, generator=generator)
    x_TD[:, 0] = 1.0  # so that the first column of the router sets the load of each expert
    return x_TD.to(dtype).requires_grad_(), torch.randn(shape, generator=generator).to(dtype)


def _run(layer: MoELayer, rank: int) -> Tensors:
    """Return output, counts and gradients for the tokens of a rank."""
    x_TD, grad_TD = _tokens(rank, layer.router.weight.dtype)
    out = layer(x_TD)
    ((out.y * grad_TD).sum() + out.router_loss).backward()
    assert x_TD.grad is not None
    values = {"y": out.y.detach(), "x": x_TD.grad, "counts": out.counts_E}
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert grads.keys() == dict(layer.named_parameters()).keys()
    return values | grads


def _expected(
    kind: str, load: str, own: GroupedExperts, *, num_ranks: int, rank: int, dtype: torch.dtype
) -> Tensors:
    """Route the tokens of each rank separately, because capacity and losses are per rank."""
    layer = build_layer(kind, ParallelGroups(), "sequential", load=load, dtype=dtype)
    results: Tensors = {}
    for source in range(num_ranks):
        x_TD, grad_TD = _tokens(source, dtype)
        routed = layer.router(x_TD)
        y_TD = moe_reference(x_TD, routed.routing, layer.local_experts())
        layer.router.weight.grad = None  # the gradient is that of this rank's tokens alone
        ((y_TD * grad_TD).sum() + routed.loss).backward()
        if source == rank:
            assert x_TD.grad is not None
            assert layer.router.weight.grad is not None
            results |= {"y": y_TD.detach(), "x": x_TD.grad, "counts": routed.counts_E}
            results["router.weight"] = layer.router.weight.grad
    for name, parameter in layer.experts.named_parameters():
        assert parameter.grad is not None
        results[f"experts.{name}"] = own.local_shard(name, parameter.grad[list(own.expert_ids)])
    return results


def _check(
    rank: int,
    num_ranks: int,
    kind: str,
    strategies: list[str],
    loads: list[str],
    dtype: torch.dtype = torch.float32,
    tp_size: int = 1,
    placed: bool = True,
) -> list[Tensors]:
    """Compare each strategy with the reference; return the expert gradients of each run."""
    groups = build_groups(0, device_type="cpu", tp_size=tp_size)
    found: list[Tensors] = []
    for load, strategy in itertools.product(loads, strategies):
        placement = _placement(num_ranks) if placed else None
        layer = build_layer(kind, groups, strategy, load=load, dtype=dtype, placement=placement)
        got = _run(layer, rank)
        want = _expected(kind, load, layer.experts, num_ranks=num_ranks, rank=rank, dtype=dtype)
        counts_E = got.pop("counts")
        assert torch.equal(counts_E, want.pop("counts"))
        if load.startswith("one"):
            assert counts_E[0] == (NUM_TOKENS[rank] if load == "one takes all" else 0)
        assert got.keys() == want.keys()
        for name, value in got.items():
            error = relative_error(value, want[name])
            assert error <= RELATIVE_TOLERANCE[dtype], f"{strategy} {load} {name}"
        found.append({n: g for n, g in got.items() if n.startswith("experts.")})
    destroy(groups)
    return found


@pytest.mark.parametrize(
    ("kind", "num_ranks", "strategy", "tp_size"),
    [
        ("softmax", 4, "chunked", 1),
        ("sigmoid", 2, "sequential", 1),
        ("switch", 4, "chunked", 1),
        ("top2", 2, "sequential", 1),
        ("biases", 2, "chunked", 1),
        # ranks share experts
        ("sigmoid", 2, "sequential", 2),
        ("sigmoid", 4, "chunked", 2),
        ("sigmoid", 4, "functional", 2),
        ("sigmoid", 2, "fused", 2),
    ],
)
def test_layer_equals_the_reference(run_ranks, kind, num_ranks, strategy, tp_size) -> None:
    run_ranks(_check, num_ranks, kind, [strategy], [""], torch.float32, tp_size, False)


@pytest.mark.parametrize(
    ("num_ranks", "kind", "strategies", "loads", "dtype"),
    [
        (2, "softmax", ["sequential", "chunked", "functional"], ["zipf"], torch.float32),
        (4, "softmax", ["chunked"], list(LOADS), torch.float32),
        (2, "softmax", ["fused"], ["one takes all", "one is empty"], torch.float32),
        (4, "softmax", ["fused"], ["zipf"], torch.float32),
        (2, "softmax", ["sequential", "fused"], ["zipf"], torch.bfloat16),
        (4, "switch", ["sequential"], ["zipf"], torch.float32),  # the router drops slots
        (2, "biases", ["chunked"], ["zipf"], torch.float32),
    ],
    ids=["2", "4", "2, fused", "4, fused", "bfloat16", "dropped slots", "biases"],
)
def test_layer_with_replicas_equals_the_reference(
    run_ranks: RunRanks, num_ranks, kind, strategies, loads, dtype
) -> None:
    """The gradients of an expert are bitwise equal on all ranks that hold it."""
    by_rank = run_ranks(_check, num_ranks, kind, strategies, loads, dtype)
    placement = _placement(num_ranks)
    for expert in placement.replicated:
        ranks = placement.ranks_of(expert)
        places = [placement.experts_WL[rank].index(expert) for rank in ranks]
        for runs in zip(*(by_rank[rank] for rank in ranks), strict=True):
            for name in runs[0]:
                first, *others = (run[name][at] for run, at in zip(runs, places, strict=True))
                assert all(torch.equal(first, other) for other in others), name


def _refuse(rank: int, num_ranks: int) -> None:
    groups = build_groups(0, device_type="cpu")
    layer = build_layer("softmax", groups, "fused", load="zipf", placement=_placement(2))
    weight = layer.experts.down_proj
    vars(weight)["main_grad"] = torch.zeros_like(weight)
    with pytest.raises(ValueError, match=r"main_grad \(a buffer\) must be None on experts of"):
        layer(_tokens(rank, torch.float32)[0])
    destroy(groups)
    groups = build_groups(0, device_type="cpu", tp_size=2)
    with pytest.raises(ValueError, match=re.escape("expert_bias (true) must be false")):
        build_layer("biases", groups, "sequential")
    destroy(groups)


def test_unsupported_replicas_and_shards_are_errors(run_ranks: RunRanks) -> None:
    run_ranks(_refuse, 2)
