"""Permute rows with gradients, for eager code: from tokens to slots sorted by expert, and back.

The gradient of torch's ``index_select`` adds rows with atomics, in no fixed order. Here each index
is a permutation with a known inverse, so every gradient is a gather and deterministic.

Eager code calls these autograd functions instead of the operators of ``traceable_routing``: an
operator with a gradient takes about 30 us more host time a call.

Permutations are int32 or int64: with ``order``, row ``order[i]`` of the input is row i of the
output, and ``inverse[order[i]] = i``.
"""

import torch


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slots, inverse, top_k):
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x.index_select(0, slots // top_k)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        by_slot = grad.index_select(0, inverse)
        return by_slot.view(-1, ctx.top_k, grad.shape[1]).sum(1), None, None, None


class _CombineTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, slots, inverse):
        num_tokens, top_k = weights.shape
        by_slot = rows.index_select(0, inverse).view(num_tokens, top_k, rows.shape[1])
        ctx.save_for_backward(by_slot, weights, slots)
        # A (1, K) x (K, D) GEMM for each token: one pass over the rows, accumulated in float32.
        return torch.bmm(weights.to(rows.dtype).unsqueeze(1), by_slot).squeeze(1)

    @staticmethod
    def backward(ctx, grad):
        by_slot, weights, slots = ctx.saved_tensors
        weights_of_row = weights.to(grad.dtype).reshape(-1, 1).index_select(0, slots)
        grad_rows = grad.index_select(0, slots // weights.shape[1]).mul_(weights_of_row)
        grad_weights = torch.bmm(by_slot, grad.unsqueeze(2)).squeeze(2)
        return grad_rows, grad_weights.to(weights.dtype), None, None


def invert_permutation(order_N: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a permutation, int64 ``(N,)``."""
    places_N = torch.arange(order_N.numel(), device=order_N.device)
    return torch.empty_like(places_N).scatter_(0, order_N.long(), places_N)


def reorder_rows(
    rows_RD: torch.Tensor, order_R: torch.Tensor, *, inverse_R: torch.Tensor
) -> torch.Tensor:
    """Return the rows in the given order, ``rows_RD[order_R]``, ``(R, D)``."""
    return _PermuteRows.apply(rows_RD, order_R, inverse_R)  # pyright: ignore[reportReturnType]


def gather_tokens(
    x_TD: torch.Tensor, slots_N: torch.Tensor, *, inverse_N: torch.Tensor, top_k: int
) -> torch.Tensor:
    """Return the token of each slot, ``x_TD[slots_N // top_k]``, ``(N, D)``.

    The gradient of a token is the sum over its slots in order of slot, accumulated in float32.

    Args:
        x_TD: tokens.
        slots_N: a permutation of all slots; slot ``t * top_k + k`` is the k-th choice of token t.
        inverse_N: its inverse.
        top_k: K.
    """
    return _GatherTokens.apply(  # pyright: ignore[reportReturnType]
        x_TD, slots_N, inverse_N, top_k
    )


def combine_tokens(
    rows_ND: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    slots_N: torch.Tensor,
    inverse_N: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sum of each token's rows, ``(T, D)``; accumulated in float32.

    Args:
        rows_ND: row i belongs to slot ``slots_N[i]``.
        weights_TK: one weight a slot, rounded to the dtype of the rows.
        slots_N: a permutation of all slots, as for ``gather_tokens``.
        inverse_N: its inverse.
    """
    return _CombineTokens.apply(  # pyright: ignore[reportReturnType]
        rows_ND, weights_TK, slots_N, inverse_N
    )
