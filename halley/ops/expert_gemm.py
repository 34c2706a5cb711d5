"""The experts' products as operators: each row's result is its own, whatever rows stand with it.

The gradient of the rows and that of the weights are operators of their own, so that a compiler may
put the second where the wire is busy.
"""

import torch
import torch.nn.functional as F

from halley.ops.library import define


# On a CPU products of few rows are other kernels, of other bits, than those of more.
_ROW_MULTIPLE = 16


def expert_gemm(
    rows_RI: torch.Tensor, weights_LIO: torch.Tensor, ends_L: torch.Tensor
) -> torch.Tensor:
    """Multiply each expert's rows by its matrix; return ``(R, O)``. Differentiable.

    Args:
        rows_RI: rows sorted by expert.
        weights_LIO: a matrix an expert, of any strides.
        ends_L: end of each expert's rows, int32, non-decreasing; an expert may have none.
    """
    return _call_expert_gemm(rows_RI, weights_LIO, ends_L)


def _expert_gemm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if rows.is_cuda:
        return F.grouped_mm(rows, weights, offs=ends)
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        group = rows[begin:end]
        missing = -group.shape[0] % _ROW_MULTIPLE
        if group.shape[0]:
            product = F.pad(group, (0, 0, 0, missing)) @ weights[expert]
            out[begin:end] = product[: group.shape[0]]
        begin = end
    return out


def _fake_expert_gemm(
    rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    rows, weights, ends = ctx.saved_tensors
    grad = grad.contiguous()
    grad_rows = torch.ops.halley.expert_gemm(grad, weights.transpose(1, 2), ends)
    if weights.stride(1) == 1:  # a transposed parameter, whose gradient is to lie as it does
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


def _fake_expert_weight_gemm(
    rows: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], grad.shape[1])


_call_expert_gemm = define(
    "expert_gemm(Tensor rows, Tensor weights, Tensor ends) -> Tensor",
    _expert_gemm,
    _fake_expert_gemm,
    setup_context=_setup,
    backward=_backward,
    made_of_torch=True,
)
define(
    "expert_weight_gemm(Tensor rows, Tensor grad, Tensor ends) -> Tensor",
    _expert_weight_gemm,
    _fake_expert_weight_gemm,
    made_of_torch=True,
)
