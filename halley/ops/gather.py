"""Every rank's rows on every rank, and sums back: the gradients of each other."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from halley.distributed.peers import Collective


# torch 2.13 renamed the call and warns about the old name, which 2.11 alone knows.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_rows_of_all(
    rows_TX: torch.Tensor, *, most: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the rows of all ranks, ``(W * most, X)``, those of each followed by zeros.

    A collective, forward and backward. Differentiable.

    Args:
        rows_TX: of this rank.
        most: the most rows of a rank, the same on all.
        group: the ranks; None for a rank on its own.
    """
    if group is None:
        return rows_TX
    out = _GatherRows.apply(rows_TX, most, group)
    assert isinstance(out, torch.Tensor)
    return out


def sum_at_home(
    rows_AX: torch.Tensor, *, num_rows: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the sums over all ranks of this rank's rows, ``(num_rows, X)``, added in float32.

    A collective, forward and backward. Differentiable. In the order of ranks: the same bits from
    run to run, as sums on the way would not be on every network.

    Args:
        rows_AX: a part for the rows of every rank, as ``gather_rows_of_all`` orders them.
        num_rows: of this rank.
        group: the ranks; None for a rank on its own.
    """
    if group is None:
        return rows_AX
    out = _SumAtHome.apply(rows_AX, num_rows, group)
    assert isinstance(out, torch.Tensor)
    return out


def _gather(rows: torch.Tensor, most: int, group: dist.ProcessGroup) -> torch.Tensor:
    padded = F.pad(rows, (0, 0, 0, most - rows.shape[0])).contiguous()
    out = padded.new_empty(dist.get_world_size(group) * most, rows.shape[1])
    with Collective("all-gather of rows", group=group):
        all_gather_single(out, padded, group=group)
    return out


def _sum(rows: torch.Tensor, num_rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    arrived = torch.empty_like(rows, memory_format=torch.contiguous_format)
    with Collective("all-to-all of sums", group=group):
        dist.all_to_all_single(arrived, rows.contiguous(), group=group)
    parts = arrived.view(dist.get_world_size(group), -1, rows.shape[1])
    return parts.float().sum(0)[:num_rows].to(rows.dtype)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, most: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.num_rows, ctx.group = rows.shape[0], group
        return _gather(rows, most, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _sum(gradients[0], ctx.num_rows, ctx.group), None, None


class _SumAtHome(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, num_rows: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.most, ctx.group = rows.shape[0] // dist.get_world_size(group), group
        return _sum(rows, num_rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gather(gradients[0], ctx.most, ctx.group), None, None
