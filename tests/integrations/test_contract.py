"""Experts of any framework under expert parallelism: the values of the reference."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halley.core.reference import apply_expert, moe_reference
from halley.core.types import Experts, Routing
from halley.integrations.contract import ExpertParallelism, ExpertsFunction, LocalExperts
from halley.tools.tolerance import RELATIVE_TOLERANCE, relative_error
from tests.rank_pool import RunRanks


NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 2, 8, 8
# Tokens of each rank, and the expert that all of them want, or -1.
LOADS = {
    "random": ((5, 7), -1),
    "a rank without tokens": ((0, 6), -1),
    "no tokens at all": ((0, 0), -1),
    "a rank that receives nothing": ((4, 4), 0),
}


def _make_experts(*, bias: bool) -> Experts:
    """Return small integers as weights, so that no sum depends on its order."""
    generator = torch.Generator().manual_seed(3)

    def values(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    return Experts(
        up_LGD=values(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        down_LDF=values(NUM_EXPERTS, HIDDEN, INTERMEDIATE),
        up_bias_LG=values(NUM_EXPERTS, 2 * INTERMEDIATE) if bias else None,
        down_bias_LD=values(NUM_EXPERTS, HIDDEN) if bias else None,
    )


def _make_inputs(rank: int, num_tokens: int, hot: int) -> tuple[torch.Tensor, Routing]:
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randint(-2, 3, (num_tokens, HIDDEN), generator=generator).float()
    scores_TE = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    weights_TK, idx_TK = scores_TE.topk(TOP_K)
    if hot >= 0:
        idx_TK[:, 0], idx_TK[:, 1] = hot, -1
        weights_TK[:, 1] = 0
    elif num_tokens:
        idx_TK[0, 1], weights_TK[0, 1] = -1, 0  # dropped
    return x_TD.requires_grad_(), Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK)


def _own_function(experts: Experts) -> ExpertsFunction:
    """Return experts as a framework may have them: one matrix after another."""

    def run(rows_RD: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
        y_RD = torch.zeros_like(rows_RD)
        for index in range(experts.num_local_experts):
            (rows,) = torch.where(ids_R == index)
            y_RD = y_RD.index_add(0, rows, apply_expert(rows_RD[rows], experts, index=index))
        return y_RD

    return run


def _leaves(experts: Experts) -> list[torch.Tensor]:
    tensors = (experts.up_LGD, experts.down_LDF, experts.up_bias_LG, experts.down_bias_LD)
    return [tensor.requires_grad_() for tensor in tensors if tensor is not None]


def _compare(rank: int, num_ranks: int, load: str, strategy: str, own: bool, bias: bool) -> None:
    counts, hot = LOADS[load]
    num_local = NUM_EXPERTS // num_ranks
    whole = _make_experts(bias=bias)
    local = whole.split([num_local] * num_ranks)[rank]
    leaves = _leaves(local)
    for leaf in leaves:
        leaf.retain_grad()
    x_TD, routing = _make_inputs(rank, counts[rank % 2], hot)
    routing.topk_weights_TK.requires_grad_()
    experts = LocalExperts(
        num_local=num_local,
        function=_own_function(local),
        stacked=None if own else local,
        reason="they are mine" if own else "",
    )
    parallelism = ExpertParallelism(strategy, strict=True)
    y_TD = parallelism.run(x_TD, routing, experts, group=dist.group.WORLD)
    y_TD.square().sum().backward()

    # The same on one process: the tokens of all ranks, the experts of all ranks.
    reference = _make_experts(bias=bias)
    wanted_leaves = _leaves(reference)
    mine: tuple[torch.Tensor, Routing] | None = None
    for other in range(num_ranks):
        inputs = _make_inputs(other, counts[other % 2], hot)
        inputs[1].topk_weights_TK.requires_grad_()
        wanted_TD = moe_reference(*inputs, reference)
        wanted_TD.square().sum().backward()
        if other == rank:
            mine = inputs
            _assert_near(y_TD, wanted_TD)
    assert mine is not None
    _assert_near(x_TD.grad, mine[0].grad)
    _assert_near(routing.topk_weights_TK.grad, mine[1].topk_weights_TK.grad)
    for leaf, wanted in zip(leaves, wanted_leaves, strict=True):
        assert wanted.grad is not None
        _assert_near(leaf.grad, wanted.grad.split(num_local)[rank])


def _assert_near(value: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    assert value is not None
    assert wanted is not None
    assert relative_error(value, wanted) < RELATIVE_TOLERANCE[value.dtype]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("own", [False, True], ids=["stacked", "own"])
def test_values_and_gradients(load: str, own: bool, run_ranks: RunRanks) -> None:
    run_ranks(_compare, 2, load, "sequential", own, False)


@pytest.mark.parametrize("strategy", ["sequential", "chunked", "auto"])
def test_biases(strategy: str, run_ranks: RunRanks) -> None:
    run_ranks(_compare, 2, "random", strategy, False, True)


def _refused(
    rank: int, num_ranks: int, strategy: str, strict: bool, bias: bool
) -> tuple[list[str], str]:
    """Return what is said in two calls, and how the experts run."""
    num_local = NUM_EXPERTS // num_ranks
    local = _make_experts(bias=bias).split([num_local] * num_ranks)[rank]
    experts = LocalExperts(num_local=num_local, function=_own_function(local), stacked=local)
    parallelism = ExpertParallelism(strategy, strict=strict)
    x_TD, routing = _make_inputs(rank, 3, -1)
    group: Any = dist.group.WORLD
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            for _ in range(2):
                y_TD = parallelism.run(x_TD, routing, experts, group=group)
        except ValueError as error:
            return [str(error)], ""
    _assert_near(y_TD, moe_reference(x_TD, routing, _make_experts(bias=bias)))
    path = parallelism.describe(experts, top_k=TOP_K, group=group)
    return [str(warning.message) for warning in said], path


@pytest.mark.parametrize("strict", [False, True])
def test_biases_are_refused_by_fused(strict: bool, run_ranks: RunRanks) -> None:
    """Once, by the first rank, and run otherwise; or raised on all of them."""
    (first, path), (second, _) = run_ranks(_refused, 2, "fused", strict, True)
    problem = "strategy (fused) cannot run experts of this kind: expert_bias (true) must be false"
    assert len(first) == 1
    assert first[0].startswith(problem)
    assert len(second) == (1 if strict else 0)
    if not strict:
        assert path.startswith("sequential around their own arithmetic: expert_bias (true)")


def test_unaligned_experts_run_by_their_own_function() -> None:
    """Torch's grouped GEMM cannot read rows of 3 floats; the framework's own arithmetic can."""
    up_LGD, down_LDF = torch.ones(2, 6, 4), torch.ones(2, 4, 3)
    local = Experts(up_LGD=up_LGD, down_LDF=down_LDF)
    experts = LocalExperts(num_local=2, function=_own_function(local), stacked=local)
    routing = Routing(topk_idx_TK=torch.tensor([[1]]), topk_weights_TK=torch.tensor([[2.0]]))
    parallelism = ExpertParallelism("sequential")
    y_TD = parallelism.run(torch.ones(1, 4), routing, experts, group=None)
    _assert_near(y_TD, moe_reference(torch.ones(1, 4), routing, local))
    path = parallelism.describe(experts, top_k=1, group=None)
    assert "intermediate_size (3) must be a multiple of 4" in path


def test_autocast_and_mixed_dtypes() -> None:
    """Tokens take the dtype of the weights, or both that of autocast; the sums, the tokens'."""
    local = _make_experts(bias=False)
    x_TD, routing = _make_inputs(0, 6, -1)
    experts = LocalExperts(num_local=NUM_EXPERTS, function=_own_function(local), stacked=local)
    parallelism = ExpertParallelism("sequential")
    wanted_TD = parallelism.run(x_TD, routing, experts, group=None)
    y_TD = parallelism.run(x_TD.bfloat16(), routing, experts, group=None)
    assert y_TD.dtype == torch.bfloat16
    _assert_near(y_TD, wanted_TD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_TD = parallelism.run(x_TD, routing, experts, group=None)
    assert y_TD.dtype == torch.float32
    assert not torch.equal(y_TD, wanted_TD)
    _assert_near(y_TD.bfloat16(), wanted_TD)
