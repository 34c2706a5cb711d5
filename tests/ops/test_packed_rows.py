"""Rows and routing that share an all-to-all arrive, and return gradients, bit for bit."""

import warnings
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


def _compare(
    rank: int, num_ranks: int, dtype: torch.dtype, num_columns: int, num_rows: int
) -> list[bool]:
    group: Any = dist.group.WORLD
    splits = [num_rows] * num_ranks
    generator = torch.Generator().manual_seed(rank)
    # Any bits: halves of some of these numbers are NaN in 16 bits, which a copy may change.
    bits = torch.randint(-(2**31), 2**31, (sum(splits), 4), generator=generator).int()
    routing = bits.view(torch.float32).nan_to_num().requires_grad_()
    rows = torch.randn(sum(splits), num_columns, generator=generator).to(dtype).requires_grad_()
    found = exchange_packed(rows, routing, splits, group.group_name)
    wanted = [_separate(each.detach(), splits) for each in (rows, routing)]
    grads = [torch.randn(each.shape, generator=generator).to(each.dtype) for each in wanted]
    torch.autograd.backward(found, grads)
    found = [*found, rows.grad, routing.grad]
    wanted += [_separate(each, splits) for each in grads]
    return [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)]


# An odd number of columns of two bytes does not fill the last int32 of a row.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_columns", [8, 5, 1])
def test_rows_and_routing_arrive_bit_for_bit(
    run_ranks: RunRanks, dtype: torch.dtype, num_columns: int
) -> None:
    for num_ranks, num_rows in ((3, 3), (1, 1), (2, 0)):
        results = run_ranks(_compare, num_ranks, dtype, num_columns, num_rows)
        assert results == [[True] * 4] * num_ranks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_columns", [8, 5])
def test_compiled_exchange_has_the_gradients_of_an_eager_one(
    run_ranks: RunRanks, dtype: torch.dtype, num_columns: int
) -> None:
    assert run_ranks(_compare_compiled, 2, dtype, num_columns) == [[True] * 4] * 2


def _compare_compiled(
    rank: int, num_ranks: int, dtype: torch.dtype, num_columns: int
) -> list[bool]:
    group: Any = dist.group.WORLD
    splits = [3] * num_ranks

    def run(rows: torch.Tensor, routing: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, routing = exchange_packed(rows * 2, routing * 3, splits, group.group_name)
        return rows.square(), routing.square()

    results: list[list[torch.Tensor]] = []
    for each in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        generator = torch.Generator().manual_seed(rank)
        rows = torch.randn(sum(splits), num_columns, generator=generator).to(dtype).requires_grad_()
        routing = torch.randn(sum(splits), 4, generator=generator).requires_grad_()
        with warnings.catch_warnings(action="ignore"):  # Dynamo instantiates autograd functions
            found = each(rows, routing)
        grads = torch.autograd.grad(found, [rows, routing], [torch.ones_like(x) for x in found])
        results.append([*found, *grads])
    return [torch.equal(a, b) and bool(a.any()) for a, b in zip(*results, strict=True)]
