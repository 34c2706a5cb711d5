"""The operators of a fused layer's backward.

``dispatch_dgrad`` brings gradients of the output to the rows and back through the second projection
and the activation; ``dgrad_combine`` goes back through the first and brings the sums home.
``dispatch_again`` brings back the rows that forward did not keep.
"""

from typing import NamedTuple

import torch

from halley.fused.buffer_cache import find_workspaces
from halley.fused.buffers import Common, Workspace
from halley.fused.kernels.dispatch_gemm import dgrad_columns
from halley.fused.kernels.dispatch_gemm import dispatch_dgrad as launch_dispatch_dgrad
from halley.fused.kernels.dispatch_gemm import dispatch_gemm as launch_dispatch_gemm
from halley.fused.kernels.gemm_combine import dgrad_combine as launch_dgrad_combine
from halley.fused.kernels.stage import stage_again
from halley.ops.kernels.launch import aligned
from halley.ops.library import define


class RowGradients(NamedTuple):
    """What comes out of ``dispatch_dgrad``, for the rows of the forward's plan.

    Attributes:
        dpre_RG: gradients of what the activation was made of.
        weighted_RF: activations times routing weights.
        dy_RD: gradients of the output, a row for each of a token's experts.
        dweight_RC: parts of the gradients of the routing weights, float32.
    """

    dpre_RG: torch.Tensor
    weighted_RF: torch.Tensor
    dy_RD: torch.Tensor
    dweight_RC: torch.Tensor


