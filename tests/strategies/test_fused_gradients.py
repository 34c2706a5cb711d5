"""Gradients of the fused strategy: the reference's values, the same bits however they are made."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from halley.core.sharding import route_to_shards
from halley.core.types import Save
from halley.fused.buffer_cache import Workspaces
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from tests.rank_pool import RunRanks
from tests.strategies.fused_case import CPU, SAVES, assert_same, build
from tests.strategies.layer_case import (
    Call,
    LayerCase,
    expected,
    gradients,
    local_experts_of,
    make_tokens,
    run_forward,
)


ALL_WAYS = tuple((fused, save) for save in SAVES for fused in (True, False))
WAYS: tuple[tuple[bool, Save], ...] = ((True, "all"), (False, "inputs"), (True, "recompute"))


def _make_workspaces(num_ranks: int, tp_size: int = 1) -> Workspaces:
    return Workspaces(dist.group.WORLD if num_ranks > 1 else None, CPU, tp_size=tp_size)


def _assert_values(got: dict[str, torch.Tensor], case: LayerCase, rank: int) -> None:
    want = expected(case, rank)
    assert list(got) == list(want)
    for name, value in want.items():
        error = relative_error(got[name], value)
        assert error <= RELATIVE_TOLERANCE[case.dtype], f"{name} is off by {error:.2e} for {case}"


def _check(
    rank: int, num_ranks: int, cases: list[LayerCase], ways: tuple[tuple[bool, Save], ...]
) -> None:
    workspaces = _make_workspaces(num_ranks, cases[0].tp_size)
    for case in cases:
        first: dict[str, torch.Tensor] = {}
        for fused, save in ways:
            call = run_forward(build(workspaces, fused=fused, save=save).forward, case, rank)
            call.y_TD.backward(call.grad_TD)
            got = call.values()
            if first:
                assert_same(got, first, (fused, save, case))
            else:
                _assert_values(got, case, rank)
                first = got
    workspaces.close()


def _expect_too_few(rank: int, num_ranks: int) -> None:
    workspaces = _make_workspaces(num_ranks)
    layer = build(workspaces, save="inputs")
    for seed, expected_copies in enumerate((0, 1, 1000)):
        for workspace in workspaces.all():
            workspace._last_by_layer.clear()
            num_copies = expected_copies if rank == 0 else 64
            workspace._last = dataclasses.replace(workspace._last, num_copies=num_copies)
        case = LayerCase(num_tokens_W=(70, 90), num_experts=4, seed=seed)
        call = run_forward(layer.forward, case, rank)
        call.y_TD.backward(call.grad_TD)
        _assert_values(call.values(), case, rank)
    workspaces.close()


def test_more_rows_to_keep_than_expected(run_ranks: RunRanks) -> None:
    """On one rank, or on both: they run again, while peers wait."""
    run_ranks(_expect_too_few, 2)


def _cases(num_tokens_W: tuple[int, ...], tp_size: int = 1) -> list[LayerCase]:
    few = {"num_tokens_W": num_tokens_W, "num_experts": 4, "tp_size": tp_size}
    return [
        LayerCase(**few, top_k=4, skew="zipf:1.5", dtype=torch.bfloat16, seed=1),
        LayerCase(**few, top_k=1, skew="one-hot", seed=2),
        LayerCase(**few, skew="empty-expert", dtype=torch.float16, seed=3),
        LayerCase(**few, activation="gelu", dropped=0.4, dtype=torch.bfloat16, seed=4),
    ]


def test_values_and_bits(run_ranks: RunRanks) -> None:
    first, *others = _cases((7, 12))
    run_ranks(_check, 2, [first], ALL_WAYS)
    run_ranks(_check, 2, others, WAYS)


def test_values_and_bits_on_four_ranks(run_ranks: RunRanks) -> None:
    case = LayerCase(num_tokens_W=(6, 0, 3, 5), num_experts=4, skew="zipf:1.5", seed=5)
    run_ranks(_check, 4, [case], WAYS)


def test_ranks_that_share_all_experts(run_ranks: RunRanks) -> None:
    run_ranks(_check, 2, _cases((7, 12), tp_size=2)[:2], WAYS)
    case = LayerCase(num_tokens_W=(6, 0, 3, 5), num_experts=2, tp_size=4, seed=6)
    run_ranks(_check, 4, [case], WAYS[:2])


def test_sets_of_ranks_that_share_experts(run_ranks: RunRanks) -> None:
    few = {"num_tokens_W": (6, 0, 3, 5), "num_experts": 4, "tp_size": 2}
    cases = [
        LayerCase(**few, top_k=3, skew="zipf:1.5", dropped=0.2, dtype=torch.bfloat16, seed=7),
        LayerCase(**few, top_k=1, skew="one-hot", activation="gelu", seed=8),
    ]
    run_ranks(_check, 4, cases, WAYS)


def _compare_with_shards(rank: int, num_ranks: int, case: LayerCase) -> None:
    """Shards as experts of their own, of which a token has twice as many, are the definition."""
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


def test_shards_are_experts(run_ranks: RunRanks) -> None:
    case = LayerCase(num_tokens_W=(6, 2, 3, 5), num_experts=4, top_k=3, tp_size=2, seed=9)
    run_ranks(_compare_with_shards, 4, case)


def test_ranks_without_tokens_and_slots_without_experts(run_ranks: RunRanks) -> None:
    cases = [
        LayerCase(num_tokens_W=(0, 9), num_experts=4),
        LayerCase(num_tokens_W=(0, 0), num_experts=4),
        LayerCase(num_tokens_W=(3, 4), num_experts=2, dropped=1.0),
    ]
    run_ranks(_check, 2, cases, WAYS)
    run_ranks(_check, 1, [LayerCase(num_tokens_W=(0,), num_experts=2)], WAYS)


def _run_in_flight(
    rank: int, num_ranks: int, cases: list[LayerCase], order: list[int], save: Save
) -> list[int]:
    """Run all forward, one of them without gradients too, then backward; return the room."""
    workspaces = _make_workspaces(num_ranks)
    layer = build(workspaces, save=save)
    calls = [run_forward(layer.forward, case, rank) for case in cases]
    with torch.no_grad():
        assert torch.equal(run_forward(layer.forward, cases[0], rank).y_TD, calls[0].y_TD)
    for index in order:
        calls[index].y_TD.backward(calls[index].grad_TD)
    for case, call in zip(cases, calls, strict=True):
        _assert_values(call.values(), case, rank)
    capacities = [workspace.context().send_buffer.local.shape[1] for workspace in workspaces.all()]
    workspaces.close()
    return capacities


@pytest.mark.parametrize("save", ["all", "recompute"])
def test_layers_of_two_shapes_in_flight(run_ranks: RunRanks, save: Save) -> None:
    cases = [
        LayerCase(num_tokens_W=(9, 4), num_experts=4, seed=1),
        LayerCase(num_tokens_W=(3, 8), num_experts=4, seed=2),
        LayerCase(num_tokens_W=(5, 7), num_experts=2, top_k=1, dtype=torch.bfloat16, seed=3),
    ]
    assert run_ranks(_run_in_flight, 2, cases, [2, 1, 0], save) == [[9, 7]] * 2


@pytest.mark.parametrize("save", ["inputs", "recompute"])
def test_more_tokens_between_a_forward_and_its_backward(run_ranks: RunRanks, save: Save) -> None:
    """Buffers grow twice while plans wait that were made for smaller ones."""
    tokens = [(3, 2), (5, 30), (1, 4), (70, 6)]
    cases = [LayerCase(num_tokens_W=t, num_experts=2, seed=i) for i, t in enumerate(tokens)]
    assert run_ranks(_run_in_flight, 2, cases, [1, 0, 3, 2], save) == [[128]] * 2


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
        assert relative_error(grad, want) <= RELATIVE_TOLERANCE[torch.float32], name

    call = run_forward(layer.forward, cases[0], rank)
    call.y_TD.backward(call.grad_TD, retain_graph=True)
    once = {name: value.clone() for name, value in call.values().items()}
    call.y_TD.backward(call.grad_TD)
    for name, value in call.values().items():
        assert torch.equal(value, once[name] if name == "y" else 2 * once[name]), name
    layer.workspaces.close()


@pytest.mark.parametrize(("num_ranks", "save"), [(2, "all"), (1, "inputs"), (1, "recompute")])
def test_gradients_add_up(run_ranks: RunRanks, num_ranks: int, save: Save) -> None:
    run_ranks(_accumulate, num_ranks, save)


def _run_checkpointed(rank: int, num_ranks: int, use_reentrant: bool) -> None:
    """Layers in a row, forward again in backward: the bits of the same without."""
    workspaces = _make_workspaces(num_ranks)
    layers = [build(workspaces, save=save) for save in SAVES]
    case = LayerCase(num_tokens_W=(9, 4)[:num_ranks], num_experts=4)

    def run(*, again: bool) -> dict[str, torch.Tensor]:
        x_TD, routing, grad_TD = make_tokens(case, rank)
        experts = local_experts_of(case, rank)
        y_TD = x_TD
        for layer in layers:
            if again:
                y_TD = checkpoint(
                    layer.forward, y_TD, routing, experts, use_reentrant=use_reentrant
                )
            else:
                y_TD = layer.forward(y_TD, routing, experts)
            assert isinstance(y_TD, torch.Tensor)
        y_TD.backward(grad_TD)
        leaves = {"x": x_TD, "weights": routing.topk_weights_TK, "up_LGD": experts.up_LGD}
        leaves["down_LDF"] = experts.down_LDF
        return Call(y_TD=y_TD, leaves=leaves, grad_TD=grad_TD).values()

    want, got = run(again=False), run(again=True)
    assert len(got) == len(want) == 5
    assert_same(got, want, "checkpointed")
    workspaces.close()


@pytest.mark.parametrize(("num_ranks", "use_reentrant"), [(2, False), (1, True)])
def test_checkpointed_layers(run_ranks: RunRanks, num_ranks: int, use_reentrant: bool) -> None:
    run_ranks(_run_checkpointed, num_ranks, use_reentrant)
