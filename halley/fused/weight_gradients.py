"""Weight gradients of a fused layer, also of a layer whose tokens run in several parts.

A layer part is one call of the fused kernels for some of the tokens of a layer. The strategy
``hierarchical`` runs a layer across nodes in parts. A GEMM per part would read and write the
gradients of all weights for each part. Instead, the backward of each part keeps the operands of its
weight gradients. After the last part, one GEMM for each projection multiplies the rows of all.

In this file, P is the number of layer parts, and M and N are the rows and columns of a gradient.
"""

from typing import Any, NamedTuple, final

import torch

from halley.fused.buffer_cache import Workspaces
from halley.fused.buffers import Workspace
from halley.fused.kernels.layout import Layout
from halley.ops.kernels.weight_gemm import weight_gemm


MAX_PARTS = 4  # of the rows of an expert, see ops/kernels/weight_gemm.py


class ExpertRows(NamedTuple):
    """First row and number of rows of each expert in the operands of a weight gradient, int32.

    Both are ``(L,)``, or ``(P, L)`` for a layer of P parts, which have rows of every expert each.
    """

    begin: torch.Tensor
    num_rows: torch.Tensor


def find_experts(layout: Layout, plan: torch.Tensor, *, num_experts: int) -> ExpertRows:
    """Return the positions that a dispatch plan gives to the rows of each expert of this rank."""
    begin, num_rows = layout.expert_begin, layout.expert_rows
    return ExpertRows(plan[begin : begin + num_experts], plan[num_rows : num_rows + num_experts])


def launch_weight_gradient(
    grad_RM: torch.Tensor,
    rows_RN: torch.Tensor,
    main_grad: torch.Tensor | None = None,
    *,
    experts: ExpertRows,
    workspace: Workspace,
) -> torch.Tensor | None:
    """Launch the weight-gradient GEMM of one projection, with sums in float32.

    Return the gradient ``(L, M, N)``, or None if it was added to the buffer ``main_grad``.
    """
    out_LMN = rows_RN.new_empty(0)
    if main_grad is None:
        num_experts = experts.begin.shape[-1]
        out_LMN = rows_RN.new_empty(num_experts, grad_RM.shape[1], rows_RN.shape[1])
    weight_gemm(
        out_LMN if main_grad is None else main_grad,
        grad_RM,
        rows_RN,
        expert_begin=experts.begin,
        expert_rows=experts.num_rows,
        tile=workspace.config.weight,
        block_m=workspace.config.block_m,
        num_programs=workspace.num_sms,
        accumulate=main_grad is not None,
    )
    return out_LMN if main_grad is None else None


@final
class LayerParts:
    """Buffers that collect the operands of the weight gradients of all parts of one layer call.

    Args:
        workspaces: buffers of the layer.
        num_experts: experts of this rank.
        widths: columns of ``dpre_RG``, ``weighted_RF``, ``dy_RD`` and ``rows_RD``, see
            ``passes.TokenGradients``.
    """

    def __init__(
        self, workspaces: Workspaces, *, num_experts: int, widths: tuple[int, int, int, int]
    ) -> None:
        self._workspaces, self._num_experts, self._widths = workspaces, num_experts, widths
        self._num_rows: list[int] = []
        self._operands: list[torch.Tensor] = []
        self._experts: dict[int, ExpertRows] = {}
        self._plan_id = 0

    def add(self, num_rows: int) -> int:
        """Count a part, with ``num_rows`` rows, after its forward pass; return its index."""
        self._num_rows.append(num_rows)
        return len(self._num_rows) - 1

    def begin_backward(
        self, index: int, plan: torch.Tensor, plan_id: int, *, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Return the buffers for the operands of one part, in the order of ``widths``."""
        if not self._operands:
            total = sum(self._num_rows)
            self._operands = [
                torch.empty(total, width, dtype=dtype, device=plan.device) for width in self._widths
            ]
        first = sum(self._num_rows[:index])
        layout = self._workspaces.find_plan(plan_id)[1]
        experts = find_experts(layout, plan, num_experts=self._num_experts)
        self._experts[index] = ExpertRows(experts.begin + first, experts.num_rows)
        self._plan_id = plan_id
        return [each[first : first + self._num_rows[index]] for each in self._operands]

    def weight_gradients(
        self, needed: tuple[bool, bool], main_grads: tuple[torch.Tensor | None, torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of both projections, and release the operands.

        Args:
            needed: whether each projection needs its gradient.
            main_grads: for each projection, the buffer to which its gradient is added, or None.
        """
        (dpre, weighted, dy, rows), self._operands = self._operands, []
        parts, self._experts = [self._experts[i] for i in range(len(self._num_rows))], {}
        experts = ExpertRows(*(torch.stack(column) for column in zip(*parts, strict=True)))
        workspace = self._workspaces.find_plan(self._plan_id)[0]
        return [
            launch_weight_gradient(grad, inputs, main_grad, experts=experts, workspace=workspace)
            if is_needed
            else None
            for is_needed, main_grad, grad, inputs in zip(
                needed, main_grads, (dpre, dy), (rows, weighted), strict=True
            )
        ]


class LayerPart(NamedTuple):
    """The number of a layer part, and the objects through which it shares weight-gradient GEMMs.

    Attributes:
        index: number of the part. The size of its plan is predicted from the same part of the
            last call.
        parts: buffers to which the part's backward adds the operands of its weight gradients; None
            if no weight needs a gradient.
        anchor: the empty scalar from ``JoinParts``, an input of each part; None with ``parts``.
    """

    index: int
    parts: LayerParts | None = None
    anchor: torch.Tensor | None = None


WHOLE_LAYER = LayerPart(0)


class JoinParts(torch.autograd.Function):
    """Compute the weight gradients of a layer in backward, once, for the rows of all its parts.

    Forward returns a scalar whose value nothing reads. Each part takes this scalar as an input. So
    autograd runs this backward after the backward of all parts.
    """

    @staticmethod
    def forward(ctx: Any, up_LGD: torch.Tensor, down_LDF: torch.Tensor, parts: LayerParts) -> Any:
        ctx.set_materialize_grads(False)
        ctx.parts = parts
        # Backward only reads ``main_grad`` of these weights. Weights without it are not kept alive.
        ctx.with_main_grad = tuple(
            weight if getattr(weight, "main_grad", None) is not None else None
            for weight in (up_LGD, down_LDF)
        )
        return up_LGD.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: None) -> Any:
        up, down = ctx.with_main_grad
        needed = ctx.needs_input_grad[:2]
        main_grads = (getattr(up, "main_grad", None), getattr(down, "main_grad", None))
        gradients = ctx.parts.weight_gradients(needed, main_grads)
        for weight, is_needed in zip((up, down), needed, strict=True):
            if weight is not None and is_needed:
                weight.grad_added_to_main_grad = True
        return *gradients, None
