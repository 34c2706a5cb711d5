"""The two halves of a fused layer as operators: what a compiler sees as opaque and functional.

``dispatch_gemm`` brings rows to their experts and multiplies them by the first projection;
``gemm_combine`` multiplies by the second and brings the sums home. Each pair of calls is a
collective of the ranks. Both name their buffers by the handle of a ``Workspaces``.
"""

from functools import partial
from typing import NamedTuple

import torch

from halley.fused.buffer_cache import Workspaces, find_workspaces
from halley.fused.buffers import PlanSize, ShapeClass, Workspace
from halley.fused.kernels.dispatch_gemm import dispatch_gemm as launch_dispatch_gemm
from halley.fused.kernels.dispatch_plan import make_plan
from halley.fused.kernels.gemm_combine import gemm_combine as launch_gemm_combine
from halley.fused.kernels.layout import ANY_SENDS
from halley.fused.passes import Kept, run_by_plan, run_pass
from halley.ops.kernels.launch import is_aligned
from halley.ops.kernels.replay import Results, note_call
from halley.ops.library import define


class Dispatched(NamedTuple):
    """What comes out of ``dispatch_gemm``. R is a multiple of the rows of a tile, at least one.

    Attributes:
        h_RF: activations of the rows of this rank's experts; undefined where rows are padding.
        plan: where rows came from and sums go, int32.
        rows: what ``save`` keeps of the rows: of "all" the rows (R, D), of "inputs" each row once,
            in the order of the plan's list of what is fetched, else (R, 0).
        pre_RG: of "all" what the activation was made of, else (R, 0).
    """

    h_RF: torch.Tensor
    plan: torch.Tensor
    rows: torch.Tensor
    pre_RG: torch.Tensor


def dispatch_gemm(
    x_TD: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    up_LGD: torch.Tensor,
    *,
    gated: bool,
    fused: bool,
    workspaces: int,
    save: Kept = "none",
    turn: torch.Tensor | None = None,
) -> Dispatched:
    """Bring this rank's rows together and multiply them by the first projection.

    Args:
        x_TD: tokens of this rank.
        topk_idx_TK: expert ids or ``DROPPED``.
        topk_weights_TK: weights of the combine.
        up_LGD: first projection of this rank's experts, contiguous.
        gated: whether gate and up stand one below the other in it.
        fused: False fetches all rows first.
        workspaces: handle of the buffers.
        save: what is kept for backward.
        turn: in a compiled graph, what holds this pass behind the one before; see ``turns``.

    Returns:
        Results whose plan ``gemm_combine`` must get before the next ``dispatch_gemm``.

    Raises:
        RuntimeError: a peer did not publish in time, or an earlier wait failed.
    """
    results = _call_dispatch_gemm(
        x_TD, topk_idx_TK, topk_weights_TK, up_LGD, gated, fused, save, workspaces, turn
    )
    return Dispatched(*results)


def gemm_combine(
    h_RF: torch.Tensor,
    plan: torch.Tensor,
    down_LDF: torch.Tensor,
    *,
    num_tokens: int,
    fused: bool,
    workspaces: int,
) -> torch.Tensor:
    """Return the weighted sums of this rank's tokens over their experts, ``(num_tokens, D)``.

    Args:
        h_RF, plan: of the last ``dispatch_gemm`` of these workspaces.
        down_LDF: second projection of this rank's experts, contiguous.
        num_tokens: of this rank, as dispatched.
        fused: False multiplies, combines and sums one after another.
        workspaces: handle of the buffers.

    Raises:
        RuntimeError: a wait failed. On a GPU a wait of this very call may only be known later: to
            the next call, or to ``Workspaces.check`` after the stream was waited for.
    """
    return _call_gemm_combine(h_RF, plan, down_LDF, num_tokens, fused, workspaces)


