"""Exchange rows and their routing in one all-to-all, in code that ``torch.compile`` can trace.

A second all-to-all for the routing would cost the host as much time as that of the rows.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


# Dtype of messages. Copied as two bfloat16 values, a float32 could change: the bits of one of them
# may be those of a NaN, and a kernel may replace one NaN by another.
_DTYPE = torch.int32
_COLLECTIVES = torch.ops._c10d_functional


def exchange_packed(
    rows_SD: torch.Tensor, routing_SX: torch.Tensor, splits: Sequence[int], group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange rows and their routing; return those received; differentiable once.

    Args:
        rows_SD: rows of any floating dtype, sorted by destination rank.
        routing_SX: float32 values of each row, such as weights and ids.
        splits: rows to each rank, and as many from each rank.
        group_name: of the process group.
    """
    result = _ExchangePacked.apply(rows_SD, routing_SX, tuple(splits), group_name)
    return cast(tuple[torch.Tensor, torch.Tensor], result)


class _ExchangePacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_SD, routing_SX, splits, group_name):
        ctx.splits, ctx.group_name = splits, group_name
        return _exchange(rows_SD, routing_SX, splits, group_name)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows_SD, grad_routing_SX):
        grads = _exchange(grad_rows_SD, grad_routing_SX, ctx.splits, ctx.group_name)
        return *grads, None, None


def _exchange(
    rows_SD: torch.Tensor, routing_SX: torch.Tensor, splits: tuple[int, ...], group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    num_columns, dtype = rows_SD.shape[1], rows_SD.dtype
    padding = -num_columns % max(1, _DTYPE.itemsize // dtype.itemsize)
    rows_SD = F.pad(rows_SD, (0, padding)) if padding else rows_SD
    parts = [each.contiguous().view(_DTYPE) for each in (routing_SX, rows_SD)]
    started = _COLLECTIVES.all_to_all_single(torch.cat(parts, 1), splits, splits, group_name)
    received = _COLLECTIVES.wait_tensor(started).tensor_split([parts[0].shape[1]], dim=1)
    # Copies, because rows that begin behind their routing are not aligned for vectorized loads.
    routing_SX, rows_SD = (each.clone(memory_format=torch.contiguous_format) for each in received)
    rows_SD = rows_SD.view(dtype)
    # With torch 2.11, a slice of all columns would have no gradient in a compiled graph.
    rows_SD = rows_SD[:, :num_columns].contiguous() if padding else rows_SD
    return rows_SD, routing_SX.view(torch.float32)
