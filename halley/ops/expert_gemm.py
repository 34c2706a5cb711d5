"""Run experts on rows that are sorted by expert: grouped GEMM, activation, grouped GEMM.

``apply_experts`` calls torch's grouped GEMM, for eager code. ``apply_experts_traceable`` uses the
operator ``halley::expert_gemm``. Its weight gradient is a separate operator, so that a compiler can
schedule it under an all-to-all.
"""

import torch
import torch.nn.functional as F

from halley.core.reference import activate
from halley.core.types import Experts
from halley.ops.library import define


ROW_ALIGNMENT = 16  # bytes; torch's grouped GEMM requires it of each row of its operands
# On a CPU, GEMMs of few and of many rows use different kernels, which round differently. Padding to
# a multiple makes the result of a row independent of the number of other rows.
_CPU_ROW_MULTIPLE = 16


def check_alignment(size: int, *, name: str, dtype: torch.dtype) -> None:
    """Check that the grouped GEMM can read rows of ``size`` elements.

    Raises:
        ValueError: a row is no multiple of 16 bytes.
    """
    multiple = ROW_ALIGNMENT // dtype.itemsize
    if size % multiple != 0:
        raise ValueError(
            f"{name} ({size}) must be a multiple of {multiple} for {dtype}: "
            f"torch's grouped GEMM reads rows of {ROW_ALIGNMENT} bytes"
        )


def apply_experts(x_RD: torch.Tensor, experts: Experts, *, ends_L: torch.Tensor) -> torch.Tensor:
    """Return the expert output of each row, ``(R, D)``. Differentiable.

    Args:
        x_RD: rows sorted by expert, in the dtype of the weights.
        experts: L experts.
        ends_L: end of each expert's rows, int32, non-decreasing; an expert may have no rows.
    """
    h_RG = grouped_linear(x_RD, experts.up_LGD, ends_L=ends_L)
    if experts.up_bias_LG is not None:
        h_RG = add_bias(h_RG, experts.up_bias_LG, ends_L=ends_L)
    h_RF = activate(h_RG, experts.activation)
    y_RD = grouped_linear(h_RF, experts.down_LDF, ends_L=ends_L)
    if experts.down_bias_LD is not None:
        y_RD = add_bias(y_RD, experts.down_bias_LD, ends_L=ends_L)
    return y_RD


def apply_experts_traceable(
    x_RD: torch.Tensor, experts: Experts, *, ends_L: torch.Tensor
) -> torch.Tensor:
    """Return the expert output of each row by ``expert_gemm``; experts without biases.

    Args:
        x_RD, experts, ends_L: as for ``apply_experts``. On a CPU, the result of a row does not
            depend on the other rows.
    """
    h_RG = expert_gemm(x_RD, experts.up_LGD.transpose(1, 2), ends_L)
    h_RF = activate(h_RG, experts.activation)
    return expert_gemm(h_RF, experts.down_LDF.transpose(1, 2), ends_L)


def grouped_linear(
    x_RI: torch.Tensor, weight_LOI: torch.Tensor, *, ends_L: torch.Tensor
) -> torch.Tensor:
    """Multiply each group of rows by its own matrix; return ``(R, O)``.

    Args:
        x_RI: rows sorted by group.
        weight_LOI: one matrix for each group, in the layout of ``torch.nn.Linear``.
        ends_L: end of each group's rows, int32.
    """
    return F.grouped_mm(x_RI, weight_LOI.transpose(1, 2), offs=ends_L)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, bias, ends):
        ctx.save_for_backward(ends)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return rows + bias.repeat_interleave(counts, dim=0, output_size=rows.shape[0])

    @staticmethod
    def backward(ctx, grad):
        # The column sums of each group, as a GEMM with ones: float32, in a fixed order.
        (ends,) = ctx.saved_tensors
        ones = grad.new_ones(grad.shape[0], ROW_ALIGNMENT // grad.dtype.itemsize)
        return grad, F.grouped_mm(ones.t(), grad.contiguous(), offs=ends)[:, 0], None


def add_bias(x_RO: torch.Tensor, bias_LO: torch.Tensor, *, ends_L: torch.Tensor) -> torch.Tensor:
    """Add each group's bias to its rows; return ``(R, O)``.

    Args:
        x_RO: rows sorted by group.
        bias_LO: one bias for each group.
        ends_L: end of each group's rows, int32.
    """
    return _AddBias.apply(x_RO, bias_LO, ends_L)  # pyright: ignore[reportReturnType]


def expert_gemm(
    rows_RI: torch.Tensor, weights_LIO: torch.Tensor, ends_L: torch.Tensor
) -> torch.Tensor:
    """Multiply each expert's rows by its matrix, as one operator; return ``(R, O)``.

    Differentiable; on a CPU, the result of a row does not depend on the other rows.

    Args:
        rows_RI: rows sorted by expert.
        weights_LIO: one matrix for each expert, of any strides.
        ends_L: end of each expert's rows, int32, non-decreasing; an expert may have no rows.
    """
    return _call_expert_gemm(rows_RI, weights_LIO, ends_L)


def _expert_gemm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if rows.is_cuda:
        return F.grouped_mm(rows, weights, offs=ends)
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        group = rows[begin:end]
        missing = -group.shape[0] % _CPU_ROW_MULTIPLE
        if group.shape[0]:
            padded = F.pad(group, (0, 0, 0, missing)) @ weights[expert]
            out[begin:end] = padded[: group.shape[0]]
        begin = end
    return out


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    rows, weights, ends = ctx.saved_tensors
    grad = grad.contiguous()
    grad_rows = torch.ops.halley.expert_gemm(grad, weights.transpose(1, 2), ends)
    if weights.stride(1) == 1:  # a transposed parameter: its gradient gets the parameter's layout
        grad_weights = torch.ops.halley.expert_weight_gemm(grad, rows, ends).transpose(1, 2)
    else:
        grad_weights = torch.ops.halley.expert_weight_gemm(rows, grad, ends)
    return grad_rows, grad_weights, None


def _expert_weight_gemm(rows: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if rows.is_cuda:
        return F.grouped_mm(rows.t(), grad, offs=ends)
    starts = [0, *ends.tolist()]
    groups = [slice(starts[at], starts[at + 1]) for at in range(ends.shape[0])]
    return torch.stack([rows[group].t() @ grad[group] for group in groups])


_call_expert_gemm = define(
    "expert_gemm(Tensor rows, Tensor weights, Tensor ends) -> Tensor",
    _expert_gemm,
    fake=lambda rows, weights, ends: rows.new_empty(rows.shape[0], weights.shape[2]),
    setup_context=_setup,
    backward=_backward,
    decomposable=True,
)
define(
    "expert_weight_gemm(Tensor rows, Tensor grad, Tensor ends) -> Tensor",
    _expert_weight_gemm,
    fake=lambda rows, grad, ends: rows.new_empty(ends.shape[0], rows.shape[1], grad.shape[1]),
    decomposable=True,
)
