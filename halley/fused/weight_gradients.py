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
class MainGrads:
    """The buffers ``main_grad`` of a layer's two projections, to which Megatron adds gradients.

    It keeps no weight alive that has no such buffer.

    Args:
        up_LGD, down_LDF: the projections as the user passed them. Saved-tensor hooks may return
            other tensor objects, which have no ``main_grad``.
    """

    def __init__(self, up_LGD: torch.Tensor, down_LDF: torch.Tensor) -> None:
        self._weights: list[Any] = [
            weight if getattr(weight, "main_grad", None) is not None else None
            for weight in (up_LGD, down_LDF)
        ]

    def buffers(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the buffer of each projection, or None."""
        up, down = (getattr(weight, "main_grad", None) for weight in self._weights)
        return up, down

    def mark_added(self, needed: tuple[bool, bool]) -> None:
        """Set ``grad_added_to_main_grad`` of the projections that have a buffer and a gradient."""
        for weight, is_needed in zip(self._weights, needed, strict=True):
            if weight is not None and is_needed:
                weight.grad_added_to_main_grad = True


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
        self._workspace: Workspace | None = None

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
        self._workspace, layout = self._workspaces.find_plan(plan_id)
        experts = find_experts(layout, plan, num_experts=self._num_experts)
        self._experts[index] = ExpertRows(experts.begin + first, experts.num_rows)
        return [each[first : first + self._num_rows[index]] for each in self._operands]

    def weight_gradients(
        self, needed: tuple[bool, bool], main_grads: MainGrads
    ) -> list[torch.Tensor | None]:
        """Return the gradients of both projections, and release the operands.

        The gradient of a projection is None if ``needed`` is false, or if it was added to the
        buffer of ``main_grads``.
        """
        (dpre, weighted, dy, rows), self._operands = self._operands, []
        parts, self._experts = [self._experts[i] for i in range(len(self._num_rows))], {}
        experts = ExpertRows(*(torch.stack(column) for column in zip(*parts, strict=True)))
        workspace = self._workspace
        assert workspace is not None, "no part has run its backward"
        gradients = [
            launch_weight_gradient(grad, inputs, main_grad, experts=experts, workspace=workspace)
            if is_needed
            else None
            for is_needed, main_grad, grad, inputs in zip(
                needed, main_grads.buffers(), (dpre, dy), (rows, weighted), strict=True
            )
        ]
        main_grads.mark_added(needed)
        return gradients


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
        ctx.parts, ctx.main_grads = parts, MainGrads(up_LGD, down_LDF)
        return up_LGD.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: None) -> Any:
        return *ctx.parts.weight_gradients(ctx.needs_input_grad[:2], ctx.main_grads), None
