"""Process the rows of a rank's experts: permute them, run grouped GEMMs, sum each token's rows.

Eager code calls torch's grouped GEMM. For ``torch.compile`` there is ``expert_gemm``: its weight
gradient is a separate operator, so that a compiler can schedule it under an all-to-all. The
permutations are for eager code; ``traceable_routing.py`` has those for ``torch.compile``. In this
file, I and O are the columns of a GEMM's input and output.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F

from halley.core.reference import activate
from halley.core.types import Experts
from halley.ops.library import define, save_inputs


ROW_ALIGNMENT = 16  # bytes; torch's grouped GEMM needs row sizes that are multiples of this
# On a CPU, GEMMs of few and of many rows use different kernels, which round differently. Padding
# the rows to a multiple of 16 makes the result of a row independent of the number of other rows.
_CPU_ROW_MULTIPLE = 16


def check_alignment(size: int, *, name: str, dtype: torch.dtype) -> None:
    """Raise a ``ValueError`` unless torch's grouped GEMM can read rows of ``size`` elements."""
    multiple = ROW_ALIGNMENT // dtype.itemsize
    if size % multiple != 0:
        raise ValueError(
            f"{name} ({size}) must be a multiple of {multiple} for {dtype}: "
            f"torch's grouped GEMM reads rows of {ROW_ALIGNMENT} bytes"
        )


def find_alignment_problem(experts: Experts) -> str:
    """Return why the sizes of these experts do not suit torch's grouped GEMM; "" if they do."""
    _, hidden_size, intermediate_size = experts.down_LDF.shape
    try:
        for name, size in (("hidden", hidden_size), ("intermediate", intermediate_size)):
            check_alignment(size, name=f"{name}_size", dtype=experts.down_LDF.dtype)
    except ValueError as error:
        return str(error)
    return ""


def _grouped_mm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(rows, weights, offs=ends)


