"""Gradients in many schedules: equal to the reference; fused equals unfused bit for bit."""

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch

from halley.core.types import Activation, Routing
from tests.fused.kernel_case import (
    Gradients,
    KernelCase,
    assert_close,
    expected_gradients,
    make_dy,
    make_tokens,
)
from tests.fused.kernel_rank import KernelRank, borrow
from tests.fused.kernel_world import run_world


TWO = KernelCase(num_tokens_CW=((20, 13),))
CASES = {
    "two ranks": TWO,
    "three ranks": replace(TWO, num_tokens_CW=((20, 13, 8),), num_experts=6),
    "four ranks": replace(TWO, num_tokens_CW=((8, 12, 5, 9),), num_experts=4),
    "skewed": replace(TWO, load="zipf:1.2", num_experts=8, top_k=3),
    "empty expert": replace(TWO, load="empty-expert"),
    "one takes all": replace(TWO, load="one-hot", top_k=1),
    "no tokens": replace(TWO, num_tokens_CW=((0, 18, 7),), num_experts=3),
    "dropped": replace(TWO, dropped=0.4, top_k=3),
    "odd sizes": replace(TWO, hidden_size=68, intermediate_size=36),
    "gelu": replace(TWO, activation="gelu"),
    "bfloat16": replace(TWO, dtype=torch.bfloat16, load="std:0.05"),
    "float16": replace(TWO, dtype=torch.float16, activation="gelu"),
    "several calls": replace(TWO, num_tokens_CW=((9, 13), (2, 0), (16, 1), (0, 0))),
    "one of six": replace(TWO, num_tokens_CW=((9, 12, 5),), num_experts=6, top_k=1),
    "five of six": replace(TWO, num_tokens_CW=((9, 6),), num_experts=6, top_k=5),
    # Zero rows fill only half of a tile; the other padding keeps its old content.
    "large tiles": replace(TWO, num_tokens_CW=((9, 13),), config=replace(TWO.config, block_m=32)),
}


def _train(
    case: KernelCase,
    *,
    fused: bool,
    seed: int = 0,
    resident: int = 4,
    starve: float = 0.0,
    tokens: Callable[..., tuple[torch.Tensor, Routing]] = make_tokens,
) -> list[list[Gradients]]:
    """Run all calls forward, then all backward in another order; return by rank and call."""

    def run(rank: KernelRank) -> list[Gradients]:
        calls = range(len(case.num_tokens_CW))
        saved_calls = [
            rank.forward_and_save(*tokens(case, rank.rank, call=call), fused=fused)[1]
            for call in calls
        ]
        order = sorted(calls, key=lambda call: call ^ 1)
        gradients = {
            call: rank.backward(make_dy(case, rank.rank, call=call), saved_calls[call], fused=fused)
            for call in order
        }
        return [gradients[call] for call in calls]

    return run_world(case, run, seed=seed, resident=resident, starve=starve)


def _assert_values(
    got: list[list[Gradients]],
    case: KernelCase,
    *,
    tokens: Callable[..., tuple[torch.Tensor, Routing]] = make_tokens,
) -> None:
    """Compare with the gradients of autograd in float64."""
    for call in range(len(case.num_tokens_CW)):
        for rank, wanted in enumerate(expected_gradients(case, call=call, tokens=tokens)):
            for field in fields(Gradients):
                value = getattr(got[rank][call], field.name).to(case.dtype)
                what = f"{field.name}, rank {rank}, call {call}"
                assert_close(value, getattr(wanted, field.name), what)


def _assert_same(got: list[list[Gradients]], wanted: list[list[Gradients]], what: str) -> None:
    """Compare bit by bit."""
    for calls, wanted_calls in zip(got, wanted, strict=True):
        for gradients, others in zip(calls, wanted_calls, strict=True):
            for field in fields(Gradients):
                pair = getattr(gradients, field.name), getattr(others, field.name)
                assert torch.equal(*pair), f"{field.name}, {what}"


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_the_reference_and_the_unfused_bits(name: str) -> None:
    case = CASES[name]
    unfused = _train(case, fused=False)
    _assert_values(unfused, case)
    seed = list(CASES).index(name)  # each case has its own schedule
    fused = _train(case, fused=True, seed=seed, starve=0.02 * (seed % 2))
    _assert_same(fused, unfused, f"seed {seed}")