def dispatch_again(
    source: torch.Tensor,
    plan: torch.Tensor,
    pre_R0: torch.Tensor,
    up_LGD: torch.Tensor,
    *,
    top_k: int,
    gated: bool,
    kept: bool,
    fused: bool,
    workspaces: int,
    turn: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a call's plan once more, and what its activation was made of.

    Args:
        source: the rows that "inputs" kept, or this rank's tokens, which are dispatched once more.
        plan, pre_R0: of the forward.
        up_LGD: first projection.
        top_k: experts of a token.
        gated: whether gate and up stand one below the other in it.
        kept: whether the source are rows that were kept: then no peer takes part.
        fused: as in forward.
        workspaces: handle of the buffers.
        turn: as in forward.
    """
    return _call_dispatch_again(
        source, plan, pre_R0, up_LGD, top_k, gated, kept, fused, workspaces, turn
    )


def dispatch_dgrad(
    dy_TD: torch.Tensor,
    plan: torch.Tensor,
    pre_RG: torch.Tensor,
    down_LDF: torch.Tensor,
    *,
    top_k: int,
    gated: bool,
    fused: bool,
    workspaces: int,
    turn: torch.Tensor | None = None,
) -> RowGradients:
    """Bring gradients of the output to the rows, back through the second projection.

    Args:
        dy_TD: gradient of this rank's output.
        plan: of the forward.
        pre_RG: what its activation was made of.
        down_LDF: second projection.
        top_k: experts of a token.
        gated, fused, workspaces, turn: as in forward.

    Returns:
        Gradients of which ``dgrad_combine`` must get its part before the next pass.

    Raises:
        RuntimeError: a peer did not come in time, or came for another pass.
    """
    results = _call_dispatch_dgrad(
        dy_TD, plan, pre_RG, down_LDF, top_k, gated, fused, workspaces, turn
    )
    return RowGradients(*results)


def dgrad_combine(
    dpre_RG: torch.Tensor,
    plan: torch.Tensor,
    dweight_RC: torch.Tensor,
    up_LGD: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    *,
    fused: bool,
    workspaces: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of this rank's tokens, (T, D), and of their weights, (T, K) in float32.

    Args:
        dpre_RG, dweight_RC: of the last ``dispatch_dgrad``.
        plan: of the forward.
        up_LGD: first projection.
        topk_idx_TK: expert ids of the forward.
        fused, workspaces: as in forward.
    """
    return _call_dgrad_combine(dpre_RG, plan, dweight_RC, up_LGD, topk_idx_TK, fused, workspaces)


def _dispatch_again(
    source: torch.Tensor,
    plan: torch.Tensor,
    pre: torch.Tensor,
    up: torch.Tensor,
    top_k: int,
    gated: bool,
    kept: bool,
    fused: bool,
    workspaces: int,
    turn: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    workspace = _find(workspaces, plan, source, up, top_k)
    if not kept:
        _stage(workspace, source, None, plan)
    num_rows = pre.shape[0]
    x_RD = source.new_empty(num_rows, source.shape[1])
    pre_RG = source.new_empty(num_rows, up.shape[1])
    launch_dispatch_gemm(
        x_RD,
        source.new_empty(num_rows, up.shape[1] // (2 if gated else 1)),  # nobody reads it again
        pre_RG,
        **workspace.stages,
        plan=plan,
        up_LGD=up,
        gated=gated,
        sends_SD=source if kept else None,
        sends_kept=kept,
        knobs=workspace.knobs,
        fused=fused,
        **_common(workspace, plan),
    )
    if not source.is_cuda:
        workspace.check()
    return x_RD, pre_RG


def _dispatch_dgrad(
    dy: torch.Tensor,
    plan: torch.Tensor,
    pre: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    gated: bool,
    fused: bool,
    workspaces: int,
    turn: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    workspace = _find(workspaces, plan, dy, down, top_k)
    num_rows, inner_size = pre.shape[0], down.shape[2]
    weight_R = pre.new_empty(num_rows, dtype=torch.float32)
    _stage(workspace, dy, weight_R, plan)
    dpre_RG = torch.empty_like(pre)
    weighted_RF = pre.new_empty(num_rows, inner_size)
    dy_RD = pre.new_empty(num_rows, dy.shape[1])
    columns = dgrad_columns(inner_size, workspace.knobs)
    dweight_RC = pre.new_empty(num_rows, columns, dtype=torch.float32)
    launch_dispatch_dgrad(
        dy_RD,
        dpre_RG,
        weighted_RF,
        dweight_RC,
        pre_RG=pre,
        weight_R=weight_R,
        **workspace.stages,
        plan=plan,
        down_LDF=down,
        gated=gated,
        knobs=workspace.knobs,
        fused=fused,
        **_common(workspace, plan),
    )
    if not dy.is_cuda:
        workspace.check()
    find_workspaces(workspaces).dispatched(workspace, plan)
    return dpre_RG, weighted_RF, dy_RD, dweight_RC


def _dgrad_combine(
    dpre: torch.Tensor,
    plan: torch.Tensor,
    dweight: torch.Tensor,
    up: torch.Tensor,
    topk_idx: torch.Tensor,
    fused: bool,
    workspaces: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    workspace = find_workspaces(workspaces).combining(plan)
    dx_TD = dpre.new_empty(topk_idx.shape[0], up.shape[2])
    dweights_TK = dpre.new_empty(topk_idx.shape, dtype=torch.float32)
    topk_idx = aligned(topk_idx)
    launch_dgrad_combine(
        dx_TD,
        dweights_TK,
        workspace.rows_RD,
        dpre,
        dweight,
        plan=plan,
        up_LGD=up,
        topk_idx_TK=topk_idx,
        home_WTD=workspace.home.local,
        home_ptrs_W=workspace.home.ptrs_W,
        weights_home_WTK=workspace.weights_home.local,
        weights_home_ptrs_W=workspace.weights_home.ptrs_W,
        words=workspace.words.local,
        words_ptrs_W=workspace.words.ptrs_W,
        rank=workspace.heap.rank,
        knobs=workspace.knobs,
        fused=fused,
        **_common(workspace, plan),
    )
    if not dpre.is_cuda:
        workspace.check()
    if fused and workspace.knobs.weight.beside:
        workspace.in_flight = (dpre, dweight, topk_idx, dx_TD, dweights_TK)
    return dx_TD, dweights_TK


def _find(
    workspaces: int, plan: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, top_k: int
) -> Workspace:
    """Return the workspace in which a layer ran forward."""
    owner = find_workspaces(workspaces)
    return owner.of_plan(
        plan,
        num_experts=owner.num_experts(weights.shape[0]),
        top_k=top_k,
        rows=(rows.shape[1], rows.dtype),
    )


def _stage(
    workspace: Workspace, x: torch.Tensor, weight_R: torch.Tensor | None, plan: torch.Tensor
) -> None:
    """Begin a pass that goes the ways of an earlier one."""
    workspace.begin()
    stage_again(
        x,
        weight_R,
        plan=plan,
        rank=workspace.heap.rank,
        stage_HTD=workspace.stage.local,
        words=workspace.words.local,
        words_ptrs_W=workspace.words.ptrs_W,
        **_common(workspace, plan),
    )


def _common(workspace: Workspace, plan: torch.Tensor) -> Common:
    """Return what kernels have in common, for a plan that may be older than the last growth."""
    return {**workspace.common, "layout": workspace.layout_of(plan)}


def _fake_dispatch_again(
    source: torch.Tensor,
    plan: torch.Tensor,
    pre: torch.Tensor,
    up: torch.Tensor,
    top_k: int,
    gated: bool,
    kept: bool,
    fused: bool,
    workspaces: int,
    turn: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = pre.shape[0]
    return source.new_empty(num_rows, source.shape[1]), source.new_empty(num_rows, up.shape[1])


def _fake_dispatch_dgrad(
    dy: torch.Tensor,
    plan: torch.Tensor,
    pre: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    gated: bool,
    fused: bool,
    workspaces: int,
    turn: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    num_rows, inner_size = pre.shape[0], down.shape[2]
    columns = torch.library.get_ctx().new_dynamic_size()  # as the tuned tiles want it
    return (
        torch.empty_like(pre),
        pre.new_empty(num_rows, inner_size),
        pre.new_empty(num_rows, dy.shape[1]),
        pre.new_empty(num_rows, columns, dtype=torch.float32),
    )


def _fake_dgrad_combine(
    dpre: torch.Tensor,
    plan: torch.Tensor,
    dweight: torch.Tensor,
    up: torch.Tensor,
    topk_idx: torch.Tensor,
    fused: bool,
    workspaces: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx_TD = dpre.new_empty(topk_idx.shape[0], up.shape[2])
    return dx_TD, dpre.new_empty(topk_idx.shape, dtype=torch.float32)


_call_dispatch_again = define(
    "dispatch_again(Tensor source, Tensor plan, Tensor pre, Tensor up, int top_k, bool gated, "
    "bool kept, bool fused, int workspaces, Tensor? turn=None) -> (Tensor rows, Tensor pre)",
    _dispatch_again,
    _fake_dispatch_again,
)
_call_dispatch_dgrad = define(
    "dispatch_dgrad(Tensor dy, Tensor plan, Tensor pre, Tensor down, int top_k, bool gated, "
    "bool fused, int workspaces, Tensor? turn=None) "
    "-> (Tensor dpre, Tensor weighted, Tensor dy_rows, Tensor dweight)",
    _dispatch_dgrad,
    _fake_dispatch_dgrad,
)
_call_dgrad_combine = define(
    "dgrad_combine(Tensor dpre, Tensor plan, Tensor dweight, Tensor up, Tensor topk_idx, "
    "bool fused, int workspaces) -> (Tensor dx, Tensor dweights)",
    _dgrad_combine,
    _fake_dgrad_combine,
)
