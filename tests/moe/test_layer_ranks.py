"""A layer on several ranks equals the reference: routers, strategies, shards and replicas."""

import itertools
import re

import pytest
import torch

from halley.core.placement import ExpertPlacement
from halley.core.reference import moe_reference
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.moe.layer import GroupedExperts, MoELayer
from halley.strategies.registry import build_strategy
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from halley.tools.skew import zipf_load
from tests.moe.model_case import CPU, MODELS, destroy
from tests.rank_pool import RunRanks


HIDDEN, NUM_EXPERTS = 16, 8
NUM_TOKENS = (11, 0, 7, 20)  # of each rank
PLACEMENTS = {
    2: ((0, 1, 3, 5, 6), (0, 2, 3, 4, 7)),
    4: ((0, 1, 2), (0, 1, 3), (0, 1, 4), (5, 6, 7)),  # the last rank has no replica
}
LOADS = {
    "zipf": zipf_load(NUM_EXPERTS, exponent=1.2, top_k=2),
    "one takes all": torch.tensor([1.0] + [1e-9] * 7),
    "one is empty": torch.tensor([0.0] + [1 / 7] * 7),
}

Tensors = dict[str, torch.Tensor]


def _placement(num_ranks: int) -> ExpertPlacement:
    return ExpertPlacement(num_experts=NUM_EXPERTS, experts_WL=PLACEMENTS[num_ranks])


def _build(
    kind: str,
    groups: ParallelGroups,
    strategy: str,
    *,
    load: str = "",
    dtype: torch.dtype = torch.float32,
    placed: bool = False,
) -> MoELayer:
    """Return a layer whose router produces about that load; each expert has its own weights."""
    options = {"recorder": Recorder(CPU), "device": CPU, "num_chunks": 2}
    layer = MoELayer(
        MODELS[kind].moe,
        HIDDEN,
        strategy=build_strategy(strategy, groups.ep, tp_size=groups.tp_size, **options),
        groups=groups,
        placement=_placement(groups.ep_size) if placed else None,
        dtype=dtype,
    )
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(layer.named_parameters()):
            generator = torch.Generator().manual_seed(seed)
            if not name.startswith("experts."):
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
                continue
            name = name.removeprefix("experts.")
            shape = (NUM_EXPERTS, *layer.experts.full_shape(name))
            values = 0.4 * torch.randn(shape, generator=generator)
            own_ids = list(layer.experts.expert_ids)
            parameter.copy_(layer.experts.local_shard(name, values[own_ids]))
        if load:
            layer.router.weight[:, 0] = LOADS[load].clamp_min(1e-9).log().float()
    return layer


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
    layer = _build(kind, ParallelGroups(), "sequential", load=load, dtype=dtype)
    results: Tensors = {}
    for source in range(num_ranks):
        x_TD, grad_TD = _tokens(source, dtype)
        routed = layer.router(x_TD)
        y_TD = moe_reference(x_TD, routed.routing, layer.local_experts())
        layer.router.weight.grad = None  # of this rank's tokens alone
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
        layer = _build(kind, groups, strategy, load=load, dtype=dtype, placed=placed)
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
def test_layer_equals_the_reference(
    run_ranks: RunRanks, kind: str, num_ranks: int, strategy: str, tp_size: int
) -> None:
    run_ranks(_check, num_ranks, kind, [strategy], [""], torch.float32, tp_size, False)


@pytest.mark.parametrize(
    ("num_ranks", "kind", "strategies", "loads", "dtype"),
    [
        (2, "softmax", ["sequential", "chunked", "functional"], ["zipf"], torch.float32),
        (4, "softmax", ["chunked"], list(LOADS), torch.float32),
        (2, "softmax", ["fused"], ["one takes all", "one is empty"], torch.float32),
        (4, "softmax", ["fused"], ["zipf"], torch.float32),
        (2, "softmax", ["sequential", "fused"], ["zipf"], torch.bfloat16),
        (4, "switch", ["sequential"], ["zipf"], torch.float32),  # drops slots
        (2, "biases", ["chunked"], ["zipf"], torch.float32),
    ],
    ids=["2", "4", "2, fused", "4, fused", "bfloat16", "dropped slots", "biases"],
)
def test_layer_with_replicas_equals_the_reference(
    run_ranks: RunRanks,
    num_ranks: int,
    kind: str,
    strategies: list[str],
    loads: list[str],
    dtype: torch.dtype,
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
    layer = _build("softmax", groups, "fused", load="zipf", placed=True)
    weight = layer.experts.down_proj
    vars(weight)["main_grad"] = torch.zeros_like(weight)
    with pytest.raises(ValueError, match=r"main_grad \(a buffer\) must be None on experts of"):
        layer(_tokens(rank, torch.float32)[0])
    destroy(groups)
    groups = build_groups(0, device_type="cpu", tp_size=2)
    with pytest.raises(ValueError, match=re.escape("expert_bias (true) must be false")):
        _build("biases", groups, "sequential")
    destroy(groups)


def test_unsupported_replicas_and_shards_are_errors(run_ranks: RunRanks) -> None:
    run_ranks(_refuse, 2)