def _dispatch_gemm(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    gated: bool,
    fused: bool,
    save: Kept,
    workspaces: int,
    turn: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    owner = find_workspaces(workspaces)
    workspace = owner.get(shape_class(owner, x, topk_idx, up), num_tokens=x.shape[0])
    layer0 = partial(_launch_layer0, workspace, x, up, gated=gated, fused=fused, save=save)

    def launch(plan: torch.Tensor | None, num_rows: int, num_sends: int) -> Results:
        if plan is None:
            plan = _launch_plan(workspace, x, topk_idx, topk_weights)
        return (plan, *layer0(plan, num_rows, num_sends)) if num_rows else (plan,)

    size, results = run_by_plan(
        workspace, partial(launch, None), launch, save=save, layer=up.data_ptr()
    )
    plan, h_RF, rows, pre_RG = results
    assert plan is not None
    assert h_RF is not None
    owner.dispatched(workspace, plan)
    assert rows is not None
    assert pre_RG is not None
    return h_RF[: size.num_rows], plan, *_kept(rows, pre_RG, size, save=save)


def forward_pass(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    gated: bool,
    fused: bool,
    save: Kept,
    workspaces: int,
) -> tuple[torch.Tensor, ...]:
    """Run both halves; return the output, then the plan, rows and ``pre`` of ``Dispatched``.

    All is launched before the host reads how many rows there are, so that no half waits for it, and
    from the second call on without what leads to the launches.
    """
    owner = find_workspaces(workspaces)
    workspace = owner.get(shape_class(owner, x, topk_idx, up), num_tokens=x.shape[0])

    def launch(plan: torch.Tensor | None, num_rows: int, num_sends: int) -> Results:
        if plan is None:
            plan = _launch_plan(workspace, x, topk_idx, topk_weights)
        if not num_rows:
            return (plan,)
        h_RF, rows, pre_RG = _launch_layer0(
            workspace, x, up, plan, num_rows, num_sends, gated=gated, fused=fused, save=save
        )
        y_TD = x.new_empty(x.shape[0], down.shape[1])
        room = num_sends if save == "inputs" else ANY_SENDS
        _launch_layer1(workspace, h_RF, plan, down, y_TD, fused=fused, send_capacity=room)
        return plan, y_TD, rows, pre_RG

    def start(num_rows: int, num_sends: int) -> Results:
        key = None
        if num_rows and is_aligned(x) and is_aligned(topk_idx) and is_aligned(topk_weights):
            key = (
                "forward", gated, fused, save, num_rows, num_sends, x.shape, x.dtype,
                topk_idx.dtype, topk_weights.dtype, up.shape, down.shape,
            )  # fmt: skip
        inputs = (x, topk_idx, topk_weights, up, down)
        return run_pass(workspace, key, inputs, partial(launch, None, num_rows, num_sends))

    size, results = run_by_plan(workspace, start, launch, save=save, layer=up.data_ptr())
    plan, y_TD, rows, pre_RG = results
    assert plan is not None
    assert y_TD is not None
    assert rows is not None
    assert pre_RG is not None
    owner.dispatched(workspace, plan)
    if not x.is_cuda:  # it has run by now
        workspace.check()
    return y_TD, plan, *_kept(rows, pre_RG, size, save=save)


def _kept(
    rows: torch.Tensor, pre_RG: torch.Tensor, size: PlanSize, *, save: Kept
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what backward needs, of as many rows as the plan.

    What is checkpointed must come back in the same shape.
    """
    num_kept = size.num_sends if save == "inputs" else size.num_rows
    return rows[:num_kept], pre_RG[: size.num_rows]


def _launch_layer0(
    workspace: Workspace,
    x: torch.Tensor,
    up: torch.Tensor,
    plan: torch.Tensor,
    num_rows: int,
    num_sends: int,
    *,
    gated: bool,
    fused: bool,
    save: Kept,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch layer0 on a plan; return activations, and what is kept of rows and of ``pre``.

    What is not kept has no columns.
    """
    h_RF = x.new_empty(num_rows, up.shape[1] // (2 if gated else 1))
    pre_RG = x.new_empty(num_rows, up.shape[1] if save == "all" else 0)
    sends = x.new_empty(num_sends, x.shape[1]) if save == "inputs" else None
    rows = x.new_empty(num_rows, x.shape[1] if save == "all" else 0) if sends is None else sends
    launch_dispatch_gemm(
        rows if save == "all" else workspace.rows_RD,
        h_RF,
        pre_RG if save == "all" else None,
        **workspace.stages,
        plan=plan,
        up_LGD=up,
        gated=gated,
        sends_SD=sends,
        knobs=workspace.knobs,
        fused=fused,
        **workspace.common,
    )
    return h_RF, rows, pre_RG


def _launch_plan(
    workspace: Workspace,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
) -> torch.Tensor:
    """Begin a call: publish this rank's tokens, and return its plan as soon as it is queued."""
    workspace.begin()
    words = workspace.words
    plan = torch.empty(workspace.layout.plan_words, dtype=torch.int32, device=x.device)
    make_plan(
        plan,
        x,
        topk_idx,
        topk_weights,
        rank=workspace.heap.rank,
        stage_HTD=workspace.stage.local,
        words=words.local,
        words_ptrs_W=words.ptrs_W,
        max_rows=workspace.max_rows,
        **workspace.common,
    )
    note_call(workspace.mark_plan)
    return plan


def _gemm_combine(
    h: torch.Tensor,
    plan: torch.Tensor,
    down: torch.Tensor,
    num_tokens: int,
    fused: bool,
    workspaces: int,
) -> torch.Tensor:
    workspace = find_workspaces(workspaces).combining(plan)
    y_TD = h.new_empty(num_tokens, down.shape[1])
    _launch_layer1(workspace, h, plan, down, y_TD, fused=fused)
    if not h.is_cuda:  # it has run by now
        workspace.check()
    return y_TD


def _launch_layer1(
    workspace: Workspace,
    h_RF: torch.Tensor,
    plan: torch.Tensor,
    down: torch.Tensor,
    y_TD: torch.Tensor,
    *,
    fused: bool,
    send_capacity: int = ANY_SENDS,
) -> None:
    launch_gemm_combine(
        y_TD,
        workspace.rows_RD,
        h_RF,
        plan=plan,
        down_LDF=down,
        home_WTD=workspace.home.local,
        home_ptrs_W=workspace.home.ptrs_W,
        words=workspace.words.local,
        words_ptrs_W=workspace.words.ptrs_W,
        rank=workspace.heap.rank,
        knobs=workspace.knobs,
        fused=fused,
        send_capacity=send_capacity,
        **workspace.common,
    )


def shape_class(
    owner: Workspaces, x: torch.Tensor, topk_idx: torch.Tensor, up: torch.Tensor
) -> ShapeClass:
    """Return the class of a layer, by which it finds its buffers."""
    num_experts = owner.num_experts(up.shape[0])
    return ShapeClass(x.shape[1], num_experts, topk_idx.shape[1], x.dtype, owner.tp_size)


def fake_dispatch_gemm(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    gated: bool,
    fused: bool,
    save: Kept,
    workspaces: int,
    turn: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the results of ``dispatch_gemm`` without values."""
    ctx = torch.library.get_ctx()
    # The plan is as long as the layout wants it, which grows with the tokens of other ranks.
    plan = x.new_empty(ctx.new_dynamic_size(), dtype=torch.int32)
    num_rows = ctx.new_dynamic_size()
    h_RF = x.new_empty(num_rows, up.shape[1] // (2 if gated else 1))
    if save == "all":
        return h_RF, plan, x.new_empty(num_rows, x.shape[1]), x.new_empty(num_rows, up.shape[1])
    kept = (ctx.new_dynamic_size(), x.shape[1]) if save == "inputs" else (num_rows, 0)
    return h_RF, plan, x.new_empty(kept), x.new_empty(num_rows, 0)


def _fake_gemm_combine(
    h: torch.Tensor,
    plan: torch.Tensor,
    down: torch.Tensor,
    num_tokens: int,
    fused: bool,
    workspaces: int,
) -> torch.Tensor:
    return h.new_empty(num_tokens, down.shape[1])


_call_dispatch_gemm = define(
    "dispatch_gemm(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor up, bool gated, "
    "bool fused, str save, int workspaces, Tensor? turn=None) "
    "-> (Tensor h, Tensor plan, Tensor rows, Tensor pre)",
    _dispatch_gemm,
    fake_dispatch_gemm,
)
_call_gemm_combine = define(
    "gemm_combine(Tensor h, Tensor plan, Tensor down, SymInt num_tokens, bool fused, "
    "int workspaces) -> Tensor",
    _gemm_combine,
    _fake_gemm_combine,
)
