"""Forward pass of a fused layer: make the dispatch plan, then launch both GEMMs.

Kernels, all on the current stream:

1. plan: publish tokens and routing to all ranks, and make this rank's plan from their routing.
2. fetch and first GEMM, side by side (``kernels/dispatch.py``).
3. second GEMM and combine, side by side (``kernels/combine.py``).

The host launches all of them with predicted sizes. Then it reads the true sizes, and launches the
GEMMs again if the predicted sizes were too small.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from halley.core.types import Save
from halley.fused.buffer_cache import Workspaces
from halley.fused.buffers import PlanSize, Workspace
from halley.fused.kernels.combine import gemm_combine
from halley.fused.kernels.dispatch import dispatch_gemm
from halley.fused.kernels.dispatch_plan import make_plan
from halley.fused.kernels.layout import ANY_COPIES
from halley.ops.kernels.launch import note_call


# "none" is a forward without backward.
SaveOrNone: TypeAlias = Save | Literal["none"]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Inputs of one forward call; see ``op.fused_experts``."""

    x_TD: torch.Tensor
    topk_weights_TK: torch.Tensor
    up_LGD: torch.Tensor
    down_LDF: torch.Tensor
    topk_idx_TK: torch.Tensor
    gated: bool
    fused: bool
    save: SaveOrNone


class LayerResult(NamedTuple):
    """Output of a forward call, and the tensors that its backward needs.

    R is the number of rows in the plan and P its number of token copies, both rounded up.

    Attributes:
        y_TD: output.
        plan: dispatch plan, int32; offsets in ``kernels/layout.py``.
        plan_id: id of the plan's layout, one int64 on the CPU.
        rows: saved rows. With save "all", the input rows of the first GEMM, ``(R, D)``; with
            "inputs", each received token once, ``(P, D)``; else ``(R, 0)``.
        pre_RG: with save "all", outputs of the first GEMM before the activation; else ``(R, 0)``.
    """

    y_TD: torch.Tensor
    plan: torch.Tensor
    plan_id: torch.Tensor
    rows: torch.Tensor
    pre_RG: torch.Tensor


def run_forward(workspaces: Workspaces, call: LayerCall) -> LayerResult:
    """Run the forward pass of a layer; a collective of the ranks.

    Raises:
        RuntimeError: a peer did not publish its routing in time, or an earlier wait failed.
    """
    workspace = workspaces.find(call.x_TD, call.topk_idx_TK, call.up_LGD)
    while True:
        predicted = workspace.predict_size(call.up_LGD)
        if call.save == "none":  # no tensor of this size outlives the call: use the full capacity
            predicted = replace(predicted, num_rows=workspace.row_capacity)
        elif predicted.num_rows > workspace.row_capacity:
            workspace.grow_rows(predicted.num_rows)
        plan, *results = _launch_all(workspace, call, predicted)
        size = workspace.read_plan(call.up_LGD)
        if not size.needed_tokens:
            break
        del results
        workspace.grow_tokens(size.needed_tokens)  # all ranks read the same number
    if size.num_rows > workspace.row_capacity:
        workspace.grow_rows(size.num_rows)
    if not (results and _fits(size, predicted, save=call.save)):
        del results  # frees memory for the tensors that replace them
        results = _launch_gemms(workspace, call, plan, size)
    if not call.x_TD.is_cuda:  # interpreted kernels have finished
        workspace.check()
    y_TD, rows, pre_RG = results
    # The sizes of saved tensors must depend on the plan only, not on the prediction. Activation
    # checkpointing compares the sizes of the first run and of the recomputation.
    num_saved = size.num_copies if call.save == "inputs" else size.num_rows
    return LayerResult(y_TD, plan, workspace.plan_id, rows[:num_saved], pre_RG[: size.num_rows])


def _fits(size: PlanSize, predicted: PlanSize, *, save: SaveOrNone) -> bool:
    """Return whether predicted sizes were large enough; otherwise the kernels did nothing."""
    copies_fit = save != "inputs" or size.num_copies <= predicted.num_copies
    return size.num_rows <= predicted.num_rows and copies_fit


def _launch_all(workspace: Workspace, call: LayerCall, size: PlanSize) -> list[Any]:
    """Launch or replay all kernels; return the plan, then the results of ``_launch_gemms``.

    With 0 rows only the plan kernel is launched.
    """
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
        plan = _launch_plan(workspace, call)
        outputs.append(plan)
        if size.num_rows:
            outputs += _launch_gemms(workspace, call, plan, size)
    return outputs


def _launch_plan(workspace: Workspace, call: LayerCall) -> torch.Tensor:
    """Launch the plan kernel; return the plan, which the kernel writes."""
    num_words = workspace.layout.plan_words
    plan = torch.empty(num_words, dtype=torch.int32, device=call.x_TD.device)
    make_plan(
        workspace.context(),
        plan,
        x_TD=call.x_TD,
        topk_idx_TK=call.topk_idx_TK,
        topk_weights_TK=call.topk_weights_TK,
        max_rows=workspace.max_rows,
    )
    note_call(workspace.record_plan_event)
    return plan


def _launch_gemms(
    workspace: Workspace, call: LayerCall, plan: torch.Tensor, size: PlanSize
) -> list[torch.Tensor]:
    """Launch both GEMMs on a plan; return output, saved rows and pre-activations.

    Tensors that are not saved have no columns.
    """
    x_TD, up_LGD, save = call.x_TD, call.up_LGD, call.save
    num_rows, hidden_size = size.num_rows, x_TD.shape[1]
    h_RF = x_TD.new_empty(num_rows, up_LGD.shape[1] // (2 if call.gated else 1))
    pre_RG = x_TD.new_empty(num_rows, up_LGD.shape[1] if save == "all" else 0)
    if save == "inputs":
        rows = x_TD.new_empty(size.num_copies, hidden_size)
    else:
        rows = x_TD.new_empty(num_rows, hidden_size if save == "all" else 0)
    context = workspace.context()
    dispatch_gemm(
        context,
        plan,
        x_RD=rows if save == "all" else workspace.rows_RD,
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
        z_RD=workspace.rows_RD,
        h_RF=h_RF,
        down_LDF=call.down_LDF,
        fused=call.fused,
        copy_capacity=size.num_copies if save == "inputs" else ANY_COPIES,
    )
    return [y_TD, rows, pre_RG]
