"""Exchange rows with a few float32 words each in one all-to-all, in code that can be compiled.

A second all-to-all for the words would take the host as long as that of the rows.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F


_WORD = torch.int32  # dtype of messages; the sizes of rows are multiples of it
_COLLECTIVES = torch.ops._c10d_functional


def exchange_packed(
    rows_SD: torch.Tensor, words_SX: torch.Tensor, splits: Sequence[int], group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange rows and their words; return those received; differentiable.

    Args:
        rows_SD: rows of any dtype, sorted by destination rank.
        words_SX: float32.
        splits: rows to each rank, and as many from each rank.
        group_name: of the process group.
    """
    result = _ExchangePacked.apply(rows_SD, words_SX, tuple(splits), group_name)
    return cast(tuple[torch.Tensor, torch.Tensor], result)


class _ExchangePacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_SD, words_SX, splits, group_name):
        ctx.splits, ctx.group_name = splits, group_name
        return _exchange(rows_SD, words_SX, splits, group_name)

    @staticmethod
    def backward(ctx, grad_rows_SD, grad_words_SX):
        grads = _exchange(grad_rows_SD, grad_words_SX, ctx.splits, ctx.group_name)
        return *grads, None, None


def _exchange(
    rows_SD: torch.Tensor, words_SX: torch.Tensor, splits: tuple[int, ...], group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    num_columns, dtype = rows_SD.shape[1], rows_SD.dtype
    padding = -num_columns % max(1, _WORD.itemsize // dtype.itemsize)
    rows_SD = F.pad(rows_SD, (0, padding)) if padding else rows_SD
    packed = torch.cat([words_SX.contiguous().view(_WORD), rows_SD.contiguous().view(_WORD)], 1)
    started = _COLLECTIVES.all_to_all_single(packed, splits, splits, group_name)
    packed = _COLLECTIVES.wait_tensor(started)
    # Copies, because rows that begin behind words are not aligned for vectorized loads.
    words_SX, rows_SD = (
        each.contiguous() for each in packed.tensor_split([words_SX.shape[1]], dim=1)
    )
    return rows_SD.view(dtype)[:, :num_columns], words_SX.view(torch.float32)
