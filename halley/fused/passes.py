"""Forward and backward pass of a fused layer: allocate tensors and launch the kernels in order.

Launches of a forward pass, all on the current stream:

1. ``make_plan``: publish tokens and routing to all ranks; make this rank's plan from their routing.
2. ``dispatch_gemm``: fetch rows and multiply them by the first projection, side by side.
3. ``gemm_combine``: multiply by the second projection and combine, side by side.

The host launches all of them with predicted sizes. Then it reads the true sizes, and launches the
GEMMs again if the predicted sizes were too small. Launches of a backward pass:

1. With save "inputs" or "recompute": ``dispatch_gemm`` again. "inputs" fetches from saved token
   copies, "recompute" from the peers after another publication of the tokens.
2. ``publish_rows``: publish the output's gradients to all ranks.
3. ``dispatch_dgrad``: fetch these gradients, multiply them by the second projection, side by side.
4. ``gemm_combine`` with the transposed first projection.
5. ``launch_weight_gradient`` for both projections, which waits for no rank.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, final

import torch

from halley.core.types import Save
from halley.fused.buffers import Workspace, Workspaces
from halley.fused.kernels.dispatch_plan import make_plan, publish_rows
from halley.fused.kernels.launches import (
    dispatch_dgrad,
    dispatch_gemm,
    find_experts,
    gemm_combine,
    launch_weight_gradient,
    num_dweight_columns,
)
from halley.fused.kernels.layout import ANY_COPIES, KernelContext, Layout
from halley.fused.replay import PlanSize, Results, release
from halley.ops.kernels.launch import note_call


# Which activations forward saves for backward; "none" is a forward without backward.
SaveOrNone: TypeAlias = Save | Literal["none"]


class LayerCall(NamedTuple):
    """Inputs of one forward call of a fused layer, in the order of the operator ``fused_experts``.

    ``save`` tells which activations forward saves for backward:

    - "all": the input rows of the first GEMM, and its outputs before the activation.
    - "inputs": each received token once; backward repeats the first GEMM.
    - "recompute": none; backward repeats dispatch and first GEMM.
    - "none": none, and the result has no gradient.
    """

    x_TD: torch.Tensor
    topk_weights_TK: torch.Tensor
    up_LGD: torch.Tensor  # projections of this rank's experts, contiguous; gate rows come first
    down_LDF: torch.Tensor
    topk_idx_TK: torch.Tensor  # expert ids or ``DROPPED``
    gated: bool  # True for SwiGLU, False for GELU
    fused: bool  # False runs the same kernels one after the other
    save: SaveOrNone


class LayerResult(NamedTuple):
    """Output of one forward call of a fused layer, and the tensors that its backward needs.

    R is the number of rows in the plan and P its number of token copies, both rounded up. ``rows``
    are ``(R, D)`` with save "all" and ``(P, D)`` with "inputs", see ``LayerCall``. Tensors that are
    not saved have no columns.
    """

    y_TD: torch.Tensor
    plan: torch.Tensor  # int32; offsets in ``kernels/layout.py``
    plan_id: torch.Tensor  # id of the plan's layout, one int64 on the CPU
    rows: torch.Tensor
    pre_RG: torch.Tensor


def run_forward(workspaces: Workspaces, call: LayerCall, *, part: int = 0) -> LayerResult:
    """Run a layer's forward pass, a collective; return its output and the tensors for backward.

    ``part`` is the layer part's number. If a kernel's wait fails, this or a later pass raises.
    """
    workspace = workspaces.find(call.x_TD, call.topk_idx_TK, call.up_LGD)
    while True:
        predicted = workspace.plan_sizes.predict(call.up_LGD, part=part)
        if call.save == "none" and not workspace.max_rows:
            # No tensor of this size outlives the call, so leave room for a larger load.
            num_rows = max(predicted.num_rows, workspace.rows_for(call.x_TD.shape[0]))
            predicted = predicted._replace(num_rows=num_rows)
        plan, *results = _launch_all(workspace, call, predicted)
        size = workspace.read_plan(call.up_LGD, part=part)
        if not size.needed_tokens:
            break
        del results
        workspace.grow_tokens(size.needed_tokens)  # all ranks read the same number, so all grow
    copies_fit = call.save != "inputs" or size.num_copies <= predicted.num_copies
    # Launch the GEMMs if none ran, or if they did nothing because a predicted size was too small.
    if not (results and copies_fit and size.num_rows <= predicted.num_rows):
        del results  # frees memory for the tensors that replace them
        results = _launch_gemms(workspace, call, plan, size)
    if not call.x_TD.is_cuda:  # interpreted kernels have finished, so failures are known
        workspace.check()
    if workspace.max_rows:
        workspace.ended.add()
    y_TD, rows, pre_RG = results
    # Cut saved tensors to the plan's sizes: predictions change between calls, but activation
    # checkpointing needs equal sizes in first run and recomputation.
    num_saved = size.num_copies if call.save == "inputs" else size.num_rows
    return LayerResult(y_TD, plan, workspace.plan_id, rows[:num_saved], pre_RG[: size.num_rows])


def _launch_all(workspace: Workspace, call: LayerCall, size: PlanSize) -> list[Any]:
    """Launch or replay forward; return the plan and, if GEMMs were launched, their results."""
    inputs = [call.x_TD, call.topk_idx_TK, call.topk_weights_TK, call.up_LGD, call.down_LDF]
    key = (
        "forward", call.gated, call.fused, call.save, size.num_rows, size.num_copies,
        call.x_TD.shape, call.x_TD.dtype, call.topk_idx_TK.dtype, call.topk_weights_TK.dtype,
        call.up_LGD.shape, call.down_LDF.shape,
    )  # fmt: skip
    workspace.begin_pass()
    recording = workspace.launches.find(key, inputs)
    if recording is not None:
        return recording.replay(inputs)
    with workspace.launches.record(key, inputs, workspace.persistent_tensors()) as outputs:
        plan = call.x_TD.new_empty(workspace.layout.plan_words, dtype=torch.int32)
        make_plan(
            workspace.context(),
            plan,
            x_TD=call.x_TD,
            topk_idx_TK=call.topk_idx_TK,
            topk_weights_TK=call.topk_weights_TK,
            max_rows=workspace.max_rows,
        )
        note_call(workspace.record_plan_event)
        outputs.append(plan)
        if size.num_rows:  # else only the plan kernel is launched
            outputs += _launch_gemms(workspace, call, plan, size)
    return outputs


def _launch_gemms(
    workspace: Workspace, call: LayerCall, plan: torch.Tensor, size: PlanSize
) -> list[torch.Tensor]:
    x_TD, up_LGD, save = call.x_TD, call.up_LGD, call.save
    num_rows, hidden_size = size.num_rows, x_TD.shape[1]
    h_RF = x_TD.new_empty(num_rows, up_LGD.shape[1] // (2 if call.gated else 1))
    pre_RG = x_TD.new_empty(num_rows, up_LGD.shape[1] if save == "all" else 0)
    num_saved = size.num_copies if save == "inputs" else num_rows
    rows = x_TD.new_empty(num_saved, hidden_size if save in ("all", "inputs") else 0)
    # The input rows of the first GEMM if they are not saved, then the output rows of the second.
    scratch_RD = x_TD.new_empty(num_rows, hidden_size)
    context = workspace.context()
    dispatch_gemm(
        context,
        plan,
        x_RD=rows if save == "all" else scratch_RD,
        h_RF=h_RF,
        pre_RG=pre_RG if save == "all" else None,
        up_LGD=up_LGD,
        gated=call.gated,
        fused=call.fused,
        copies_PD=rows if save == "inputs" else None,
    )
    y_TD = x_TD.new_empty(x_TD.shape[0], call.down_LDF.shape[1])
    gemm_combine(
        context,
        plan,
        y_TD=y_TD,
        z_RD=scratch_RD,
        rows=h_RF,
        weights=call.down_LDF,
        fused=call.fused,
        copy_capacity=size.num_copies if save == "inputs" else ANY_COPIES,
    )
    return [y_TD, rows, pre_RG]


# Indices in the list of backward's inputs. In a list, an input can be replaced by None.
_DY, _SAVED, _PLAN, _PRE, _UP, _DOWN, _IDX = range(7)
_OPERANDS = slice(7, 11)  # buffers for weight-gradient operands, only with ``keeps_operands``


class BackwardOptions(NamedTuple):
    """Options of a backward pass: options of its forward, and which projections need gradients."""

    gated: bool
    fused: bool
    save: Save
    needs_up: bool
    needs_down: bool
    keeps_operands: bool = False  # store operands of weight-gradient GEMMs, skip these GEMMs


class TokenGradients(NamedTuple):
    """Gradients of tokens and routing weights, and operands of the weight-gradient GEMMs."""

    dx_TD: torch.Tensor  # gradients of this rank's tokens
    dweights_TK: torch.Tensor  # gradients of the routing weights, float32
    dpre_RG: torch.Tensor  # gradients of the first GEMM's outputs
    weighted_RF: torch.Tensor  # activations times routing weights
    dy_RD: torch.Tensor  # gradients of the layer's output, one row for each expert of a token
    rows_RD: torch.Tensor  # input rows of the first GEMM


@final
class MainGrads:
    """The ``main_grad`` buffers (Megatron), if any, that accumulate two projections' gradients.

    It holds no reference to a weight without such a buffer.

    Args:
        up_LGD, down_LDF: the projections as the user passed them. Saved-tensor hooks may return
            other tensor objects, which have no ``main_grad``.
    """

    def __init__(self, up_LGD: torch.Tensor, down_LDF: torch.Tensor) -> None:
        self._weights: list[Any] = [
            weight if getattr(weight, "main_grad", None) is not None else None
            for weight in (up_LGD, down_LDF)
        ]

    def buffers(self) -> list[torch.Tensor | None]:
        """Return, for up and down projection, the ``main_grad`` buffer or None."""
        return [getattr(weight, "main_grad", None) for weight in self._weights]

    def mark_added(self, needed: tuple[bool, bool]) -> None:
        """Set ``grad_added_to_main_grad`` of each needed projection that has a ``main_grad``."""
        for weight, is_needed in zip(self._weights, needed, strict=True):
            if weight is not None and is_needed:
                weight.grad_added_to_main_grad = True


def run_backward(
    workspaces: Workspaces,
    plan_id: int,
    inputs: list[Any],
    options: BackwardOptions,
    main_grads: Sequence[torch.Tensor | None],
) -> Results:
    """Run a layer's collective backward; return gradients of tokens, routing weights, projections.

    Args:
        inputs: gradient of the output; saved rows (with save "recompute", the tokens), plan and
            ``pre_RG`` of the forward; both projections; expert ids. ``pre_RG`` and saved token
            copies are replaced by None after their last use. With ``keeps_operands`` also the
            buffers that take ``dpre_RG``, ``weighted_RF``, ``dy_RD`` and ``rows_RD`` of
            ``TokenGradients``.
        main_grads: for each projection, the buffer to which its gradient is added, or None.

    Returns:
        Gradients of tokens and routing weights (float32); without ``keeps_operands`` also of both
        projections, None for one that needs no gradient or has a ``main_grad``. If a kernel's
        wait fails, this or a later pass raises an error.
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
    main_grads: Sequence[torch.Tensor | None],
) -> Results:
    """Launch all kernels of a backward pass; return all gradients."""
    dx_TD, dweights_TK, dpre_RG, weighted_RF, dy_RD, rows_RD = launch_token_gradients(
        workspace, layout, inputs, options
    )
    if options.keeps_operands:
        return dx_TD, dweights_TK
    experts = find_experts(layout, inputs[_PLAN])
    weight_gradient = partial(launch_weight_gradient, workspace.context(), experts=experts)
    dup = ddown = None
    if options.needs_down:
        ddown = weight_gradient(dy_RD, weighted_RF, main_grads[1])
    del dy_RD, weighted_RF  # frees memory for the gradient of the first projection
    if options.needs_up:
        dup = weight_gradient(dpre_RG, rows_RD, main_grads[0])
    return dx_TD, dweights_TK, dup, ddown


