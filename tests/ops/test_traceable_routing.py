"""Routing operators equal indexing by hand and loops; gradients pass finite differences."""

from functools import partial

import pytest
import torch
from torch.library import opcheck

from halley.core.types import DROPPED
from halley.ops.traceable_routing import (
    group_rows,
    permute_rows,
    sort_slots,
    take_slots,
    take_slots_by_weight,
)


NUM_EXPERTS = 6  # of capacity
IDX_TK = torch.tensor([[0, 2], [2, DROPPED], [1, 2]])


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def test_slots_are_sorted_and_counted() -> None:
    slots_N, counts_E = sort_slots(IDX_TK, 4)
    assert slots_N.tolist() == [0, 4, 1, 2, 5, 3]  # of experts 0, 1, 2, 2, 2, then the dropped one
    assert counts_E.tolist() == [1, 1, 3, 0]


def test_received_rows_are_sorted_by_expert() -> None:
    order_R, inverse_R, ends_L, counts_LW = group_rows(torch.tensor([[1, 2], [1, 0]]), 4)
    assert order_R.tolist() == [0, 3, 1, 2]
    assert inverse_R.tolist() == [0, 2, 3, 1]
    assert ends_L.tolist() == [2, 4]
    assert counts_LW.tolist() == [[1, 1], [2, 0]]
    rows = _normal(4, 2)
    sorted_rows = permute_rows(rows, order_R, inverse_R)
    assert torch.equal(sorted_rows, rows[[0, 3, 1, 2]])
    assert torch.autograd.gradcheck(lambda x: permute_rows(x, order_R, inverse_R), rows)


def _choices(num_tokens: int, top_k: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :top_k]


def _loop(idx_TK: torch.Tensor, tokens: list[int], limit: int) -> list[list[bool]]:
    """Return the slots kept for tokens in that order, first choices before second choices."""
    taken = [0] * NUM_EXPERTS
    kept = [[False] * idx_TK.shape[1] for _ in tokens]
    for choice in range(idx_TK.shape[1]):
        for token in tokens:
            expert = int(idx_TK[token, choice])
            taken[expert] += 1
            kept[token][choice] = taken[expert] <= limit
    return kept


def _no_slots() -> torch.Tensor:
    return torch.zeros(NUM_EXPERTS, dtype=torch.int64)


def test_take_slots_against_a_loop() -> None:
    idx_TK = _choices(60, 3)
    for limit in (1, 7, 60):
        kept_TK, used_E = take_slots(idx_TK, _no_slots(), limit)
        assert kept_TK.tolist() == _loop(idx_TK, list(range(60)), limit)
        assert used_E.tolist() == idx_TK.flatten().bincount(minlength=NUM_EXPERTS).tolist()
    assert take_slots(idx_TK[:0], _no_slots(), 1)[0].tolist() == []


def test_microbatches_that_share_a_counter_keep_the_same_slots() -> None:
    idx_T1 = _choices(48, 1)
    want, _ = take_slots(idx_T1, _no_slots(), 8)
    used, kept = _no_slots(), []
    for microbatch in idx_T1.chunk(4):
        kept_in_it, used = take_slots(microbatch, used, 8)
        kept.append(kept_in_it)
    assert torch.equal(torch.cat(kept), want)
    # A quarter of the capacity for each quarter of the tokens drops more slots.
    alone = [take_slots(each, _no_slots(), 2)[0] for each in idx_T1.chunk(4)]
    assert int(torch.cat(alone).sum()) < int(want.sum()) < 48


def test_take_slots_by_weight_against_a_loop() -> None:
    idx_TK = _choices(60, 2, seed=1)
    weights_TK = torch.randn(60, 2, generator=torch.Generator().manual_seed(2))
    weights_TK[10] = weights_TK[20]  # a tie: the earlier token comes first
    tokens = sorted(range(60), key=lambda token: -float(weights_TK[token].max()))
    for limit in (1, 8, 60):
        kept_TK = take_slots_by_weight(idx_TK, weights_TK, NUM_EXPERTS, limit)
        assert kept_TK.tolist() == _loop(idx_TK, tokens, limit)


# ``opcheck`` of torch 2.15 causes this warning itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("size", [1, 2])
def test_operators_pass_opcheck(size: int) -> None:
    ops = torch.ops.halley
    # With a dimension of size 1, a result could alias an input: the schema test would find that.
    check = partial(opcheck, test_utils="test_schema") if size == 1 else opcheck
    idx_TK = torch.arange(size * size).reshape(size, size) % size
    counts_WL = torch.ones(size, size, dtype=torch.int64)
    num_rows = size * size
    slots_N, _ = sort_slots(idx_TK, size)
    order_R, inverse_R, ends_L, _ = group_rows(counts_WL, num_rows)
    rows_ND, weights_TK = _normal(num_rows, size), _normal(size, size, seed=1)
    check(ops.sort_slots.default, (idx_TK, size))
    check(ops.group_rows.default, (counts_WL, num_rows))
    check(ops.gather_rows.default, (_normal(size, size), slots_N, num_rows, size))
    check(ops.combine_rows.default, (rows_ND, slots_N, weights_TK))
    check(ops.permute_rows.default, (rows_ND, order_R, inverse_R))
    check(ops.expert_gemm.default, (rows_ND, _normal(size, size, size), ends_L))
    check(ops.take_slots.default, (idx_TK, counts_WL[0], 1))
    check(ops.take_slots_by_weight.default, (idx_TK, weights_TK.detach(), size, 1))
