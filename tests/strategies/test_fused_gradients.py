"""Gradients of the fused strategy equal the reference; all variants have the same bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from halley.core.routing import route_to_shards
from halley.core.types import Save
from halley.fused.buffers import Workspaces
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import (
    CPU,
    LayerCase,
    assert_close,
    assert_same,
    build,
    check_values,
    expected,
    gradients,
    local_experts_of,
    make_tokens,
    run_forward,
    train,
)


# Pairs of ``fused`` and ``save``.
WAYS: tuple[tuple[bool, Save], ...] = (
    (True, "all"),
    (False, "inputs"),
    (True, "recompute"),
    (False, "all"),
)


def _make_workspaces(num_ranks: int, tp_size: int = 1) -> Workspaces:
    return Workspaces(dist.group.WORLD if num_ranks > 1 else None, CPU, tp_size=tp_size)


def _check(rank: int, num_ranks: int, case: LayerCase, ways: tuple[tuple[bool, Save], ...]) -> None:
    workspaces = _make_workspaces(num_ranks, case.tp_size)
    first: dict[str, torch.Tensor] = {}
    for fused, save in ways:
        got = train(build(workspaces, fused=fused, save=save).forward, case, rank)
        first = first or got
        assert_same(got, first, (fused, save, case))
    check_values(first, case, rank)
    workspaces.close()


def _expect_too_few(rank: int, num_ranks: int) -> None:
    workspaces = _make_workspaces(num_ranks)
    layer = build(workspaces, save="inputs")
    for seed, expected_copies in enumerate((0, 1000)):
        for workspace in workspaces.all():
            workspace.plan_sizes.by_layer.clear()
            num_copies = expected_copies if rank == 0 else 64
            workspace.plan_sizes.last = workspace.plan_sizes.last._replace(num_copies=num_copies)
        case = LayerCase(num_tokens_W=(70, 90), num_experts=4, seed=seed)
        check_values(train(layer.forward, case, rank), case, rank)
    workspaces.close()


def test_forward_runs_again_if_it_saves_more_rows_than_expected(run_ranks: RunRanks) -> None:
    """On both ranks, or on rank 1 alone while rank 0 waits for it."""
    run_ranks(_expect_too_few, 2)


TWO = LayerCase(num_tokens_W=(7, 12), num_experts=4)
SKEWED = replace(TWO, skew="zipf:1.5", seed=1)
SHARED = replace(SKEWED, num_tokens_W=(4, 0, 3, 2), tp_size=2, top_k=3, dropped=0.2, seed=7)
FEW = LayerCase(num_tokens_W=(0, 9), num_experts=2, top_k=1)
CASES = {
    "bfloat16": (WAYS, replace(SKEWED, top_k=4, dtype=torch.bfloat16)),
    "float16": (WAYS[1:3], replace(TWO, activation="gelu", dropped=0.4, dtype=torch.float16)),
    "one takes all": (WAYS[1:3], replace(TWO, top_k=1, skew="one-hot", seed=2)),
    "four ranks": (WAYS[:2], replace(SKEWED, num_tokens_W=(6, 0, 3, 5))),
    "all ranks share all experts": (WAYS[:3], replace(SKEWED, num_tokens_W=(7, 5), tp_size=2)),
    "pairs share experts": (WAYS[1:3], replace(SHARED, activation="gelu", dtype=torch.bfloat16)),
    "a rank without tokens": (WAYS[:3], FEW),
    "ranks without tokens": (WAYS[:3], replace(FEW, num_tokens_W=(0, 0))),
    "no slot has an expert": (WAYS[1:3], replace(FEW, num_tokens_W=(3, 4), dropped=1.0)),
    "one rank without tokens": (WAYS[:2], replace(FEW, num_tokens_W=(0,))),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_bits(run_ranks: RunRanks, name: str) -> None:
    ways, case = CASES[name]
    run_ranks(_check, len(case.num_tokens_W), case, ways)


def _compare_with_shards(rank: int, num_ranks: int, case: LayerCase) -> None:
    """Compare with the definition: shards are experts, of which a token has twice as many."""
    experts = local_experts_of(case, rank)
    x_TD, routing, grad_TD = make_tokens(case, rank)
    shards = route_to_shards(routing, num_local=experts.num_local_experts, tp_size=case.tp_size)
    found: list[tuple[torch.Tensor, ...]] = []
    for tp_size, routed in ((case.tp_size, routing), (1, shards)):
        workspaces = _make_workspaces(num_ranks, tp_size)
        y_TD = build(workspaces).forward(x_TD, routed, experts)
        leaves = (x_TD, experts.up_LGD, experts.down_LDF, routing.topk_weights_TK)
        found.append((y_TD, *torch.autograd.grad(y_TD, leaves, grad_TD)))
        workspaces.close()
    for name, got, want in zip(("y", "x", "up", "down", "weights"), *found, strict=True):
        assert torch.equal(got, want), name


def test_shards_have_the_bits_of_separate_experts(run_ranks: RunRanks) -> None:
    case = LayerCase(num_tokens_W=(6, 2), num_experts=3, top_k=3, tp_size=2, seed=9)
    run_ranks(_compare_with_shards, 2, case)


def _run_in_flight(
    rank: int, num_ranks: int, cases: list[LayerCase], order: list[int], save: Save
) -> list[int]:
    """Run forward of all cases, then backward in the given order; return the token capacities.

    The first case also runs forward without gradients in between.
    """
    workspaces = _make_workspaces(num_ranks)
    layer = build(workspaces, save=save)
    calls = [run_forward(layer.forward, case, rank) for case in cases]
    with torch.no_grad():
        assert torch.equal(run_forward(layer.forward, cases[0], rank).y_TD, calls[0].y_TD)
    for index in order:
        calls[index].y_TD.backward(calls[index].grad_TD)
    for case, call in zip(cases, calls, strict=True):
        check_values(call.values(), case, rank)
    capacities = [workspace.context().send_buffer.local.shape[1] for workspace in workspaces.all()]
    workspaces.close()
    return capacities


def test_backward_in_another_order_than_forward(run_ranks: RunRanks) -> None:
    """Layers of two shapes; both layers of the first shape have the same buffers."""
    cases = [
        LayerCase(num_tokens_W=(9, 4), num_experts=4, seed=1),
        LayerCase(num_tokens_W=(3, 8), num_experts=4, seed=2),
        LayerCase(num_tokens_W=(5, 7), num_experts=2, top_k=1, dtype=torch.bfloat16, seed=3),
    ]
    assert run_ranks(_run_in_flight, 2, cases, [2, 1, 0], "all") == [[9, 7]] * 2


@pytest.mark.parametrize("save", ["inputs", "recompute"])
def test_buffers_grow_between_a_forward_and_its_backward(run_ranks: RunRanks, save: Save) -> None:
    """Backward uses plans that were made for smaller buffers."""
    tokens = [(3, 2), (5, 4), (70, 6)]
    cases = [LayerCase(num_tokens_W=t, num_experts=2, seed=i) for i, t in enumerate(tokens)]
    assert run_ranks(_run_in_flight, 2, cases, [1, 0, 2], save) == [[128]] * 2


def _accumulate(rank: int, num_ranks: int, save: Save) -> None:
    layer = build(_make_workspaces(num_ranks), save=save)
    tokens = (9, 4)[:num_ranks], (3, 8)[:num_ranks]
    cases = [LayerCase(num_tokens_W=each, num_experts=4) for each in tokens]
    experts = local_experts_of(cases[0], rank)
    for case in cases:
        x_TD, routing, grad_TD = make_tokens(case, rank)
        layer.forward(x_TD, routing, experts).backward(grad_TD)
    first, second = (expected(case, rank) for case in cases)
    for name, grad in gradients(experts).items():
        want = first[f"{name}.grad"] + second[f"{name}.grad"]
        assert_close(grad, want, name)

    call = run_forward(layer.forward, cases[0], rank)
    call.y_TD.backward(call.grad_TD, retain_graph=True)
    once = {name: value.clone() for name, value in call.values().items()}
    call.y_TD.backward(call.grad_TD)
    for name, value in call.values().items():
        assert torch.equal(value, once[name] if name == "y" else 2 * once[name]), name
    layer.workspaces.close()


@pytest.mark.parametrize(("num_ranks", "save"), [(2, "all"), (1, "recompute")])
def test_gradients_of_two_passes_add_up(run_ranks: RunRanks, num_ranks: int, save: Save) -> None:
    run_ranks(_accumulate, num_ranks, save)


def _run_checkpointed(rank: int, num_ranks: int, use_reentrant: bool) -> None:
    """Compare two layers in a row, with and without activation checkpointing, bit for bit."""
    workspaces = _make_workspaces(num_ranks)
    layers = [build(workspaces, save=save) for save in ("all", "recompute")]
    case = LayerCase(num_tokens_W=(9, 4)[:num_ranks], num_experts=4)

    def run_layers(y_TD: Any, *args: Any) -> torch.Tensor:
        for layer in layers:
            y_TD = layer.forward(y_TD, *args)
        return y_TD

    def run_checkpointed(y_TD: Any, *args: Any) -> torch.Tensor:
        for layer in layers:
            y_TD = checkpoint(layer.forward, y_TD, *args, use_reentrant=use_reentrant)
        return y_TD

    want, got = train(run_layers, case, rank), train(run_checkpointed, case, rank)
    assert len(got) == len(want) == 5
    assert_same(got, want, "checkpointed")
    workspaces.close()


@pytest.mark.parametrize(("num_ranks", "use_reentrant"), [(2, False), (1, True)])
def test_checkpointing_does_not_change_bits(
    run_ranks: RunRanks, num_ranks: int, use_reentrant: bool
) -> None:
    run_ranks(_run_checkpointed, num_ranks, use_reentrant)
