"""The gradient of stacked weights as an operator of its own, which no rank waits for.

What it needs is there long before anybody reads it: schedulers put it where the wire is busy.
"""

import torch

from halley.fused.buffer_cache import find_workspaces
from halley.ops.kernels.weight_gemm import weight_gemm as launch_weight_gemm
from halley.ops.library import define


def weight_gemm(
    grad_RM: torch.Tensor,
    rows_RN: torch.Tensor,
    plan: torch.Tensor,
    *,
    num_experts: int,
    top_k: int,
    workspaces: int,
) -> torch.Tensor:
    """Return the gradient of stacked weights, ``(L, M, N)``, summed in float32.

    Args:
        grad_RM: gradient of what the weights made of each row.
        rows_RN: what they made it of.
        plan: of the forward.
        num_experts: of this rank, L.
        top_k: experts of a token.
        workspaces: handle of the buffers.
    """
    return _call_weight_gemm(grad_RM, rows_RN, plan, num_experts, top_k, workspaces)


def add_weight_gemm(
    out_LMN: torch.Tensor,
    grad_RM: torch.Tensor,
    rows_RN: torch.Tensor,
    plan: torch.Tensor,
    *,
    top_k: int,
    workspaces: int,
) -> None:
    """Add the gradient of stacked weights to a buffer, float32 or of their dtype."""
    _launch_weight_gemm(out_LMN, grad_RM, rows_RN, plan, top_k, workspaces, accumulate=True)


def _weight_gemm(
    grad: torch.Tensor,
    rows: torch.Tensor,
    plan: torch.Tensor,
    num_experts: int,
    top_k: int,
    workspaces: int,
) -> torch.Tensor:
    out_LMN = rows.new_empty(num_experts, grad.shape[1], rows.shape[1])
    _launch_weight_gemm(out_LMN, grad, rows, plan, top_k, workspaces, accumulate=False)
    return out_LMN


def _launch_weight_gemm(
    out: torch.Tensor,
    grad: torch.Tensor,
    rows: torch.Tensor,
    plan: torch.Tensor,
    top_k: int,
    workspaces: int,
    *,
    accumulate: bool,
) -> None:
    owner, num_local = find_workspaces(workspaces), out.shape[0]
    workspace = owner.of_plan(plan, num_experts=owner.num_experts(num_local), top_k=top_k)
    layout, knobs = workspace.layout_of(plan), workspace.knobs
    launch_weight_gemm(
        out,
        grad,
        rows,
        expert_begin=plan[layout.expert_begin : layout.expert_begin + num_local],
        expert_rows=plan[layout.expert_rows : layout.expert_rows + num_local],
        tile=knobs.weight,
        block_m=knobs.block_m,
        num_programs=workspace.num_programs,
        accumulate=accumulate,
        overlaps=bool(workspace.in_flight),
    )
    workspace.in_flight = ()


def _fake_weight_gemm(
    grad: torch.Tensor,
    rows: torch.Tensor,
    plan: torch.Tensor,
    num_experts: int,
    top_k: int,
    workspaces: int,
) -> torch.Tensor:
    return rows.new_empty(num_experts, grad.shape[1], rows.shape[1])


_call_weight_gemm = define(
    "weight_gemm(Tensor grad, Tensor rows, Tensor plan, int num_experts, int top_k, "
    "int workspaces) -> Tensor",
    _weight_gemm,
    _fake_weight_gemm,
)
