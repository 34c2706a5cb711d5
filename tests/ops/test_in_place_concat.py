"""Microbatches written into one buffer, against values by hand and against a concatenation."""

import pytest
import torch
from torch.library import opcheck

from halley.ops.in_place_concat import (
    concat_order,
    rows_of_microbatch,
    write_rows,
    write_slice,
)


def test_write_slice_returns_its_buffer() -> None:
    full = torch.full((2, 5), -1.0)
    left, right = torch.ones(2, 2), torch.zeros(2, 3)
    found = write_slice(write_slice(full, right, 1, 2), left, 1, 0)
    assert found.data_ptr() == full.data_ptr()
    assert found.tolist() == [[1, 1, 0, 0, 0]] * 2


def test_rows_of_two_microbatches_by_hand() -> None:
    # Rows "a0 b1" and "c0 d0 e2", with their destinations; the full batch is a c d b e.
    counts = torch.tensor([[[1, 1, 0]], [[2, 0, 1]]])
    assert rows_of_microbatch(counts, 2, 0, 2).tolist() == [0, 3]
    assert rows_of_microbatch(counts, 2, 1, 3).tolist() == [1, 2, 4]
    assert concat_order(counts, 2, 5).tolist() == [0, 2, 3, 1, 4]


@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_written_rows_equal_the_reordered_concatenation(num_microbatches: int) -> None:
    generator = torch.Generator().manual_seed(num_microbatches)
    counts = torch.randint(0, 4, (num_microbatches, 3, 2), generator=generator)
    sizes = counts.flatten(1).sum(1).tolist()
    parts = torch.randn(sum(sizes), 4, generator=generator).split(sizes)
    full = torch.empty(sum(sizes), 4)
    for index, rows in enumerate(parts):
        full = write_rows(
            full, rows, rows_of_microbatch(counts, num_microbatches, index, len(rows))
        )
    assert torch.equal(full, torch.cat(parts)[concat_order(counts, num_microbatches, sum(sizes))])
    opcheck(torch.ops.halley.rows_of_microbatch.default, (counts, num_microbatches, 0, sizes[0]))