@pytest.mark.parametrize("resident", [1, 2, 8])
def test_few_resident_ctas_do_not_deadlock(resident: int) -> None:
    """No CTA waits for a CTA that has not begun, however few run at a time."""
    case = replace(TWO, num_tokens_CW=((18, 5),), config=replace(TWO.config, num_programs=6))
    _assert_values(_train(case, fused=True, seed=resident, resident=resident), case)


def test_runs_of_tiles_give_the_same_bits() -> None:
    """A run may end with the last column, with a chunk, or inside of a chunk."""
    case = replace(TWO, num_tokens_CW=((9, 4),), hidden_size=104, intermediate_size=76)
    wanted = _train(case, fused=False)
    _assert_values(wanted, case)
    for down, up, chunk_columns in ((2, 3, 64), (3, 2, 128)):
        config = replace(
            case.config,
            down_grad=replace(case.config.down_grad, run=down),
            up_grad=replace(case.config.up_grad, run=up),
            chunk_columns=chunk_columns,
        )
        got = _train(replace(case, config=config), fused=True, seed=up)
        _assert_same(got, wanted, f"runs of {down} and {up}")


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_negative_and_unnormalized_routing_weights(activation: Activation) -> None:
    def tokens(case: KernelCase, rank: int, *, call: int) -> tuple[torch.Tensor, Routing]:
        x_TD, routing = make_tokens(case, rank, call=call)
        weights_TK = routing.topk_weights_TK * -3.0 + rank
        assert (weights_TK < 0).any()
        return x_TD, replace(routing, topk_weights_TK=weights_TK)

    case = replace(TWO, num_tokens_CW=((9, 12),), activation=activation)
    _assert_values(_train(case, fused=True, tokens=tokens), case, tokens=tokens)


def test_zero_gradient_of_the_output_gives_zero_gradients() -> None:
    case = replace(TWO, num_tokens_CW=((9, 12),), top_k=3)

    def run(rank: KernelRank) -> None:
        x_TD, routing = make_tokens(case, rank.rank)
        _, saved = rank.forward_and_save(x_TD, routing)
        gradients = rank.backward(torch.zeros_like(x_TD), saved)
        for value in vars(gradients).values():
            assert torch.equal(value, torch.zeros_like(value))

    run_world(case, run, seed=1)


def test_a_plan_from_before_the_buffers_grew() -> None:
    """The backward of an old call runs in the larger buffers of later calls."""
    small = replace(TWO, num_tokens_CW=((9, 12),))
    large = replace(TWO, num_tokens_CW=((20, 13),), max_tokens=32, seed=5)

    def run(later: KernelRank) -> list[Gradients]:
        earlier = KernelRank(later.heap, small)
        x_TD, routing = make_tokens(small, earlier.rank)
        _, old_saved = earlier.forward_and_save(x_TD, routing)
        _, saved = later.forward_and_save(*make_tokens(large, later.rank))
        earlier.send_buffer = later.send_buffer
        earlier.combine_buffer = borrow(later.combine_buffer, earlier.combine_buffer)
        earlier.dweight_buffer = borrow(later.dweight_buffer, earlier.dweight_buffer)
        earlier.routing_buffer, earlier.counters = later.routing_buffer, later.counters
        gradients = []
        for layer, its_saved in ((earlier, old_saved), (later, saved), (earlier, old_saved)):
            gradients.append(layer.backward(make_dy(layer.case, layer.rank), its_saved))
        return gradients

    results = run_world(large, run, seed=2, starve=0.02)
    for index, case in enumerate((small, large, small)):
        _assert_values([[gradients[index]] for gradients in results], case)
