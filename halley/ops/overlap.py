"""The two halves of a fused layer as operators: what a compiler sees as opaque and functional.

``dispatch_gemm`` brings rows to their experts and multiplies them by the first projection;
``gemm_combine`` multiplies by the second and brings the sums home. Each pair of calls is a
collective of the ranks. Both name their buffers by the handle of a ``Workspaces``.

Operators are defined on the library, past ``custom_op``, which takes another 4 us a call.
"""

import torch

from halley.kernels.dispatch_gemm import dispatch_gemm as launch_dispatch_gemm
from halley.kernels.gemm_combine import gemm_combine as launch_gemm_combine
from halley.kernels.plan import make_plan
from halley.ops.workspace import ShapeClass, Workspace
from halley.ops.workspaces import find_workspaces


NO_BACKWARD = "fused kernels have no backward yet: train with strategy sequential or chunked"

_library = torch.library.Library("halley", "FRAGMENT")
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    torch.Tag.needs_exact_strides,
    # The host reads the size of a plan and counts the epochs: a graph would replay old ones.
    torch.Tag.cudagraph_unsafe,
)


def dispatch_gemm(
    x_TD: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    up_LGD: torch.Tensor,
    *,
    gated: bool,
    fused: bool,
    workspaces: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the activations of the rows of this rank's experts, and the plan of these rows.

    Args:
        x_TD: tokens of this rank.
        topk_idx_TK: expert ids or ``DROPPED``.
        topk_weights_TK: weights of the combine.
        up_LGD: first projection of this rank's experts, contiguous.
        gated: whether gate and up stand one below the other in it.
        fused: False fetches all rows first.
        workspaces: handle of the buffers.

    Returns:
        ``(R, F)`` in the dtype of ``x_TD``, R a multiple of the rows of a tile and at least one
        tile, what pads the experts' rows to tiles undefined; and the plan, int32, which
        ``gemm_combine`` must get before the next ``dispatch_gemm``.

    Raises:
        RuntimeError: a peer did not publish in time, or an earlier wait failed.
    """
    run = _dispatch_gemm if _is_plain(x_TD) else torch.ops.halley.dispatch_gemm.default
    return run(x_TD, topk_idx_TK, topk_weights_TK, up_LGD, gated, fused, workspaces)


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
    run = _gemm_combine if _is_plain(h_RF) else torch.ops.halley.gemm_combine.default
    return run(h_RF, plan, down_LDF, num_tokens, fused, workspaces)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether nobody traces or records, so that the dispatcher (9 us a call) has no part."""
    return (
        type(tensor) is torch.Tensor
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def _dispatch_gemm(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    gated: bool,
    fused: bool,
    workspaces: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    owner = find_workspaces(workspaces)
    workspace = owner.get(_shape_class(x, topk_idx, up, owner.num_ranks), num_tokens=x.shape[0])

    def launch() -> torch.Tensor:
        h_RF = x.new_empty(workspace.capacity, up.shape[1] // (2 if gated else 1))
        launch_dispatch_gemm(
            workspace.rows_RD,
            h_RF,
            None,
            stage_ptrs_W=workspace.stage.ptrs_W,
            plan=plan,
            up_LGD=up,
            gated=gated,
            knobs=workspace.knobs,
            num_programs=workspace.num_programs,
            fused=fused,
            **workspace.common,
        )
        return h_RF

    while True:
        plan = _make_plan(workspace, x, topk_idx, topk_weights)
        h_RF = launch()  # before the host knows whether all rows fit, so that it reads meanwhile
        num_rows, wanted_tokens = workspace.read_plan()
        if not wanted_tokens:
            break
        workspace.grow(wanted_tokens)  # all ranks read the same, and come here together
    if num_rows > workspace.capacity:
        workspace.reserve(num_rows)
        h_RF = launch()
    owner.dispatched(workspace, plan)
    return h_RF[: max(num_rows, workspace.knobs.block_m)], plan


def _make_plan(
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
        epoch=workspace.epoch,
        rank=workspace.heap.rank,
        stage_TD=workspace.stage.local,
        words=words.local,
        words_ptrs_W=words.ptrs_W,
        marks=workspace.marks,
        num_programs=workspace.num_programs,
        **workspace.common,
    )
    workspace.mark_plan()
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
    launch_gemm_combine(
        y_TD,
        workspace.rows_RD,
        h,
        plan=plan,
        down_LDF=down,
        home_WTD=workspace.home.local,
        home_ptrs_W=workspace.home.ptrs_W,
        words=workspace.words.local,
        words_ptrs_W=workspace.words.ptrs_W,
        epoch=workspace.epoch,
        rank=workspace.heap.rank,
        knobs=workspace.knobs,
        num_programs=workspace.num_programs,
        fused=fused,
        **workspace.common,
    )
    if not h.is_cuda:  # it has run by now
        workspace.check()
    return y_TD


def _shape_class(
    x: torch.Tensor, topk_idx: torch.Tensor, up: torch.Tensor, num_ranks: int
) -> ShapeClass:
    return ShapeClass(
        hidden_size=x.shape[1],
        num_experts=up.shape[0] * num_ranks,
        top_k=topk_idx.shape[1],
        dtype=x.dtype,
    )


def _fake_dispatch_gemm(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    gated: bool,
    fused: bool,
    workspaces: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    ctx = torch.library.get_ctx()
    # The plan is as long as the layout wants it, which grows with the tokens of other ranks.
    plan = x.new_empty(ctx.new_dynamic_size(), dtype=torch.int32)
    return x.new_empty(ctx.new_dynamic_size(), up.shape[1] // (2 if gated else 1)), plan


def _fake_gemm_combine(
    h: torch.Tensor,
    plan: torch.Tensor,
    down: torch.Tensor,
    num_tokens: int,
    fused: bool,
    workspaces: int,
) -> torch.Tensor:
    return h.new_empty(num_tokens, down.shape[1])


def _refuse(ctx: object, *gradients: object) -> None:
    raise RuntimeError(NO_BACKWARD)


def _define() -> None:
    _library.define(
        "dispatch_gemm(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor up, bool gated, "
        "bool fused, int workspaces) -> (Tensor h, Tensor plan)",
        tags=_TAGS,
    )
    _library.define(
        "gemm_combine(Tensor h, Tensor plan, Tensor down, SymInt num_tokens, bool fused, "
        "int workspaces) -> Tensor",
        tags=_TAGS,
    )
    for name, run, fake in (
        ("dispatch_gemm", _dispatch_gemm, _fake_dispatch_gemm),
        ("gemm_combine", _gemm_combine, _fake_gemm_combine),
    ):
        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"halley::{name}", fake, lib=_library)
        torch.library.register_autograd(f"halley::{name}", _refuse, lib=_library)


_define()
