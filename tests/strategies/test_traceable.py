"""The traceable strategy equals the reference; tests/compiler compiles it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from halley.core.config import MoEConfig, RouterConfig
from halley.distributed.mesh import build_groups
from halley.moe.layer import MoELayer
from halley.strategies.traceable import TraceableStrategy, find_one_rank_problem, run_on_one_rank
from tests.strategies.layer_case import (
    LayerCase,
    check_values,
    make_experts,
    make_inputs,
    make_tokens,
    train,
)
from tests.strategies.test_values import check_layers


CASES = {
    "top-1": LayerCase(num_tokens_W=(7, 12), top_k=1, skew="one-hot", seed=1),
    "top-4": LayerCase(num_tokens_W=(7, 12), num_experts=16, top_k=4, dtype=torch.bfloat16),
    "gelu, empty expert": LayerCase(num_tokens_W=(11, 6), activation="gelu", skew="empty-expert"),
    "dropped slots": LayerCase(num_tokens_W=(11, 6), dropped=0.4, seed=3),
    "all dropped": LayerCase(num_tokens_W=(11, 6), dropped=1.0, seed=3),
    "a rank without tokens": LayerCase(num_tokens_W=(0, 9), seed=2),
}


def test_values_on_two_ranks_and_on_one(run_ranks) -> None:
    run_ranks(check_layers, 2, list(CASES.values()), "functional")
    run_ranks(check_layers, 1, [LayerCase(num_tokens_W=(9,))], "functional")


def _check_deduplicated(rank: int, num_ranks: int, cases: list[LayerCase]) -> None:
    """Compare values with the reference, and the rows sent with the (token, rank) pairs."""
    sent: list[int] = []
    exchange = TraceableStrategy._exchange

    def counted(self: Any, name: str, rows: torch.Tensor, *splits: Any) -> torch.Tensor:
        if name == "dispatch":
            sent.append(len(rows))
        return exchange(self, name, rows, *splits)

    for case in cases:
        strategy = TraceableStrategy(dist.group.WORLD, tp_size=case.tp_size, deduplicated=True)
        with mock.patch.object(TraceableStrategy, "_exchange", counted):
            check_values(train(strategy.forward, case, rank), case, rank)
        idx_TK = make_tokens(case, rank)[1].topk_idx_TK
        experts_per_group = case.num_experts * case.tp_size // num_ranks
        chosen = [set((row[row >= 0] // experts_per_group).tolist()) for row in idx_TK]
        assert sent.pop() == sum(map(len, chosen)) * case.tp_size, case


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_deduplicated_rows_have_the_values_of_the_reference(run_ranks, num_ranks: int) -> None:
    cases = [*CASES.values(), LayerCase(num_tokens_W=(9, 5), tp_size=2, top_k=3, dropped=0.2)]
    if num_ranks == 4:
        wide = LayerCase(num_tokens_W=(9, 5, 14, 0), num_experts=16, top_k=8)
        cases = [wide, replace(wide, top_k=2, tp_size=2)]
    if num_ranks == 1:
        cases = [LayerCase(num_tokens_W=(9,))]
    run_ranks(_check_deduplicated, num_ranks, cases)


BOUNDED = [
    LayerCase(num_tokens_W=(9, 9), num_experts=16, top_k=4, dtype=torch.bfloat16),
    LayerCase(num_tokens_W=(9, 9), top_k=1, seed=1),
    LayerCase(num_tokens_W=(9, 9), activation="gelu", skew="empty-expert"),
    LayerCase(num_tokens_W=(9, 9), dropped=0.4, seed=3),
]


def _check_bounded(rank: int, num_ranks: int) -> None:
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    for case in BOUNDED:
        strategy = TraceableStrategy(dist.group.WORLD, deduplicated=True, max_load=2.0)
        check_values(train(strategy.forward, case, rank), case, rank)
    torch.use_deterministic_algorithms(False)


def test_bounded_rows_have_the_values_of_the_reference(run_ranks) -> None:
    run_ranks(_check_bounded, 2)


def _run_overfull(rank: int, num_ranks: int, top_k: int) -> tuple[bool, bool]:
    """Send all tokens of all ranks to rank 0; return whether any output, and whether all are NaN.

    With top-1, 8 rows to rank 0 exceed the 5 of a message. With top-2, 8 rows are within a
    message, but the 32 slots of rank 0 exceed its 20.
    """
    x_TD, routing, experts = make_inputs(
        LayerCase(num_tokens_W=(8, 8), num_experts=4, top_k=top_k), rank
    )
    idx_TK = torch.arange(top_k).expand(8, top_k).contiguous()
    strategy = TraceableStrategy(dist.group.WORLD, deduplicated=True, max_load=1.2)
    y_TD = strategy.forward(x_TD, replace(routing, topk_idx_TK=idx_TK), experts)
    return bool(y_TD.isnan().any()), bool(y_TD.isnan().all())


@pytest.mark.parametrize("top_k", [1, 2])
def test_more_rows_than_max_load_allows_make_outputs_nan(run_ranks, top_k: int) -> None:
    assert run_ranks(_run_overfull, 2, top_k) == [(True, True)] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fixed_sizes": True}, r"fixed_sizes \(True\) must be False with deduplicated"),
        ({"max_load": 0.5}, r"max_load \(0.5\) must be 0, or finite and at least 1"),
        ({"max_load": 1.5, "tp_size": 2}, r"tp_size \(2\) must be 1 with max_load"),
    ],
)
def test_sizes_that_exclude_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    two_ranks = mock.patch("halley.strategies.traceable.rank_and_size", return_value=(0, 2))
    with two_ranks, pytest.raises(ValueError, match=message):
        TraceableStrategy(None, deduplicated=True, **options)


def _fixed_equals_exact(rank: int, num_ranks: int, router: RouterConfig, top_k: int) -> list[bool]:
    """Return for output and all gradients whether fixed sizes give the bits of exact sizes."""
    groups = build_groups(num_ranks, device_type="cpu")
    sizes: dict[str, Any] = {"num_experts": 3 * num_ranks, "top_k": top_k, "intermediate_size": 32}
    config = MoEConfig(**sizes, activation="gelu", router=router)
    found: list[list[Any]] = []
    for fixed_sizes in (False, True):
        torch.manual_seed(rank)
        strategy = TraceableStrategy(groups.ep, fixed_sizes=fixed_sizes)
        layer = MoELayer(config, 16, strategy=strategy, groups=groups)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        x_TD = torch.randn(33, 16, requires_grad=True)
        out = layer(x_TD)
        (out.y.square().sum() + out.router_loss).backward()
        found.append([out.y, x_TD.grad, *(each.grad for each in layer.parameters())])
    return [torch.equal(*pair) for pair in zip(*found, strict=True)]


ROUTERS = {
    1: RouterConfig(kind="switch", capacity_factor=0.5),
    2: RouterConfig(kind="top2", capacity_factor=1.5),
}


@pytest.mark.parametrize("top_k", [1, 2])
def test_fixed_sizes_give_the_bits_of_exact_sizes(run_ranks, top_k: int) -> None:
    for equal in run_ranks(_fixed_equals_exact, 2, ROUTERS[top_k], top_k):
        assert equal == [True] * 5


@pytest.mark.parametrize(
    ("num_tokens", "capacity", "name"), [(4, None, "capacity_factor"), (0, 2, "tokens")]
)
def test_fixed_sizes_need_a_capacity_and_tokens(
    num_tokens: int, capacity: int | None, name: str
) -> None:
    x_TD, routing, experts = make_inputs(LayerCase(num_tokens_W=(num_tokens,)), 0)
    strategy = TraceableStrategy(None, fixed_sizes=True)
    with pytest.raises(ValueError, match=rf"{name} \(0\) .*must be .* with fixed_sizes"):
        strategy.forward(x_TD, replace(routing, capacity=capacity), experts)


def _run_with_other_capacity(rank: int, num_ranks: int) -> None:
    x_TD, routing, experts = make_inputs(LayerCase(num_tokens_W=(4, 4)), rank)
    group = build_groups(num_ranks, device_type="cpu").ep
    strategy = TraceableStrategy(group, fixed_sizes=True)
    message = r"capacity \(4 on rank 0, 5 on rank 1\) must be the same on all ranks"
    with pytest.raises(ValueError, match=message):
        strategy.forward(x_TD, replace(routing, capacity=4 + rank), experts)


def test_ranks_with_other_capacities_are_named(run_ranks) -> None:
    run_ranks(_run_with_other_capacity, 2)


def test_biases_are_refused() -> None:
    inputs = make_inputs(LayerCase(num_tokens_W=(4,), bias=True), 0)
    strategy = TraceableStrategy(None)
    assert strategy.find_problem(inputs.experts, top_k=2) == "experts have biases"
    with pytest.raises(ValueError, match=r"expert_bias \(true\) must be false for the functional"):
        strategy.forward(*inputs)


@pytest.fixture
def undefined_is_nan() -> Iterator[None]:
    """Make torch fill uninitialized memory with NaN, so that a read of it is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _run_one_rank(case: LayerCase, *, compiled: bool) -> dict[str, torch.Tensor]:
    run: Any = run_on_one_rank
    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    return train(run, case, 0)


@pytest.mark.usefixtures("undefined_is_nan")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_one_rank_equals_the_reference(case: LayerCase) -> None:
    case = replace(case, num_tokens_W=case.num_tokens_W[:1])
    check_values(_run_one_rank(case, compiled=False), case, 0)


def test_one_rank_compiles_to_one_graph_with_equal_bits() -> None:
    case = replace(CASES["dropped slots"], num_tokens_W=(11,))
    eager, compiled = (_run_one_rank(case, compiled=compiled) for compiled in (False, True))
    assert len(eager) == 5
    assert all(torch.equal(compiled[name], eager[name]) for name in eager)
    torch.compiler.reset()


def test_problems_of_one_rank_are_named() -> None:
    case = LayerCase(num_tokens_W=(4,))
    experts = make_experts(case)
    assert find_one_rank_problem(experts) == ""
    assert find_one_rank_problem(make_experts(replace(case, bias=True))) == "experts have biases"
    odd = replace(experts, down_LDF=experts.down_LDF[:, :, :6])
    problem = "intermediate_size (6) must be a multiple of 4 for"
    assert find_one_rank_problem(odd).startswith(problem)
