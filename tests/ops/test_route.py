"""Routing-index kernels against the same functions in torch, interpreted or on a GPU."""

import pytest
import torch

from halley.core.types import DROPPED
from halley.interpreter import INTERPRETED
from halley.ops.kernels import route
from halley.ops.traceable_routing import group_rows, sort_slots, take_slots


DEVICE = "cpu" if INTERPRETED else "cuda"
# Tokens, top_k, experts, and how tokens choose. 4097 slots take several blocks.
CASES = [
    (1, 1, 1, "one expert"),
    (5, 2, 3, "empty expert"),
    (4097, 1, 8, "even"),
    (90, 6, 130, "one expert"),
]
DROPPING = [(90, 6, 130, "dropped"), (5, 2, 3, "all dropped")]


def _choices(num_tokens: int, top_k: int, num_experts: int, load: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    idx_TK = torch.randint(num_experts, (num_tokens, top_k), generator=generator)
    if load == "one expert":
        idx_TK.fill_(num_experts - 1)
    elif load == "empty expert":
        idx_TK[idx_TK == 0] = num_experts - 1
    elif load == "dropped":
        idx_TK[torch.rand(num_tokens, top_k, generator=generator) < 0.4] = DROPPED
    elif load == "all dropped":
        idx_TK.fill_(DROPPED)
    return idx_TK


def _same(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("case", [*CASES, *DROPPING])
def test_slots_are_sorted_by_expert(case: tuple[int, int, int, str]) -> None:
    idx_TK, num_experts = _choices(*case), case[2]
    found = route.sort_slots(idx_TK.to(DEVICE), num_experts)
    _same(found, sort_slots(idx_TK, num_experts))


def test_a_view_of_the_routing_is_accepted() -> None:
    idx_TK = _choices(9, 4, 3, "even")[1:, 1:3]
    _same(route.sort_slots(idx_TK.to(DEVICE), 3), sort_slots(idx_TK, 3))


@pytest.mark.parametrize("case", CASES)
def test_slots_are_kept_up_to_the_capacity(case: tuple[int, int, int, str]) -> None:
    idx_TK, used_E = _choices(*case), torch.arange(case[2])
    for limit in (1, 40):
        found = route.take_slots(idx_TK.to(DEVICE), used_E.to(DEVICE), limit)
        _same(found, take_slots(idx_TK, used_E, limit))


COUNTS = {
    "one rank": torch.tensor([[3, 0, 2]]),
    "one expert": torch.tensor([[1500], [0], [1030]]),
    "no rows": torch.tensor([[0, 0], [0, 0]]),
    "empty ranks": torch.tensor([[0, 0, 0], [5, 1, 2], [0, 0, 0]]),
    "many ranks": torch.randint(4, (72, 2), generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_rows_are_grouped_by_expert(name: str) -> None:
    counts_WL, num_rows = COUNTS[name], int(COUNTS[name].sum())
    found = route.group_rows(counts_WL.to(DEVICE), num_rows)
    _same(found, group_rows(counts_WL, num_rows))


def test_no_tokens() -> None:
    idx_TK = torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    slots_N, counts_E = route.sort_slots(idx_TK, 3)
    assert slots_N.shape == (0,)
    assert counts_E.tolist() == [0, 0, 0]
    kept_TK, used_E = route.take_slots(idx_TK, torch.tensor([4, 0, 1], device=DEVICE), 2)
    assert kept_TK.shape == (0, 2)
    assert used_E.tolist() == [4, 0, 1]
