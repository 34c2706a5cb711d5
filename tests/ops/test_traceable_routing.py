"""Routing operators equal indexing by hand; their gradients pass a finite-difference check."""

from functools import partial

import pytest
import torch
from torch.library import opcheck

import halley.ops.capacity
import halley.ops.expert_gemm
import halley.ops.in_place_concat  # noqa: F401 - define operators
from halley.core.types import DROPPED
from halley.ops.traceable_routing import (
    combine_rows,
    gather_rows,
    group_rows,
    permute_rows,
    sort_slots,
)


IDX_TK = torch.tensor([[0, 2], [2, DROPPED], [1, 2]])
SLOTS = [0, 4, 1, 2, 5, 3]  # of experts 0, 1, 2, 2, 2, then the dropped slot


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def test_slots_are_sorted_and_counted() -> None:
    slots_N, counts_E = sort_slots(IDX_TK, num_experts=4)
    assert slots_N.tolist() == SLOTS
    assert counts_E.tolist() == [1, 1, 3, 0]


def test_gather_rows() -> None:
    x_TD, slots_N = _normal(3, 2), torch.tensor(SLOTS)
    rows_ND = gather_rows(x_TD, slots_N, num_rows=5, top_k=2)
    assert rows_ND.tolist() == [x_TD[token].tolist() for token in (0, 2, 0, 1, 2)]
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, slots_N, num_rows=5, top_k=2), x_TD)


def test_combine_rows() -> None:
    rows_ND, slots_N, weights_TK = _normal(5, 2), torch.tensor(SLOTS), _normal(3, 2, seed=1)
    y_TD = combine_rows(rows_ND, slots_N, weights_TK)
    w = weights_TK
    want = [
        w[0, 0] * rows_ND[0] + w[0, 1] * rows_ND[2],
        w[1, 0] * rows_ND[3],
        w[2, 0] * rows_ND[1] + w[2, 1] * rows_ND[4],
    ]
    torch.testing.assert_close(y_TD, torch.stack(want))
    inputs = (rows_ND, weights_TK)
    assert torch.autograd.gradcheck(lambda rows, w: combine_rows(rows, slots_N, w), inputs)


def test_received_rows_are_sorted_by_expert() -> None:
    grouped = group_rows(torch.tensor([[1, 2], [1, 0]]), num_rows=4)
    assert grouped.order_R.tolist() == [0, 3, 1, 2]
    assert grouped.inverse_R.tolist() == [0, 2, 3, 1]
    assert grouped.ends_L.tolist() == [2, 4]
    assert grouped.counts_LW.tolist() == [[1, 1], [2, 0]]
    rows = _normal(4, 2)
    sorted_rows = permute_rows(rows, grouped.order_R, inverse_R=grouped.inverse_R)
    assert torch.equal(sorted_rows, rows[[0, 3, 1, 2]])
    assert torch.autograd.gradcheck(
        lambda x: permute_rows(x, grouped.order_R, inverse_R=grouped.inverse_R), rows
    )


@pytest.mark.parametrize("size", [1, 2])
def test_operators_pass_opcheck(size: int) -> None:
    ops = torch.ops.halley
    # With a dimension of size 1, a result could alias an input: the schema test would find that.
    check = partial(opcheck, test_utils="test_schema") if size == 1 else opcheck
    idx_TK = torch.arange(size * size).reshape(size, size) % size
    counts_WL = torch.ones(size, size, dtype=torch.int64)
    num_rows = size * size
    slots_N, _ = sort_slots(idx_TK, num_experts=size)
    order_R, inverse_R, ends_L, _ = group_rows(counts_WL, num_rows=num_rows)
    rows_ND, weights_TK = _normal(num_rows, size), _normal(size, size, seed=1)
    check(ops.sort_slots.default, (idx_TK, size))
    check(ops.group_rows.default, (counts_WL, num_rows))
    check(ops.gather_rows.default, (_normal(size, size), slots_N, num_rows, size))
    check(ops.combine_rows.default, (rows_ND, slots_N, weights_TK))
    check(ops.permute_rows.default, (rows_ND, order_R, inverse_R))
    check(ops.concat_order.default, (counts_WL.flatten(), size, num_rows))
    check(ops.expert_gemm.default, (rows_ND, _normal(size, size, size), ends_L))
    check(ops.take_slots.default, (idx_TK, counts_WL[0], 1))
    check(ops.take_slots_by_weight.default, (idx_TK, weights_TK.detach(), size, 1))
