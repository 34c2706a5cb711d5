"""Backward pass of a fused layer: gradients of tokens, routing weights and projections.

Kernels, all on the current stream:

1. With save "inputs" or "recompute": repeat fetch and first GEMM. "inputs" fetches from saved token
   copies, "recompute" from the peers after another publication of the tokens.
2. Publish the output's gradients to all ranks.
3. Fetch and GEMM with the second projection, side by side (``dispatch_dgrad``).
4. GEMM with the first projection and combine, side by side (``dgrad_combine``).
5. Weight-gradient GEMMs of both projections, which wait for no rank.
"""

from typing import Any, NamedTuple

import torch

from halley.core.types import Save
from halley.fused.buffer_cache import Workspaces
from halley.fused.buffers import Workspace
from halley.fused.kernels.combine import dgrad_combine
from halley.fused.kernels.dispatch import dispatch_dgrad, dispatch_gemm, num_dweight_columns
from halley.fused.kernels.layout import KernelContext, Layout
from halley.fused.kernels.send_buffer import publish_rows
from halley.fused.replay import Results, release
from halley.ops.kernels.weight_gemm import weight_gemm


# Indices in the list of input tensors. The list is mutable, so that an input can be released early.
_DY, _SAVED, _PLAN, _PRE, _UP, _DOWN, _IDX = range(7)


class BackwardOptions(NamedTuple):
    """Options of one backward pass.

    Attributes:
        gated, fused, save: as in the forward call.
        needs_up, needs_down: whether the projections need gradients.
    """

    gated: bool
    fused: bool
    save: Save
    needs_up: bool
    needs_down: bool


class TokenGradients(NamedTuple):
    """Results of the backward pass without weight gradients; R is as in ``LayerResult``.

    Attributes:
        dx_TD: gradients of this rank's tokens.
        dweights_TK: gradients of their routing weights, float32.
        dpre_RG: gradients of the first GEMM's outputs.
        weighted_RF: activations times routing weights.
        dy_RD: gradients of the layer's output, one row for each expert of a token.
        rows_RD: input rows of the first GEMM.
    """

    dx_TD: torch.Tensor
    dweights_TK: torch.Tensor
    dpre_RG: torch.Tensor
    weighted_RF: torch.Tensor
    dy_RD: torch.Tensor
    rows_RD: torch.Tensor


def run_backward(
    workspaces: Workspaces,
    plan_id: int,
    inputs: list[Any],
    options: BackwardOptions,
    main_grads: tuple[torch.Tensor | None, torch.Tensor | None],
) -> Results:
    """Run the backward pass of a layer; a collective of the ranks.

    Args:
        workspaces: buffers of the forward.
        plan_id: of the forward's ``LayerResult``.
        inputs: gradient of the output; saved rows (with save "recompute", the tokens), plan and
            ``pre_RG`` of the forward; both projections; expert ids. After their last use, saved
            token copies are replaced by None.
        options: see the class.
        main_grads: for each projection, the buffer to which its gradient is added, or None.

    Returns:
        Gradients of tokens, of routing weights in float32, and of both projections. None for a
        projection that needs no gradient or has a ``main_grad``.

    Raises:
        RuntimeError: the buffers were closed, or a peer did not begin the same pass in time.
    """
    workspace, layout = workspaces.find_plan(plan_id)
    inputs += [buffer for buffer in main_grads if buffer is not None]
    dy_TD, saved = inputs[_DY], inputs[_SAVED]
    key = (
        "backward", options, plan_id, *(b is None or b.dtype for b in main_grads),
        inputs[_PRE].shape[0], saved.shape, dy_TD.shape, dy_TD.dtype, inputs[_UP].shape,
        inputs[_DOWN].shape, inputs[_IDX].dtype,
    )  # fmt: skip
    del saved  # so that ``release`` drops the last reference
    workspace.begin_pass()
    recording = workspace.launches.find(key, inputs)
    if recording is not None:
        return recording.replay(inputs)
    with workspace.launches.record(key, inputs, workspace.persistent_tensors()) as outputs:
        outputs += launch_backward(workspace, layout, inputs, options, main_grads)
    return outputs


def launch_backward(
    workspace: Workspace,
    layout: Layout,
    inputs: list[Any],
    options: BackwardOptions,
    main_grads: tuple[torch.Tensor | None, torch.Tensor | None],
) -> Results:
    """Launch all kernels of a backward pass; arguments and results as in ``run_backward``."""
    plan, up_LGD, down_LDF = inputs[_PLAN], inputs[_UP], inputs[_DOWN]
    dx_TD, dweights_TK, dpre_RG, weighted_RF, dy_RD, rows_RD = launch_token_gradients(
        workspace, layout, inputs, gated=options.gated, fused=options.fused, save=options.save
    )
    dup = ddown = None
    plan_of = {"workspace": workspace, "layout": layout, "plan": plan}
    if options.needs_down:
        ddown = launch_weight_gradient(
            dy_RD, weighted_RF, down_LDF.shape[0], main_grads[1], **plan_of
        )
    del dy_RD, weighted_RF  # frees memory for the gradient of the first projection
    if options.needs_up:
        dup = launch_weight_gradient(dpre_RG, rows_RD, up_LGD.shape[0], main_grads[0], **plan_of)
    return dx_TD, dweights_TK, dup, ddown


