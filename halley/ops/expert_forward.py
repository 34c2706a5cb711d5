"""The experts' arithmetic on rows sorted by expert: two grouped GEMMs around the activation."""

import torch
import torch.nn.functional as F

from halley.core.reference import activate
from halley.core.types import Experts


ROW_ALIGNMENT = 16  # bytes; what torch's grouped GEMM asks of each row of its operands


def check_alignment(size: int, *, name: str, dtype: torch.dtype) -> None:
    """Check that rows of ``size`` elements can be read by the grouped GEMM.

    Raises:
        ValueError: they are no multiple of 16 bytes.
    """
    multiple = ROW_ALIGNMENT // dtype.itemsize
    if size % multiple != 0:
        raise ValueError(
            f"{name} ({size}) must be a multiple of {multiple} for {dtype}: "
            f"torch's grouped GEMM reads rows of {ROW_ALIGNMENT} bytes"
        )


def grouped_linear(
    x_RI: torch.Tensor, weight_LOI: torch.Tensor, *, ends_L: torch.Tensor
) -> torch.Tensor:
    """Multiply each group of rows by its own matrix; return ``(R, O)``.

    Args:
        x_RI: rows sorted by group.
        weight_LOI: one matrix a group, as in ``torch.nn.Linear``.
        ends_L: end of each group's rows, int32, non-decreasing; a group may be empty.
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
        # Column sums of each group, as a product with ones: summed in float32, in a fixed order.
        (ends,) = ctx.saved_tensors
        ones = grad.new_ones(grad.shape[0], ROW_ALIGNMENT // grad.dtype.itemsize)
        return grad, F.grouped_mm(ones.t(), grad.contiguous(), offs=ends)[:, 0], None


def add_bias(x_RO: torch.Tensor, bias_LO: torch.Tensor, *, ends_L: torch.Tensor) -> torch.Tensor:
    """Add each group's bias to its rows; return ``(R, O)``.

    Args:
        x_RO: rows sorted by group.
        bias_LO: one bias a group.
        ends_L: end of each group's rows, int32.
    """
    return _AddBias.apply(x_RO, bias_LO, ends_L)  # pyright: ignore[reportReturnType]


def apply_experts(x_RD: torch.Tensor, experts: Experts, *, ends_L: torch.Tensor) -> torch.Tensor:
    """Return each row's expert output, ``(R, D)``.

    Args:
        x_RD: rows sorted by expert, in the dtype of the weights.
        experts: L experts.
        ends_L: end of each expert's rows, int32.
    """
    h_RG = grouped_linear(x_RD, experts.up_LGD, ends_L=ends_L)
    if experts.up_bias_LG is not None:
        h_RG = add_bias(h_RG, experts.up_bias_LG, ends_L=ends_L)
    h_RF = activate(h_RG, experts.activation)
    y_RD = grouped_linear(h_RF, experts.down_LDF, ends_L=ends_L)
    if experts.down_bias_LD is not None:
        y_RD = add_bias(y_RD, experts.down_bias_LD, ends_L=ends_L)
    return y_RD
