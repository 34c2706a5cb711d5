# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Fetch the rows of other ranks while the tiles whose rows are here are multiplied.

Forward, the rows are tokens and the tiles end in the activation (layer0). Backward, the rows are
gradients of the output and the tiles end in the gradient of the activation: the same kernel.

Fetch tasks and tiles are taken by atomic tickets, by persistent programs. On a GPU those that fetch
are a launch of their own, beside which tiles are multiplied (``kernels.parts``). In one launch a
program's role is what it does next: all begin with this rank's own rows, a few go on fetching, the
rest multiply, and a program whose tile still waits for rows fetches some meanwhile. A program waits
only for tickets that were taken before, by programs that never wait while they fetch: no deadlock,
whatever the number of programs that run at a time.

Source: COMET (arXiv:2502.19811), sections 3.1 and 3.2, with readiness by tile and not by rank.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from halley.kernels.dispatch_tiles import Form, multiply_run
from halley.kernels.fetch import (
    FROM_KEPT,
    FROM_PEERS,
    FROM_PEERS_AND_KEEP,
    clear_task,
    fetch_task,
    rows_to_clear,
)
from halley.kernels.knobs import GemmTile, Knobs
from halley.kernels.launch import Launcher
from halley.kernels.layout import ANY_SENDS, Layout
from halley.kernels.parts import LaunchShape, end_with_first, launch_parts, let_second_begin
from halley.kernels.peer import failure, fence_async, poll, wait
from halley.kernels.plan_words import EPOCH, NUM_OWN_SENDS, NUM_SENDS, NUM_TILES, usable_here
from halley.kernels.status import DISPATCH
from halley.kernels.tiles import describe, describe_rows, describe_weights, tile_of


_DISPATCH = tl.constexpr(DISPATCH)
# Words of the tickets; gemm_combine has the others.
_FETCH_TICKET = tl.constexpr(0)
_TILE_TICKET = tl.constexpr(1)
_EXITED = tl.constexpr(5)
_FETCH_REGISTERS = 72  # of a thread that fetches; backward, tiles leave no more over


@triton.jit
def _reset(plan, num_tiles, LAYOUT: tl.constexpr):
    """Leave the counters as the plan had them, for whoever runs on this plan again."""
    STEP: tl.constexpr = 1024
    tickets = plan + LAYOUT.tickets
    tl.store(tickets + _FETCH_TICKET, 0)
    tl.store(tickets + _TILE_TICKET, 0)
    tl.store(tickets + _EXITED, 0)
    for start in range(0, num_tiles, STEP):
        tile = start + tl.arange(0, STEP)
        tl.store(plan + LAYOUT.tile_arrived + tile, 0, mask=tile < num_tiles)


