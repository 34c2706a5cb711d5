"""Rows of all ranks on each, and sums home: values and gradients by hand, on three ranks."""

import torch
import torch.distributed as dist

from halley.ops.gather import gather_rows_of_all, sum_at_home
from tests.rank_pool import RunRanks


NUM_ROWS = (2, 0, 3)


def _rows(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUM_ROWS[rank], 4, generator=generator)


def _gather(rank: int, num_ranks: int) -> None:
    rows_TX = _rows(rank).requires_grad_()
    out_AX = gather_rows_of_all(rows_TX, most=3, group=dist.group.WORLD)
    wanted = torch.zeros(3, 3, 4)
    for source in range(num_ranks):
        wanted[source, : NUM_ROWS[source]] = _rows(source)
    assert torch.equal(out_AX, wanted.view(9, 4))
    out_AX.backward(torch.full((9, 4), float(rank + 1)))
    assert rows_TX.grad is not None
    assert torch.equal(rows_TX.grad, torch.full_like(rows_TX, 1.0 + 2.0 + 3.0))


def test_rows_of_all_ranks(run_ranks: RunRanks) -> None:
    run_ranks(_gather, 3)


def _sum(rank: int, num_ranks: int) -> None:
    part_AX = (torch.arange(36.0).view(9, 4) * 10**rank).requires_grad_()
    y_TX = sum_at_home(part_AX, num_rows=NUM_ROWS[rank], group=dist.group.WORLD)
    own = torch.arange(36.0).view(3, 3, 4)[rank, : NUM_ROWS[rank]]
    assert torch.equal(y_TX, 111.0 * own)
    y_TX.backward(_rows(rank))
    assert part_AX.grad is not None
    for source in range(num_ranks):
        grad = part_AX.grad.view(3, 3, 4)[source]
        assert torch.equal(grad[: NUM_ROWS[source]], _rows(source))
        assert not grad[NUM_ROWS[source] :].any()


def test_sums_at_home(run_ranks: RunRanks) -> None:
    run_ranks(_sum, 3)


def test_a_rank_on_its_own() -> None:
    rows_TX = _rows(0)
    assert gather_rows_of_all(rows_TX, most=2, group=None) is rows_TX
    assert sum_at_home(rows_TX, num_rows=2, group=None) is rows_TX
