"""Parts written into one buffer: values by hand, and against the order of all rows."""

import pytest
import torch
from torch.library import opcheck

from halley.ops.fills import fill_range, fill_rows, places_of_part
from halley.ops.routed_rows import order_of_parts


def test_ranges_fill_a_buffer_that_is_returned() -> None:
    whole = torch.full((2, 5), -1.0)
    left, right = torch.ones(2, 2), torch.zeros(2, 3)
    found = fill_range(fill_range(whole, right, 1, 2), left, 1, 0)
    assert found.data_ptr() == whole.data_ptr()
    assert found.tolist() == [[1, 1, 0, 0, 0]] * 2


def test_places_by_hand() -> None:
    # Parts "a0 b1" and "c0 d0 e2": in the whole, a c d, then b, then e.
    counts = torch.tensor([[[1, 1, 0]], [[2, 0, 1]]])
    assert places_of_part(counts, 2, 0, 2).tolist() == [0, 3]
    assert places_of_part(counts, 2, 1, 3).tolist() == [1, 2, 4]


@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_rows_come_in_the_order_of_the_whole(num_parts: int) -> None:
    generator = torch.Generator().manual_seed(num_parts)
    counts = torch.randint(0, 4, (num_parts, 3, 2), generator=generator)
    sizes = counts.flatten(1).sum(1).tolist()
    parts = torch.randn(sum(sizes), 4, generator=generator).split(sizes)
    whole = torch.empty(sum(sizes), 4)
    for part, rows in enumerate(parts):
        whole = fill_rows(whole, rows, places_of_part(counts, num_parts, part, len(rows)))
    assert torch.equal(whole, torch.cat(parts)[order_of_parts(counts, num_parts, sum(sizes))])
    opcheck(torch.ops.halley.places_of_part.default, (counts, num_parts, 0, sizes[0]))
