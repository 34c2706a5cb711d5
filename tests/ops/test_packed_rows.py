"""Rows and words that share an all-to-all arrive, and return gradients, bit for bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from halley.ops.packed_rows import exchange_packed
from tests.rank_pool import RunRanks


def _separate(values: torch.Tensor, splits: list[int]) -> torch.Tensor:
    received = torch.empty_like(values)
    dist.all_to_all_single(received, values.contiguous(), splits, splits)
    return received


def _compare(rank: int, num_ranks: int, dtype: torch.dtype, num_columns: int) -> list[bool]:
    group: Any = dist.group.WORLD
    splits = [3] * num_ranks
    generator = torch.Generator().manual_seed(rank)
    num_rows = sum(splits)
    # Any bits: as numbers of 16 bits, some halves of these words are NaN, which a copy may change.
    bits = torch.randint(-(2**31), 2**31, (num_rows, 4), generator=generator).int()
    words = bits.view(torch.float32).nan_to_num().requires_grad_()
    rows = torch.randn(num_rows, num_columns, generator=generator).to(dtype).requires_grad_()
    found = exchange_packed(rows, words, splits, group.group_name)
    wanted = [_separate(each.detach(), splits) for each in (rows, words)]
    grads = [torch.randn(each.shape, generator=generator).to(each.dtype) for each in wanted]
    torch.autograd.backward(found, grads)
    found = [*found, rows.grad, words.grad]
    wanted += [_separate(each, splits) for each in grads]
    return [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)]


# An odd number of columns of two bytes does not fill the last word of a row.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_columns", [8, 5, 1])
def test_rows_and_words_arrive_bit_for_bit(
    run_ranks: RunRanks, dtype: torch.dtype, num_columns: int
) -> None:
    assert run_ranks(_compare, 3, dtype, num_columns) == [[True] * 4] * 3
