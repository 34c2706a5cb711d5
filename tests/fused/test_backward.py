"""Outputs and gradients in many schedules equal the reference; fused equals unfused bit by bit."""

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

from halley.core.reference import moe_reference
from tests.fused.kernel_case import (
    Gradients,
    KernelCase,
    expected_gradients,
    make_dy,
    make_experts,
    make_tokens,
)
from tests.fused.kernel_rank import KernelRank, run_world
from tests.strategies.layer_case import assert_close


TWO = KernelCase(num_tokens_CW=((20, 13),))
CASES = {
    "odd sizes, skewed, dropped": replace(
        TWO, num_tokens_CW=((10, 7),), hidden_size=68, intermediate_size=36, load="zipf:1.2",
        num_experts=6, top_k=3, dropped=0.3,
    ),
    "four ranks, one without tokens": replace(TWO, num_tokens_CW=((0, 6, 3, 4),)),
    "one takes all": replace(TWO, load="one-hot", top_k=1),
    "many token copies": replace(TWO, num_tokens_CW=((66, 3),), block_slots=64),
    "bfloat16": replace(TWO, num_tokens_CW=((12, 9),), dtype=torch.bfloat16, load="std:0.05"),
    "several calls": replace(TWO, num_tokens_CW=((5, 8), (2, 0), (0, 0))),
    # Zero rows fill only half of a tile; the other padding keeps its old content.
    "large tiles, float16": replace(
        TWO, num_tokens_CW=((9, 13),), config=replace(TWO.config, block_m=32),
        dtype=torch.float16, activation="gelu",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Values(Gradients):
    """Output of a call on one rank, and its gradients."""

    y_TD: torch.Tensor


def _train(case: KernelCase, *, fused: bool, **schedule: Any) -> list[list[Values]]:
    """Run all calls forward, then all backward in another order; return by rank and call."""

    def run(rank: KernelRank) -> list[Values]:
        calls = range(len(case.num_tokens_CW))
        forwards = [rank.forward(call=call, fused=fused) for call in calls]
        values: dict[int, Values] = {}
        for call in sorted(calls, key=lambda call: call ^ 1):
            y_TD, saved = forwards[call]
            gradients = rank.backward(make_dy(case, rank.rank, call=call), saved, fused=fused)
            values[call] = Values(y_TD=y_TD, **vars(gradients))
        return [values[call] for call in calls]

    return run_world(case, run, **schedule)


def _assert_values(got: list[list[Values]], case: KernelCase) -> None:
    """Compare with the output of the reference, and with the gradients of autograd in float64."""
    experts = make_experts(case)
    for call in range(len(case.num_tokens_CW)):
        for rank, wanted in enumerate(expected_gradients(case, call=call)):
            for field in fields(Gradients):
                value = getattr(got[rank][call], field.name).to(case.dtype)
                what = f"{field.name}, rank {rank}, call {call}"
                assert_close(value, getattr(wanted, field.name), what)
            y_TD = moe_reference(*make_tokens(case, rank, call=call), experts)
            assert_close(got[rank][call].y_TD, y_TD, f"y, rank {rank}, call {call}")


def _assert_same(got: list[list[Values]], wanted: list[list[Values]], what: str) -> None:
    """Compare bit by bit."""
    for calls, wanted_calls in zip(got, wanted, strict=True):
        for values, others in zip(calls, wanted_calls, strict=True):
            for field in fields(Values):
                pair = getattr(values, field.name), getattr(others, field.name)
                assert torch.equal(*pair), f"{field.name}, {what}"


@pytest.mark.parametrize("name", CASES)
def test_values_equal_the_reference_and_the_unfused_bits(name: str) -> None:
    case = CASES[name]
    unfused = _train(case, fused=False)
    _assert_values(unfused, case)
    seed = list(CASES).index(name)  # each case has its own schedule
    fused = _train(case, fused=True, seed=seed, starve=0.02 * (seed % 2))
    _assert_same(fused, unfused, f"seed {seed}")


def test_any_configuration_gives_the_same_bits() -> None:
    """A run may end with the last column, with a chunk, or inside of a chunk.

    The combine loads all rows of a token copy at once, or some of them in each step.
    """
    case = replace(TWO, num_tokens_CW=((6, 3),), hidden_size=136, intermediate_size=44, top_k=3)
    wanted = _train(case, fused=False)
    _assert_values(wanted, case)
    for run, other_run, settings in (
        (2, 3, {"chunk_columns": 64, "combine_rows": 8, "combine_stages": 1, "num_programs": 3}),
        (3, 2, {"chunk_columns": 128, "combine_rows": 16, "combine_stages": 8, "num_programs": 1}),
    ):
        config = replace(
            case.config,
            up=replace(case.config.up, run=other_run),
            down=replace(case.config.down, run=run),
            down_grad=replace(case.config.down_grad, run=run),
            up_grad=replace(case.config.up_grad, run=other_run),
            sum_rows=8 if run == 2 else 64,
            **settings,
        )
        resident = min(4, config.num_programs)
        got = _train(replace(case, config=config), fused=True, seed=run, resident=resident)
        _assert_same(got, wanted, f"runs of {run} and {other_run}, {settings}")


def test_negative_and_unnormalized_routing_weights() -> None:
    case = replace(TWO, num_tokens_CW=((5, 6),), has_negative_weights=True)
    for rank in range(2):
        assert (make_tokens(case, rank)[1].topk_weights_TK < 0).any()
    _assert_values(_train(case, fused=True), case)
