"""Moves of whole rows with gradients: from tokens to sorted slots and back.

torch's own ``index_select`` has a gradient that adds rows atomically, in no fixed order. Here each
index is a permutation whose inverse is known, so that a gradient is again a plain gather.
"""

import torch


def invert(index_N: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a permutation: ``inverse[index[i]] = i``."""
    places_N = torch.arange(index_N.numel(), device=index_N.device)
    return torch.empty_like(index_N).scatter_(0, index_N, places_N)


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, index, inverse):
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slots, inverse, top_k):
        ctx.top_k = top_k
        ctx.save_for_backward(inverse)
        return x.index_select(0, slots // top_k)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        by_slot = grad.index_select(0, inverse)
        return by_slot.unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class _CombineTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, slots, inverse):
        top_k = weights.shape[1]
        by_slot = rows.index_select(0, inverse).unflatten(0, (-1, top_k))
        ctx.save_for_backward(by_slot, weights, slots)
        # A product of (1, K) and (K, D) for each token: one pass over the rows, summed in float32.
        return torch.bmm(weights.to(rows.dtype).unsqueeze(1), by_slot).squeeze(1)

    @staticmethod
    def backward(ctx, grad):
        by_slot, weights, slots = ctx.saved_tensors
        weights_of_row = weights.flatten().index_select(0, slots).to(grad.dtype)
        grad_rows = grad.index_select(0, slots // weights.shape[1])
        grad_rows.mul_(weights_of_row.unsqueeze(1))
        grad_weights = torch.bmm(by_slot, grad.unsqueeze(2)).squeeze(2)
        return grad_rows, grad_weights.to(weights.dtype), None, None


def permute_rows(
    rows_RD: torch.Tensor, index_R: torch.Tensor, *, inverse_R: torch.Tensor
) -> torch.Tensor:
    """Return ``rows_RD[index_R]``, ``(R, D)``.

    Args:
        index_R: a permutation, int64.
        inverse_R: its inverse.
    """
    return _PermuteRows.apply(rows_RD, index_R, inverse_R)  # pyright: ignore[reportReturnType]


def gather_tokens(
    x_TD: torch.Tensor, slots_N: torch.Tensor, *, inverse_N: torch.Tensor, top_k: int
) -> torch.Tensor:
    """Return the token of each slot, ``x_TD[slots_N // top_k]``, ``(N, D)``.

    The gradient of a token is the sum over its slots in order of slot, accumulated in float32.

    Args:
        slots_N: a permutation of the slots ``t * top_k + k``, int64.
        inverse_N: its inverse.
    """
    return _GatherTokens.apply(x_TD, slots_N, inverse_N, top_k)  # pyright: ignore[reportReturnType]


def combine_tokens(
    rows_ND: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    slots_N: torch.Tensor,
    inverse_N: torch.Tensor,
) -> torch.Tensor:
    """Return, for each token, the weighted sum of the rows of its slots, ``(T, D)``.

    The weights are rounded to the dtype of the rows; products are summed in float32.

    Args:
        rows_ND: the row of slot ``slots_N[i]`` at place i.
        slots_N: a permutation of the slots, int64.
        inverse_N: its inverse.
    """
    return _CombineTokens.apply(  # pyright: ignore[reportReturnType]
        rows_ND, weights_TK, slots_N, inverse_N
    )
