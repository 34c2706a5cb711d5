"""Gradients of the fused strategy: the reference's values, the same bits however they are made."""

import dataclasses
import gc
from collections.abc import Callable
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from halley.core.sharding import route_to_shards
from halley.core.timeline import Recorder
from halley.core.tolerance import RELATIVE_TOLERANCE, relative_error
from halley.core.types import Save
from halley.ops.workspaces import CPU_KNOBS, Workspaces
from halley.strategies.fused import FusedStrategy
from tests.rank_pool import RunRanks
from tests.strategies.layer_case import (
    Call,
    LayerCase,
    expected,
    gradients,
    local_experts_of,
    make_tokens,
    run_forward,
)


CPU = torch.device("cpu")
SAVES: tuple[Save, ...] = get_args(Save)
ALL_WAYS = tuple((fused, save) for save in SAVES for fused in (True, False))
WAYS: tuple[tuple[bool, Save], ...] = ((True, "all"), (False, "inputs"), (True, "recompute"))


def _build(workspaces: Workspaces, *, fused: bool = True, save: Save = "all") -> FusedStrategy:
    return FusedStrategy(workspaces, recorder=Recorder(CPU, enabled=False), fused=fused, save=save)


def _make_workspaces(num_ranks: int, tp_size: int = 1) -> Workspaces:
    return Workspaces(dist.group.WORLD if num_ranks > 1 else None, CPU, tp_size=tp_size)


def _assert_values(got: dict[str, torch.Tensor], case: LayerCase, rank: int) -> None:
    want = expected(case, rank)
    assert list(got) == list(want)
    for name, value in want.items():
        error = relative_error(got[name], value)
        assert error <= RELATIVE_TOLERANCE[case.dtype], f"{name} is off by {error:.2e} for {case}"


def _assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: object) -> None:
    for name, value in want.items():
        assert torch.equal(got[name], value), f"{name} differs, {what}"


def _check(
    rank: int, num_ranks: int, cases: list[LayerCase], ways: tuple[tuple[bool, Save], ...]
) -> None:
    workspaces = _make_workspaces(num_ranks, cases[0].tp_size)
    for case in cases:
        first: dict[str, torch.Tensor] = {}
        for fused, save in ways:
            call = run_forward(_build(workspaces, fused=fused, save=save).forward, case, rank)
            call.y_TD.backward(call.grad_TD)
            got = call.values()
            if first:
                _assert_same(got, first, (fused, save, case))
            else:
                _assert_values(got, case, rank)
                first = got
    workspaces.close()


def _expect_too_few(rank: int, num_ranks: int) -> None:
    workspaces = _make_workspaces(num_ranks)
    layer = _build(workspaces, save="inputs")
    for seed, expected_sends in enumerate((0, 1, 1000)):
        for workspace in workspaces.all():
            workspace._last_of.clear()
            num_sends = expected_sends if rank == 0 else 64
            workspace._last = dataclasses.replace(workspace._last, num_sends=num_sends)
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


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_values_and_bits(run_ranks: RunRanks, num_ranks: int) -> None:
    first, *others = _cases((7, 12)[:num_ranks])
    run_ranks(_check, num_ranks, [first], ALL_WAYS)
    run_ranks(_check, num_ranks, others, WAYS)


def test_values_and_bits_on_four_ranks(run_ranks: RunRanks) -> None:
    case = LayerCase(num_tokens_W=(6, 0, 3, 5), num_experts=4, skew="zipf:1.5", seed=5)
    run_ranks(_check, 4, [case], WAYS)


def test_ranks_that_share_all_experts(run_ranks: RunRanks) -> None:
    run_ranks(_check, 2, _cases((7, 12), tp_size=2), WAYS)
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
        y_TD = _build(workspaces).forward(x_TD, routed, experts)
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
    layer = _build(workspaces, save=save)
    calls = [run_forward(layer.forward, case, rank) for case in cases]
    with torch.no_grad():
        assert torch.equal(run_forward(layer.forward, cases[0], rank).y_TD, calls[0].y_TD)
    for index in order:
        calls[index].y_TD.backward(calls[index].grad_TD)
    for case, call in zip(cases, calls, strict=True):
        _assert_values(call.values(), case, rank)
    room = [workspace.stage.local.shape[1] for workspace in workspaces.all()]
    workspaces.close()
    return room


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
    layer = _build(_make_workspaces(num_ranks), save=save)
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
    layers = [_build(workspaces, save=save) for save in SAVES]
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
    _assert_same(got, want, "checkpointed")
    workspaces.close()


