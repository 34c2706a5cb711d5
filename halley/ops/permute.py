"""Moves of whole rows with gradients: from tokens to sorted slots and back.

torch's own ``index_select`` has a gradient that adds rows atomically, in no fixed order. Here each
index is a permutation whose inverse is known, so that a gradient is again a plain gather.
"""

from functools import cached_property
from typing import final

import torch


@final
class Permutation:
    """An order of rows and, once it is asked for, its inverse.

    Args:
        index_N: row ``index_N[i]`` comes to place i, int32 or int64.
        inverse_N: its inverse where that is known already.
    """

    def __init__(self, index_N: torch.Tensor, inverse_N: torch.Tensor | None = None) -> None:
        self.index_N = index_N
        if inverse_N is not None:
            self.inverse_N = inverse_N

    @cached_property
    def inverse_N(self) -> torch.Tensor:
        """The place of each row: ``inverse_N[index_N[i]] = i``."""
        places_N = torch.arange(self.index_N.numel(), device=self.index_N.device)
        return torch.empty_like(places_N).scatter_(0, self.index_N.long(), places_N)

    def inverted(self) -> "Permutation":
        """Return the permutation that undoes this one."""
        return Permutation(self.inverse_N, self.index_N)


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, order):
        ctx.order = order
        return rows.index_select(0, order.index_N)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, ctx.order.inverse_N), None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slots, top_k):
        ctx.slots, ctx.top_k = slots, top_k
        return x.index_select(0, slots.index_N // top_k)

    @staticmethod
    def backward(ctx, grad):
        by_slot = grad.index_select(0, ctx.slots.inverse_N)
        return by_slot.view(-1, ctx.top_k, grad.shape[1]).sum(1), None, None


class _CombineTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, slots):
        num_tokens, top_k = weights.shape
        by_slot = rows.index_select(0, slots.inverse_N).view(num_tokens, top_k, rows.shape[1])
        ctx.slots = slots
        ctx.save_for_backward(by_slot, weights)
        # A product of (1, K) and (K, D) for each token: one pass over the rows, summed in float32.
        return torch.bmm(weights.to(rows.dtype).unsqueeze(1), by_slot).squeeze(1)

    @staticmethod
    def backward(ctx, grad):
        by_slot, weights = ctx.saved_tensors
        slots = ctx.slots.index_N
        weights_of_row = weights.to(grad.dtype).reshape(-1, 1).index_select(0, slots)
        grad_rows = grad.index_select(0, slots // weights.shape[1]).mul_(weights_of_row)
        grad_weights = torch.bmm(by_slot, grad.unsqueeze(2)).squeeze(2)
        return grad_rows, grad_weights.to(weights.dtype), None


def permute_rows(rows_RD: torch.Tensor, order: Permutation) -> torch.Tensor:
    """Return the rows in the given order, ``(R, D)``."""
    return _PermuteRows.apply(rows_RD, order)  # pyright: ignore[reportReturnType]


def gather_tokens(x_TD: torch.Tensor, slots: Permutation, *, top_k: int) -> torch.Tensor:
    """Return the token of each slot, ``x_TD[slots.index_N // top_k]``, ``(N, D)``.

    The gradient of a token is the sum over its slots in order of slot, accumulated in float32.

    Args:
        slots: an order of the slots ``t * top_k + k``.
    """
    return _GatherTokens.apply(x_TD, slots, top_k)  # pyright: ignore[reportReturnType]


def combine_tokens(
    rows_ND: torch.Tensor, weights_TK: torch.Tensor, slots: Permutation
) -> torch.Tensor:
    """Return, for each token, the weighted sum of the rows of its slots, ``(T, D)``.

    The weights are rounded to the dtype of the rows; products are summed in float32.

    Args:
        rows_ND: the row of slot ``slots.index_N[i]`` at place i.
        slots: an order of the slots ``t * top_k + k``.
    """
    return _CombineTokens.apply(rows_ND, weights_TK, slots)  # pyright: ignore[reportReturnType]