def launch_token_gradients(
    workspace: Workspace, layout: Layout, inputs: list[Any], *, gated: bool, fused: bool, save: Save
) -> TokenGradients:
    """Launch the kernels of a backward pass except the weight-gradient GEMMs."""
    dy_TD, plan, pre_RG = inputs[_DY], inputs[_PLAN], inputs[_PRE]
    down_LDF, up_LGD, topk_idx_TK = inputs[_DOWN], inputs[_UP], inputs[_IDX]
    context = workspace.context(layout)
    if save == "all":
        rows_RD = inputs[_SAVED]
    else:
        rows_RD, pre_RG = _recompute(
            context, inputs, gated=gated, fused=fused, fetches=save == "recompute"
        )
    num_rows, inner_size = pre_RG.shape[0], down_LDF.shape[2]
    weight_R = pre_RG.new_empty(num_rows, dtype=torch.float32)
    publish_rows(context, plan, x_TD=dy_TD, weight_R=weight_R)
    dpre_RG = torch.empty_like(pre_RG)
    weighted_RF = pre_RG.new_empty(num_rows, inner_size)
    dy_RD = pre_RG.new_empty(num_rows, dy_TD.shape[1])
    columns = num_dweight_columns(inner_size, workspace.config)
    dweight_RJ = pre_RG.new_empty(num_rows, columns, dtype=torch.float32)
    dispatch_dgrad(
        context,
        plan,
        dy_RD=dy_RD,
        dpre_RG=dpre_RG,
        weighted_RF=weighted_RF,
        dweight_RJ=dweight_RJ,
        pre_RG=pre_RG,
        weight_R=weight_R,
        down_LDF=down_LDF,
        gated=gated,
        fused=fused,
    )
    del pre_RG, weight_R  # frees a recomputed pre_RG
    dx_TD = dy_TD.new_empty(topk_idx_TK.shape[0], up_LGD.shape[2])
    dweights_TK = dy_TD.new_empty(topk_idx_TK.shape, dtype=torch.float32)
    dgrad_combine(
        context,
        plan,
        dx_TD=dx_TD,
        dweights_TK=dweights_TK,
        z_RD=workspace.rows_RD,
        dpre_RG=dpre_RG,
        dweight_RJ=dweight_RJ,
        up_LGD=up_LGD,
        topk_idx_TK=topk_idx_TK,
        fused=fused,
    )
    if not dy_TD.is_cuda:  # interpreted kernels have finished
        workspace.check()
    return TokenGradients(dx_TD, dweights_TK, dpre_RG, weighted_RF, dy_RD, rows_RD)


def launch_weight_gradient(
    grad_RM: torch.Tensor,
    rows_RN: torch.Tensor,
    num_experts: int,
    main_grad: torch.Tensor | None,
    *,
    workspace: Workspace,
    layout: Layout,
    plan: torch.Tensor,
) -> torch.Tensor | None:
    """Launch the weight-gradient GEMM of one projection, with sums in float32.

    Args:
        grad_RM: gradients of the projection's outputs.
        rows_RN: inputs of the projection.
        num_experts: experts of this rank, L.
        main_grad: buffer ``(L, M, N)`` to which the gradient is added, or None.
        workspace, layout, plan: of the forward.

    Returns:
        The gradient ``(L, M, N)``; None if it was added to ``main_grad``.
    """
    out_LMN = main_grad
    if main_grad is None:
        out_LMN = rows_RN.new_empty(num_experts, grad_RM.shape[1], rows_RN.shape[1])
    assert out_LMN is not None
    weight_gemm(
        out_LMN,
        grad_RM,
        rows_RN,
        expert_begin=plan[layout.expert_begin : layout.expert_begin + num_experts],
        expert_rows=plan[layout.expert_rows : layout.expert_rows + num_experts],
        tile=workspace.config.weight,
        block_m=workspace.config.block_m,
        num_programs=workspace.num_sms,
        accumulate=main_grad is not None,
    )
    return out_LMN if main_grad is None else None


def _recompute(
    context: KernelContext,
    inputs: list[Any],
    *,
    gated: bool,
    fused: bool,
    fetches: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat the first GEMM; return its input rows and its outputs before the activation.

    Args:
        fetches: True publishes the tokens and fetches them from the peers again. False reads the
            token copies that forward saved, and then releases them.
    """
    saved, plan, up_LGD = inputs[_SAVED], inputs[_PLAN], inputs[_UP]
    num_rows = inputs[_PRE].shape[0]
    if fetches:
        publish_rows(context, plan, x_TD=saved)
    rows_RD = saved.new_empty(num_rows, saved.shape[1])
    pre_RG = saved.new_empty(num_rows, up_LGD.shape[1])
    dispatch_gemm(
        context,
        plan,
        x_RD=rows_RD,
        h_RF=saved.new_empty(num_rows, up_LGD.shape[1] // (2 if gated else 1)),  # not used
        pre_RG=pre_RG,
        up_LGD=up_LGD,
        gated=gated,
        fused=fused,
        copies_PD=None if fetches else saved,
        copies_saved=not fetches,
    )
    if not fetches:
        release(inputs, _SAVED)
    return rows_RD, pre_RG