@pytest.mark.parametrize(("num_ranks", "use_reentrant"), [(2, False), (1, True)])
def test_checkpointed_layers(run_ranks: RunRanks, num_ranks: int, use_reentrant: bool) -> None:
    run_ranks(_run_checkpointed, num_ranks, use_reentrant)


ALONE = LayerCase(num_tokens_W=(8,), num_experts=4)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values, column by column in memory."""
    return tensor.detach().t().contiguous().t()


def _amid(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values at an address that no vector load takes."""
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("make", [_strided, _amid])
def test_gradients_of_the_output_as_they_come(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    layer = _build(Workspaces(None, CPU))
    plain, other = (run_forward(layer.forward, ALONE, 0) for _ in range(2))
    plain.y_TD.backward(plain.grad_TD)
    other.y_TD.backward(make(other.grad_TD))
    _assert_same(other.values(), plain.values(), make.__name__)


def test_expanded_gradient_of_the_output() -> None:
    """That of a sum is one number, seen from everywhere."""
    layer = _build(Workspaces(None, CPU))
    plain, summed = (run_forward(layer.forward, ALONE, 0) for _ in range(2))
    plain.y_TD.backward(torch.ones_like(plain.y_TD))
    summed.y_TD.sum().backward()
    _assert_same(summed.values(), plain.values(), "of a sum")


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("name", ["x", "weights"])
def test_strided_tokens_and_routing_weights(name: str, save: Save) -> None:
    layer = _build(Workspaces(None, CPU), save=save)
    x_TD, routing, grad_TD = make_tokens(ALONE, 0)
    leaf = _strided(x_TD if name == "x" else routing.topk_weights_TK).requires_grad_()
    if name == "x":
        x_TD = leaf
    else:
        routing = dataclasses.replace(routing, topk_weights_TK=leaf)
    layer.forward(x_TD, routing, local_experts_of(ALONE, 0)).backward(grad_TD)
    assert leaf.grad is not None
    error = relative_error(leaf.grad, expected(ALONE, 0)[f"{name}.grad"])
    assert error <= RELATIVE_TOLERANCE[torch.float32]


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("where", ["alone", "behind others", "before others"])
def test_what_is_kept_may_come_back_in_other_memory(where: str, save: Save) -> None:
    """As hooks that offload it do, or pack tensors of a layer into one buffer."""

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        before, after = {"behind others": (16, 0), "before others": (0, 48)}.get(where, (0, 0))
        buffer = torch.full((before + tensor.numel() + after,), 7).to(tensor.dtype)
        return buffer[before : before + tensor.numel()].copy_(tensor.flatten()).view(tensor.shape)

    case = LayerCase(num_tokens_W=(21,))
    strategy = _build(_make_workspaces(1), save=save)
    values: list[dict[str, torch.Tensor]] = []
    for hook in (lambda tensor: tensor, unpack):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), hook):
            call = run_forward(strategy.forward, case, 0)
            call.y_TD.backward(call.grad_TD)
        values.append(call.values())
    _assert_same(values[1], values[0], where)


