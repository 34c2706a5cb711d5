"""Gradients of the layer in many schedules: same bits fused and unfused, the reference's values."""

from dataclasses import fields, replace

import pytest
import torch

from tests.kernels.kernel_case import (
    Gradients,
    KernelCase,
    KernelRank,
    assert_close,
    expected_gradients,
    make_dy,
    make_tokens,
    run_world,
)


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
}


def _train(
    case: KernelCase, *, fused: bool, seed: int = 0, resident: int = 4, starve: float = 0.0
) -> list[list[Gradients]]:
    """Run all calls forward, then all backward in another order; return by rank and call."""

    def run(rank: KernelRank) -> list[Gradients]:
        calls = range(len(case.num_tokens_CW))
        tapes = [
            rank.forward_to_train(*make_tokens(case, rank.rank, call=call), fused=fused)[1]
            for call in calls
        ]
        order = sorted(calls, key=lambda call: call ^ 1)
        gradients = {
            call: rank.backward(make_dy(case, rank.rank, call=call), tapes[call], fused=fused)
            for call in order
        }
        return [gradients[call] for call in calls]

    return run_world(case, run, seed=seed, resident=resident, starve=starve)


@pytest.mark.parametrize("name", CASES)
def test_values_and_bits_in_every_schedule(name: str) -> None:
    case = CASES[name]
    unfused = _train(case, fused=False)
    for call in range(len(case.num_tokens_CW)):
        for rank, wanted in enumerate(expected_gradients(case, call=call)):
            for field in fields(Gradients):
                what = f"{field.name}, rank {rank}, call {call}"
                got = getattr(unfused[rank][call], field.name)
                assert_close(got.to(case.dtype), getattr(wanted, field.name), what)
    first = 2 * list(CASES).index(name)
    for seed, starve in ((first, 0.0), (first + 1, 0.02)):
        fused = _train(case, fused=True, seed=seed, starve=starve)
        for calls, wanted_calls in zip(fused, unfused, strict=True):
            for got, wanted in zip(calls, wanted_calls, strict=True):
                for field in fields(Gradients):
                    pair = getattr(got, field.name), getattr(wanted, field.name)
                    assert torch.equal(*pair), f"{field.name}, seed {seed}"