def launch_token_gradients(
    workspace: Workspace, layout: Layout, inputs: list[Any], options: BackwardOptions
) -> TokenGradients:
    """Launch a backward pass except the weight-gradient GEMMs; return gradients and operands."""
    dy_TD, plan, pre_RG = inputs[_DY], inputs[_PLAN], inputs[_PRE]
    down_LDF, up_LGD, topk_idx_TK = inputs[_DOWN], inputs[_UP], inputs[_IDX]
    context = workspace.context(layout)
    operands = inputs[_OPERANDS] if options.keeps_operands else None
    if options.save == "all":
        rows_RD = inputs[_SAVED]
    else:
        rows_RD = None if operands is None else operands[3]
        rows_RD, pre_RG = _recompute(context, inputs, options, rows_RD)
    num_rows, inner_size = pre_RG.shape[0], down_LDF.shape[2]
    weight_R = pre_RG.new_empty(num_rows, dtype=torch.float32)
    publish_rows(context, plan, x_TD=dy_TD, weight_R=weight_R)
    if operands is None:
        widths = (pre_RG.shape[1], inner_size, dy_TD.shape[1])
        operands = [pre_RG.new_empty(num_rows, width) for width in widths]
    dpre_RG, weighted_RF, dy_RD = operands[:3]
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
        gated=options.gated,
        fused=options.fused,
    )
    del pre_RG, weight_R
    release(inputs, _PRE)  # frees ``pre_RG``, which later launches do not read
    dx_TD = dy_TD.new_empty(topk_idx_TK.shape[0], up_LGD.shape[2])
    dweights_TK = dy_TD.new_empty(topk_idx_TK.shape, dtype=torch.float32)
    gemm_combine(
        context,
        plan,
        y_TD=dx_TD,
        z_RD=torch.empty_like(dy_RD),
        rows=dpre_RG,
        weights=up_LGD,
        fused=options.fused,
        weight_gradients=(dweight_RJ, topk_idx_TK, dweights_TK),
    )
    if not dy_TD.is_cuda:  # interpreted kernels have finished, so failures are known
        workspace.check()
    return TokenGradients(dx_TD, dweights_TK, dpre_RG, weighted_RF, dy_RD, rows_RD)


def _recompute(
    context: KernelContext,
    inputs: list[Any],
    options: BackwardOptions,
    rows_RD: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat the first GEMM in backward; return its input rows, and its output before activation.

    With save "recompute", publish and fetch the tokens again. Else release the saved token copies.
    """
    gated, fetches = options.gated, options.save == "recompute"
    saved, plan, up_LGD = inputs[_SAVED], inputs[_PLAN], inputs[_UP]
    num_rows = inputs[_PRE].shape[0]
    if fetches:
        publish_rows(context, plan, x_TD=saved)
    if rows_RD is None:
        rows_RD = torch.empty(num_rows, saved.shape[1], dtype=saved.dtype, device=saved.device)
    pre_RG = saved.new_empty(num_rows, up_LGD.shape[1])
    dispatch_gemm(
        context,
        plan,
        x_RD=rows_RD,
        h_RF=saved.new_empty(num_rows, up_LGD.shape[1] // (2 if gated else 1)),  # written, not read
        pre_RG=pre_RG,
        up_LGD=up_LGD,
        gated=gated,
        fused=options.fused,
        copies_PD=None if fetches else saved,
        copies_saved=not fetches,
    )
    if not fetches:
        release(inputs, _SAVED)
    return rows_RD, pre_RG