@pytest.mark.parametrize("save", SAVES)
def test_what_is_kept_may_come_back_as_parts_of_one_buffer(save: Save) -> None:
    """As from an arena that two layers share: what one no longer needs is not all there is."""
    arena, end = torch.empty(1 << 20, dtype=torch.uint8), 0

    def pack(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        nonlocal end
        begin, end = end, end + -(-tensor.nbytes // 64) * 64
        part = arena[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        part.copy_(tensor)
        return lambda: part

    strategy = _build(_make_workspaces(1), save=save)
    values: list[dict[str, torch.Tensor]] = []
    for hooks in ((lambda t: t, lambda t: t), (pack, lambda unpack: unpack())):
        x_TD, routing, grad_TD = make_tokens(ALONE, 0)
        experts = local_experts_of(ALONE, 0)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            y_TD = strategy.forward(strategy.forward(x_TD, routing, experts), routing, experts)
        y_TD.backward(grad_TD)
        leaves = {"x": x_TD, "up": experts.up_LGD, "down": experts.down_LDF}
        assert all(leaf.grad is not None for leaf in leaves.values())
        values.append({name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None})
    _assert_same(values[1], values[0], save)


def test_backward_when_the_layer_is_gone() -> None:
    x_TD, routing, grad_TD = make_tokens(ALONE, 0)
    y_TD = _build(Workspaces(None, CPU)).forward(x_TD, routing, local_experts_of(ALONE, 0))
    gc.collect()
    y_TD.backward(grad_TD)
    assert x_TD.grad is not None
    error = relative_error(x_TD.grad, expected(ALONE, 0)["x.grad"])
    assert error <= RELATIVE_TOLERANCE[torch.float32]


def test_strided_expert_ids() -> None:
    layer = _build(Workspaces(None, CPU))
    x_TD, routing, grad_TD = make_tokens(ALONE, 0)
    strided = dataclasses.replace(routing, topk_idx_TK=_strided(routing.topk_idx_TK))
    layer.forward(x_TD, strided, local_experts_of(ALONE, 0)).backward(grad_TD)
    assert routing.topk_weights_TK.grad is not None
    error = relative_error(routing.topk_weights_TK.grad, expected(ALONE, 0)["weights.grad"])
    assert error <= RELATIVE_TOLERANCE[torch.float32]


def test_weights_gradients_beside_the_sums_of_tokens() -> None:
    """The same bits, and what was in flight is let go when the first has been launched."""
    beside = Workspaces(None, CPU, knobs=CPU_KNOBS.changed(["weight.beside=1"]))
    layers = [_build(workspaces) for workspaces in (Workspaces(None, CPU), beside)]
    plain, other = (run_forward(layer.forward, ALONE, 0) for layer in layers)
    for call in (plain, other):
        call.y_TD.backward(call.grad_TD)
    _assert_same(other.values(), plain.values(), "weight.beside")
    assert [workspace.in_flight for workspace in beside.all()] == [()]


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(
    "frozen",
    [("up_LGD",), ("down_LDF",), ("up_LGD", "down_LDF"), ("x", "weights")],
    ids=["up", "down", "experts", "tokens"],
)
def test_frozen_parts(frozen: tuple[str, ...], save: Save) -> None:
    """They get no gradient, and the others what they would get anyway."""
    layer = _build(Workspaces(None, CPU), save=save)
    call = run_forward(layer.forward, ALONE, 0, frozen=frozen)
    call.y_TD.backward(call.grad_TD)
    got, want = call.values(), expected(ALONE, 0)
    assert set(want) - set(got) == {f"{name}.grad" for name in frozen}
    for name, value in got.items():
        assert relative_error(value, want[name]) <= RELATIVE_TOLERANCE[torch.float32], name


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("frozen", [(), ("up_LGD", "down_LDF")], ids=["all", "tokens"])
def test_second_derivative_is_refused(frozen: tuple[str, ...], save: Save) -> None:
    """Also where nothing else wants gradients, so that nobody else would say so."""
    layer = _build(Workspaces(None, CPU), save=save)
    call = run_forward(layer.forward, ALONE, 0, frozen=frozen)
    with pytest.raises(RuntimeError, match="gradients of fused layers have no gradients"):
        torch.autograd.grad(call.y_TD, call.leaves["x"], call.grad_TD, create_graph=True)


@pytest.mark.parametrize("save", SAVES)
def test_workspaces_that_were_closed_before_backward(save: Save) -> None:
    """Also where there are new ones, which have never seen the plan."""
    layer = _build(Workspaces(None, CPU), save=save)
    for num_tokens in (0, 3):
        call = run_forward(layer.forward, ALONE, 0)
        layer.workspaces.close()
        if num_tokens:
            run_forward(layer.forward, dataclasses.replace(ALONE, num_tokens_W=(num_tokens,)), 0)
        with pytest.raises(RuntimeError, match="were closed before its backward"):
            call.y_TD.backward(call.grad_TD)