@triton.jit
def _alternate(task, num_own, num_tasks):
    """Return the task in a turn that alternates between this rank's own rows and those of others.

    Both come as far as their number goes: the link has work from the start, and so have experts
    whose first rows are this rank's own.
    """
    num_pairs = tl.minimum(num_own, num_tasks - num_own)
    paired = tl.where(task % 2 == 0, task // 2, num_own + task // 2)
    rest = tl.where(num_own > num_pairs, task - num_pairs, task)
    return tl.where(task < 2 * num_pairs, paired, rest)


@triton.jit(
    do_not_specialize=[
        "stage_tokens",
        "num_fetchers",
        "capacity",
        "send_capacity",
        "num_leaving",
        "timeout_ns",
    ]
)
def dispatch_gemm_kernel(
    stage_ptrs_W, stage_tokens, marks, sends_SD, x_RD, plan, a_desc, b_desc, h, pre, dpre,
    weight_R, dweight_RC,
    num_fetchers, capacity, send_capacity, num_leaving, status, host_words, timeout_ns: tl.int64,
    FETCH: tl.constexpr, MULTIPLY: tl.constexpr,
    LAYOUT: tl.constexpr, FORM: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, INTERMEDIATE_SIZE: tl.constexpr, BLOCK_F: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LINK: tl.constexpr, OWN_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Fetch and multiply by tickets, or one of the two.

    ``h``, ``pre`` and ``dpre`` are descriptors forward and pointers backward: a store by tensor
    memory is waited for, and backward has three for each of four parts of a tile.
    """
    if not MULTIPLY:
        let_second_begin()
    BLOCK_M: tl.constexpr = LAYOUT.block_m
    CLEAR: tl.constexpr = FORM.clear
    num_columns: tl.constexpr = (INTERMEDIATE_SIZE + BLOCK_F - 1) // BLOCK_F
    num_runs: tl.constexpr = (num_columns + RUN - 1) // RUN
    usable = usable_here(plan, capacity, send_capacity, LAYOUT)
    num_tiles = tl.load(plan + LAYOUT.summary + NUM_TILES) * usable
    total = num_tiles * num_runs * MULTIPLY
    num_tasks = tl.load(plan + LAYOUT.summary + NUM_SENDS) // ROWS * usable * FETCH
    num_own = tl.load(plan + LAYOUT.summary + NUM_OWN_SENDS) // ROWS * usable * FETCH
    num_first = num_own
    if (tl.program_id(0) < num_fetchers) | (MULTIPLY == 0):
        num_first = num_tasks
    # What clears what pads the experts' rows comes first among the tasks.
    num_clear = (LAYOUT.num_local if CLEAR > 0 else 0) * usable * FETCH
    num_tasks += num_clear
    num_first += num_clear
    first_token = (tl.load(marks + EPOCH) % 2).to(tl.int64) * stage_tokens
    tickets = plan + LAYOUT.tickets
    ticket = total
    if MULTIPLY:
        ticket = tl.atomic_add(tickets + _TILE_TICKET, 1, sem="relaxed", scope="gpu")
    more = num_tasks > 0
    fetching = num_first > 0
    while (ticket < total) | fetching:
        ready = False
        if MULTIPLY:
            tile, run = tile_of(ticket % tl.maximum(total, 1), num_tiles, num_runs, GROUP)
            if OWN_FIRST:
                order = plan + LAYOUT.tile_order + tile
                tile = tl.load(order, mask=tile < num_tiles, other=0)
            expert = tl.load(plan + LAYOUT.tile_expert + tile)
            num_rows = tl.load(plan + LAYOUT.tile_rows + tile)
            need = num_rows
            if CLEAR > 0:
                need += rows_to_clear(num_rows, CLEAR)
            arrived = plan + LAYOUT.tile_arrived + tile
            if not fetching:
                ready = poll(arrived, "gpu") >= need
        if fetching | (more & (not ready)):
            task = tl.atomic_add(tickets + _FETCH_TICKET, 1, sem="relaxed", scope="gpu")
            if FETCH:
                if task < num_clear:
                    if CLEAR > 0:
                        clear_task(task, x_RD, plan, LAYOUT, HIDDEN_SIZE, CLEAR, ROWS, COLUMNS)
                elif task < num_tasks:
                    which = task - num_clear
                    if not MULTIPLY:
                        which = _alternate(which, num_own, num_tasks - num_clear)
                    fetch_task(
                        which, stage_ptrs_W, first_token, sends_SD, x_RD, plan, status,
                        LAYOUT, FORM.sends, HIDDEN_SIZE, ROWS, COLUMNS, LINK,
                    )  # fmt: skip
            more = task + 1 < num_tasks
            fetching = task + 1 < num_first
        elif MULTIPLY:
            if not ready:
                code = failure(_DISPATCH, 0, tile)
                ready = wait(arrived, need, timeout_ns, status, host_words, code, "gpu")
            if ready:
                fence_async()
                first = run * RUN
                multiply_run(
                    tile * BLOCK_M, expert, first, tl.minimum(num_columns - first, RUN), num_rows,
                    a_desc, b_desc, h, pre, dpre, weight_R, dweight_RC,
                    FORM, HIDDEN_SIZE, INTERMEDIATE_SIZE, RUN, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_F,
                )  # fmt: skip
                ticket = tl.atomic_add(tickets + _TILE_TICKET, 1, sem="relaxed", scope="gpu")
            else:
                ticket = total
    before = tl.atomic_add(tickets + _EXITED, 1, sem="acq_rel", scope="gpu")
    if before == num_leaving - 1:
        _reset(plan, num_tiles, LAYOUT)
    if not FETCH:
        end_with_first()


_launch = Launcher(dispatch_gemm_kernel)


def dispatch_gemm(
    x_RD: torch.Tensor,
    h_RF: torch.Tensor,
    pre_RG: torch.Tensor | None,
    *,
    stage_ptrs_W: torch.Tensor,
    stage_tokens: int,
    marks: torch.Tensor,
    plan: torch.Tensor,
    up_LGD: torch.Tensor,
    gated: bool,
    layout: Layout,
    knobs: Knobs,
    num_programs: int,
    status: torch.Tensor,
    host_words: torch.Tensor,
    timeout_ns: int,
    fused: bool = True,
    sends_SD: torch.Tensor | None = None,
    sends_kept: bool = False,
) -> None:
    """Bring this rank's rows together and multiply them by the first projection.

    Args:
        x_RD: written: rows sorted by expert, padded to tiles, any content before. If ``pre_RG`` is
            given, zero behind each expert's rows as far as ``weight_gemm`` wants it.
        h_RF: written: activations of these rows.
        pre_RG: written if given: what the activation was made of (gate, up), for backward.
        stage_ptrs_W: addresses of all ranks' two stages.
        stage_tokens: rows of one of them.
        marks: as for ``make_plan``.
        plan: made by ``make_plan`` for this call.
        up_LGD: stacked weights, ``(L, 2F, D)`` if gated (gate first), else ``(L, F, D)``.
        fused: False fetches all rows first, in a launch of its own.
        sends_SD: written if given: the rows as they come over the link, once each, in the order of
            the plan's ``fetch`` list.
        sends_kept: ``sends_SD`` was written by an earlier call with this plan: the rows come from
            there, and no peer takes part.

    A plan with more rows than ``x_RD``, or more sends than are to be written, does nothing: the
    caller reads how many there are and comes again with larger buffers.
    """
    sends = FROM_PEERS if sends_SD is None else FROM_KEPT if sends_kept else FROM_PEERS_AND_KEEP
    room = ANY_SENDS if sends_SD is None or sends_kept else len(sends_SD)
    keep = pre_RG is not None
    clear = knobs.weight.block_k if keep else 0
    form = Form(gated=gated, keep=keep, sends=sends.value, clear=clear)
    tile, intermediate_size = knobs.up, h_RF.shape[1]
    h_desc = pre_desc = describe_rows(
        h_RF, block_rows=layout.block_m, block_columns=form.tile_columns(tile)
    )
    if pre_RG is not None:
        pre_desc = _describe_parts(pre_RG, form, form.tile_columns(tile), layout)
    x_desc = describe_rows(x_RD, block_rows=layout.block_m, block_columns=tile.block_k)
    up_desc = describe_weights(up_LGD, parts=form.num_parts, tile=tile)

    def launch(shape: LaunchShape, *, multiply: bool, move: bool) -> None:
        _launch(
            shape.num_programs,
            (stage_ptrs_W, stage_tokens, marks, x_RD if sends_SD is None else sends_SD, x_RD, plan,
             x_desc, up_desc, h_desc, pre_desc, pre_desc, status, status, knobs.num_fetchers,
             min(len(x_RD), len(h_RF)), room, shape.num_leaving, status, host_words, timeout_ns),
            (move, multiply,
             *_constants(form, layout, knobs, tile, shape, x_RD.shape[1], intermediate_size)),
            dtypes=(x_RD.dtype,), **shape.options,
        )  # fmt: skip

    launch_parts(
        launch, tile=tile, knobs=knobs, num_programs=num_programs, fused=fused,
        moves_first=True, movers=1, move_registers=_FETCH_REGISTERS,
    )  # fmt: skip


def dispatch_dgrad(
    dy_RD: torch.Tensor,
    dpre_RG: torch.Tensor,
    weighted_RF: torch.Tensor,
    dweight_RC: torch.Tensor,
    *,
    pre_RG: torch.Tensor,
    weight_R: torch.Tensor,
    stage_ptrs_W: torch.Tensor,
    stage_tokens: int,
    marks: torch.Tensor,
    plan: torch.Tensor,
    down_LDF: torch.Tensor,
    gated: bool,
    layout: Layout,
    knobs: Knobs,
    num_programs: int,
    status: torch.Tensor,
    host_words: torch.Tensor,
    timeout_ns: int,
    fused: bool = True,
) -> None:
    """Bring the gradients of the output to the rows, back through the down projection and h.

    Behind each expert's rows, what is written is zero as far as ``weight_gemm`` wants it.

    Args:
        dy_RD: written: gradients of the layer's output, a row for each of the token's experts.
        dpre_RG: written: gradients of what the activation was made of.
        weighted_RF: written: activations times routing weights. ``dy_RD`` and this make the
            gradient of the down projection.
        dweight_RC: written: parts of the gradients of the routing weights, float32,
            ``dgrad_columns`` a row, which add up to it.
        pre_RG: what the activation was made of.
        weight_R: routing weight of each row, float32, as ``stage_gradient`` wrote it.
        stage_ptrs_W, stage_tokens, marks: as for ``dispatch_gemm``; in the stages are gradients of
            all ranks' outputs.
        plan: of the call whose gradient this is.
        down_LDF: stacked weights.
        fused: False fetches all rows first, in a launch of its own.
    """
    form = Form(gated=gated, backward=True, clear=knobs.weight.block_k)
    tile, intermediate_size = knobs.down_grad, weighted_RF.shape[1]
    dy_desc = describe_rows(dy_RD, block_rows=layout.block_m, block_columns=tile.block_k)
    down_desc = describe_weights(down_LDF, parts=1, tile=tile, turned=True)

    def launch(shape: LaunchShape, *, multiply: bool, move: bool) -> None:
        _launch(
            shape.num_programs,
            (stage_ptrs_W, stage_tokens, marks, dy_RD, dy_RD, plan, dy_desc, down_desc, weighted_RF,
             pre_RG, dpre_RG, weight_R, dweight_RC, knobs.num_fetchers, dy_RD.shape[0],
             ANY_SENDS, shape.num_leaving, status, host_words, timeout_ns),
            (move, multiply,
             *_constants(form, layout, knobs, tile, shape, dy_RD.shape[1], intermediate_size)),
            dtypes=(dy_RD.dtype,), **shape.options,
        )  # fmt: skip

    launch_parts(
        launch, tile=tile, knobs=knobs, num_programs=num_programs, fused=fused,
        moves_first=True, movers=1, move_registers=_FETCH_REGISTERS,
    )  # fmt: skip


def dgrad_columns(intermediate_size: int, knobs: Knobs) -> int:
    """Return into how many parts the gradient of a routing weight falls."""
    return -(-intermediate_size // knobs.down_grad.block_n)


def _constants(
    form: Form,
    layout: Layout,
    knobs: Knobs,
    tile: GemmTile,
    shape: LaunchShape,
    hidden_size: int,
    inner_size: int,
) -> tuple[object, ...]:
    return (
        layout, form, hidden_size, inner_size, form.tile_columns(tile),
        *knobs.fetch_block(hidden_size, num_warps=shape.num_warps), knobs.link_bytes_per_us,
        knobs.own_first, tile.block_n, tile.block_k, tile.group, tile.run,
    )  # fmt: skip


def _describe_parts(
    pre_RG: torch.Tensor, form: Form, block_columns: int, layout: Layout
) -> TensorDescriptor:
    """Return the descriptor of what the activation is made of, (rows, parts, columns)."""
    pre = pre_RG.view(pre_RG.shape[0], form.num_parts, -1)
    return describe(pre, list(pre.shape), list(pre.stride()), [layout.block_m, 1, block_columns])