def apply_experts(
    x_RD: torch.Tensor,
    experts: Experts,
    *,
    ends_L: torch.Tensor,
    gemm: Callable[..., torch.Tensor] = _grouped_mm,
) -> torch.Tensor:
    """Return the expert output of each row, ``(R, D)``. Differentiable.

    The rows are sorted by expert and have the dtype of the weights. ``ends_L`` is the end of each
    expert's rows, int32, non-decreasing; an expert may have no rows.
    """
    h_RG = gemm(x_RD, experts.up_LGD.transpose(1, 2), ends_L)
    if experts.up_bias_LG is not None:
        h_RG = add_bias(h_RG, experts.up_bias_LG, ends_L=ends_L)
    h_RF = activate(h_RG, experts.activation)
    y_RD = gemm(h_RF, experts.down_LDF.transpose(1, 2), ends_L)
    if experts.down_bias_LD is not None:
        y_RD = add_bias(y_RD, experts.down_bias_LD, ends_L=ends_L)
    return y_RD


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, bias, ends):
        ctx.save_for_backward(ends)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return rows + bias.repeat_interleave(counts, dim=0, output_size=rows.shape[0])

    @staticmethod
    def backward(ctx, grad):
        # The bias gradient, a column sum, is a GEMM with ones: it adds in float32 in a fixed order.
        (ends,) = ctx.saved_tensors
        ones = grad.new_ones(grad.shape[0], ROW_ALIGNMENT // grad.dtype.itemsize)
        return grad, F.grouped_mm(ones.t(), grad.contiguous(), offs=ends)[:, 0], None


def add_bias(x_RO: torch.Tensor, bias_LO: torch.Tensor, *, ends_L: torch.Tensor) -> torch.Tensor:
    """Add to each row the bias of its expert, ``(R, O)``; rows of expert l end at ``ends_L[l]``."""
    return _AddBias.apply(x_RO, bias_LO, ends_L)  # pyright: ignore[reportReturnType]


def _expert_gemm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each row by its expert's matrix, in one operator; return ``(R, O)``.

    Differentiable; on a CPU, the result of a row does not depend on the other rows. ``rows`` are
    ``(R, I)``, and ``weights`` ``(L, I, O)`` of any strides; ``ends`` as for ``apply_experts``.
    """
    if rows.is_cuda:
        return F.grouped_mm(rows, weights, offs=ends)
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    for group, weight in zip(_groups(ends), weights, strict=True):
        num_rows = group.stop - group.start
        if num_rows:
            padded = F.pad(rows[group], (0, 0, 0, -num_rows % _CPU_ROW_MULTIPLE))
            out[group] = (padded @ weight)[:num_rows]
    return out


def _groups(ends: torch.Tensor) -> list[slice]:
    return [slice(*pair) for pair in pairwise([0, *ends.tolist()])]


def _backward(ctx, grad):
    rows, weights, ends = ctx.saved_tensors
    grad = grad.contiguous()
    grad_rows = torch.ops.halley.expert_gemm(grad, weights.transpose(1, 2), ends)
    if weights.stride(1) == 1:  # transposed parameter: give the gradient the parameter's layout
        grad_weights = torch.ops.halley.expert_weight_gemm(grad, rows, ends).transpose(1, 2)
    else:
        grad_weights = torch.ops.halley.expert_weight_gemm(rows, grad, ends)
    return grad_rows, grad_weights, None


def _expert_weight_gemm(rows: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if rows.is_cuda:
        return F.grouped_mm(rows.t(), grad, offs=ends)
    return torch.stack([rows[group].t() @ grad[group] for group in _groups(ends)])


expert_gemm = define(
    "expert_gemm(Tensor rows, Tensor weights, Tensor ends) -> Tensor",
    _expert_gemm,
    fake=lambda rows, weights, ends: rows.new_empty(rows.shape[0], weights.shape[2]),
    setup_context=save_inputs,
    backward=_backward,
    decomposable=True,
)
define(
    "expert_weight_gemm(Tensor rows, Tensor grad, Tensor ends) -> Tensor",
    _expert_weight_gemm,
    fake=lambda rows, grad, ends: rows.new_empty(ends.shape[0], rows.shape[1], grad.shape[1]),
    decomposable=True,
)


def invert_permutation(order_N: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a permutation, int64 ``(N,)``."""
    places_N = torch.arange(order_N.numel(), device=order_N.device)
    return torch.empty_like(places_N).scatter_(0, order_N.long(), places_N)


def reorder_rows(
    rows_RD: torch.Tensor, order_R: torch.Tensor, *, inverse_R: torch.Tensor
) -> torch.Tensor:
    """Return ``rows_RD[order_R]``, ``(R, D)``; ``inverse_R`` is the inverse permutation."""
    return _PermuteRows.apply(rows_RD, order_R, inverse_R)  # pyright: ignore[reportReturnType]


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def gather_tokens(
    x_TD: torch.Tensor, slots_N: torch.Tensor, *, inverse_N: torch.Tensor, top_k: int
) -> torch.Tensor:
    """Return the token row of each (token, choice) slot, ``x_TD[slots_N // top_k]``, ``(N, D)``.

    The gradient of a token is the sum over its slots in order of slot, accumulated in float32.
    ``slots_N`` is a permutation of all slots ``t * top_k + k``, and ``inverse_N`` its inverse.
    """
    return _GatherTokens.apply(  # pyright: ignore[reportReturnType]
        x_TD, slots_N, inverse_N, top_k
    )


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


def combine_tokens(
    rows_ND: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    slots_N: torch.Tensor,
    inverse_N: torch.Tensor,
) -> torch.Tensor:
    """Return each token's weighted sum of expert output rows, ``(T, D)``; summed in float32.

    Row i belongs to slot ``slots_N[i]``. ``weights_TK`` is rounded to the dtype of the rows.
    """
    return _CombineTokens.apply(  # pyright: ignore[reportReturnType]
        rows_ND, weights_TK, slots_N, inverse_N
    )


class _CombineTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, slots, inverse):
        num_tokens, top_k = weights.shape
        by_slot = rows.index_select(0, inverse).view(num_tokens, top_k, rows.shape[1])
        ctx.save_for_backward(by_slot, weights, slots)
        # Multiply (1, K) by (K, D) for each token: one pass over the rows, summed in float32.
        return torch.bmm(weights.to(rows.dtype).unsqueeze(1), by_slot).squeeze(1)

    @staticmethod
    def backward(ctx, grad):
        by_slot, weights, slots = ctx.saved_tensors
        weights_of_row = weights.to(grad.dtype).reshape(-1, 1).index_select(0, slots)
        grad_rows = grad.index_select(0, slots // weights.shape[1]).mul_(weights_of_row)
        grad_weights = torch.bmm(by_slot, grad.unsqueeze(2)).squeeze(2)
        return grad_rows, grad_weights.to(weights.dtype), None, None
