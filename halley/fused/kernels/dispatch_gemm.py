# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Fetch the rows of other ranks while the tiles whose rows have arrived are multiplied.

Forward, the rows are tokens and the tiles end in the activation (layer0). Backward, the rows are
gradients of the output and the tiles end in the gradient of the activation: the same kernels.

Two kernels run side by side (``kernels.parts``): ``fetch_kernel`` brings rows over the link and
counts them by tile, ``multiply_arrived_kernel`` waits for a tile's count and multiplies. Persistent
programs take fetch tasks and tiles by atomic tickets. A program waits only for fetch tasks, whose
programs never wait: there is no deadlock, whatever the number of programs that run at a time.

Source: COMET (arXiv:2502.19811), sections 3.1 and 3.2, with readiness by tile and not by rank.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from halley.fused.kernels.dispatch_tiles import Form, multiply_run
from halley.fused.kernels.fetch import (
    FROM_KEPT,
    FROM_PEERS,
    FROM_PEERS_AND_KEEP,
    clear_task,
    fetch_task,
    rows_to_clear,
)
from halley.fused.kernels.layout import ANY_SENDS, Layout
from halley.fused.kernels.peer import failure, fence_async, wait
from halley.fused.kernels.plan_words import EPOCH, NUM_OWN_SENDS, NUM_SENDS, NUM_TILES, usable_here
from halley.fused.kernels.status import DISPATCH
from halley.ops.kernels.gemm_config import GemmTile, Knobs
from halley.ops.kernels.launch import Launcher
from halley.ops.kernels.launch_pair import (
    LaunchPair,
    LaunchShape,
    end_with_first,
    let_second_begin,
    shape_launches,
    side_by_side,
)
from halley.ops.kernels.tiles import describe, describe_rows, describe_weights, tile_of


_DISPATCH = tl.constexpr(DISPATCH)
# Words of the tickets; gemm_combine has the others.
_FETCH_TICKET = tl.constexpr(0)
_TILE_TICKET = tl.constexpr(1)
_EXITED = tl.constexpr(5)
_FETCH_REGISTERS = 72  # of a thread that fetches; backward, tiles leave no more over


@triton.jit
def _reset(plan, num_tiles, LAYOUT: tl.constexpr):
    """Set the counters to 0, as the plan has them, for the next pass with this plan."""
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
    """Return the task that comes at a place, so that own rows and rows of others alternate.

    Both come as far as their number goes: the link has work from the start, and so have experts
    whose first rows are this rank's own.
    """
    num_pairs = tl.minimum(num_own, num_tasks - num_own)
    paired = tl.where(task % 2 == 0, task // 2, num_own + task // 2)
    rest = tl.where(num_own > num_pairs, task - num_pairs, task)
    return tl.where(task < 2 * num_pairs, paired, rest)


@triton.jit
def _leave(plan, num_tiles, num_leaving, LAYOUT: tl.constexpr):
    """Count a program that ends; the last one of both launches resets the counters."""
    exited = plan + LAYOUT.tickets + _EXITED
    before = tl.atomic_add(exited, 1, sem="acq_rel", scope="gpu")
    if before == num_leaving - 1:
        _reset(plan, num_tiles, LAYOUT)


@triton.jit(do_not_specialize=["stage_tokens", "capacity", "send_capacity", "num_leaving"])
def fetch_kernel(
    stage_ptrs_W, stage_tokens, marks, sends_SD, x_RD, plan, capacity, send_capacity, num_leaving,
    LAYOUT: tl.constexpr, FORM: tl.constexpr, HIDDEN_SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Bring all rows of the plan to their experts' rows, and clear what pads those."""
    let_second_begin()
    CLEAR: tl.constexpr = FORM.clear
    usable = usable_here(plan, capacity, send_capacity, LAYOUT)
    num_tiles = tl.load(plan + LAYOUT.summary + NUM_TILES) * usable
    num_sends = tl.load(plan + LAYOUT.summary + NUM_SENDS) // ROWS * usable
    num_own = tl.load(plan + LAYOUT.summary + NUM_OWN_SENDS) // ROWS * usable
    # Rows that pad are cleared first: the tiles of short experts wait for them.
    num_clear = (LAYOUT.num_local if CLEAR > 0 else 0) * usable
    num_tasks = num_sends + num_clear
    first_token = (tl.load(marks + EPOCH) % 2).to(tl.int64) * stage_tokens
    ticket = plan + LAYOUT.tickets + _FETCH_TICKET
    more = num_tasks > 0
    while more:
        task = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
        if task < num_clear:
            if CLEAR > 0:
                clear_task(task, x_RD, plan, LAYOUT, HIDDEN_SIZE, CLEAR, ROWS, COLUMNS)
        elif task < num_tasks:
            fetch_task(
                _alternate(task - num_clear, num_own, num_sends),
                stage_ptrs_W, first_token, sends_SD, x_RD, plan,
                LAYOUT, FORM.sends, HIDDEN_SIZE, ROWS, COLUMNS,
            )  # fmt: skip
        more = task + 1 < num_tasks
    _leave(plan, num_tiles, num_leaving, LAYOUT)


@triton.jit(do_not_specialize=["capacity", "send_capacity", "num_leaving", "timeout_ns"])
def multiply_arrived_kernel(
    plan, a_desc, b_desc, h, pre, dpre, weight_R, dweight_RC,
    capacity, send_capacity, num_leaving, status, host_words, timeout_ns: tl.int64,
    LAYOUT: tl.constexpr, FORM: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, INTERMEDIATE_SIZE: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Multiply the tiles of the plan, each once all its rows have arrived.

    ``h``, ``pre`` and ``dpre`` are descriptors forward and pointers backward: a store by tensor
    memory is waited for, and backward has three for each of four parts of a tile.
    """
    BLOCK_M: tl.constexpr = LAYOUT.block_m
    CLEAR: tl.constexpr = FORM.clear
    num_columns: tl.constexpr = (INTERMEDIATE_SIZE + BLOCK_F - 1) // BLOCK_F
    num_runs: tl.constexpr = (num_columns + RUN - 1) // RUN
    usable = usable_here(plan, capacity, send_capacity, LAYOUT)
    num_tiles = tl.load(plan + LAYOUT.summary + NUM_TILES) * usable
    total = num_tiles * num_runs
    tickets = plan + LAYOUT.tickets + _TILE_TICKET
    ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    while ticket < total:
        tile, run = tile_of(ticket, num_tiles, num_runs, GROUP)
        expert = tl.load(plan + LAYOUT.tile_expert + tile)
        num_rows = tl.load(plan + LAYOUT.tile_rows + tile)
        need = num_rows
        if CLEAR > 0:
            need += rows_to_clear(num_rows, CLEAR)
        arrived = plan + LAYOUT.tile_arrived + tile
        code = failure(_DISPATCH, 0, tile)
        if wait(arrived, need, timeout_ns, status, host_words, code, "gpu"):
            fence_async()
            first = run * RUN
            multiply_run(
                tile * BLOCK_M, expert, first, tl.minimum(num_columns - first, RUN), num_rows,
                a_desc, b_desc, h, pre, dpre, weight_R, dweight_RC,
                FORM, HIDDEN_SIZE, INTERMEDIATE_SIZE, RUN, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_F,
            )  # fmt: skip
            ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        else:
            ticket = total
    _leave(plan, num_tiles, num_leaving, LAYOUT)
    end_with_first()


_launch_fetch = Launcher(fetch_kernel)
_launch_multiply = Launcher(multiply_arrived_kernel)


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

    capacity = min(len(x_RD), len(h_RF))
    shapes = _shape_launches(tile, knobs, num_programs, fused=fused)
    with side_by_side(fused):
        _launch_fetch(
            shapes.move.num_programs,
            (stage_ptrs_W, stage_tokens, marks, x_RD if sends_SD is None else sends_SD, x_RD, plan,
             capacity, room, shapes.move.num_leaving),
            _fetch_constants(form, layout, knobs, shapes.move, x_RD.shape[1]),
            dtypes=(x_RD.dtype,), **shapes.move.options,
        )  # fmt: skip
        _launch_multiply(
            shapes.multiply.num_programs,
            (plan, x_desc, up_desc, h_desc, pre_desc, pre_desc, status, status,
             capacity, room, shapes.multiply.num_leaving, status, host_words, timeout_ns),
            _multiply_constants(form, layout, knobs, tile, x_RD.shape[1], intermediate_size),
            dtypes=(x_RD.dtype,), **shapes.multiply.options,
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

    capacity = dy_RD.shape[0]
    shapes = _shape_launches(tile, knobs, num_programs, fused=fused)
    with side_by_side(fused):
        _launch_fetch(
            shapes.move.num_programs,
            (stage_ptrs_W, stage_tokens, marks, dy_RD, dy_RD, plan,
             capacity, ANY_SENDS, shapes.move.num_leaving),
            _fetch_constants(form, layout, knobs, shapes.move, dy_RD.shape[1]),
            dtypes=(dy_RD.dtype,), **shapes.move.options,
        )  # fmt: skip
        _launch_multiply(
            shapes.multiply.num_programs,
            (plan, dy_desc, down_desc, weighted_RF, pre_RG, dpre_RG, weight_R, dweight_RC,
             capacity, ANY_SENDS, shapes.multiply.num_leaving, status, host_words, timeout_ns),
            _multiply_constants(form, layout, knobs, tile, dy_RD.shape[1], intermediate_size),
            dtypes=(dy_RD.dtype,), **shapes.multiply.options,
        )  # fmt: skip


def dgrad_columns(intermediate_size: int, knobs: Knobs) -> int:
    """Return into how many parts the gradient of a routing weight falls."""
    return -(-intermediate_size // knobs.down_grad.block_n)


def _shape_launches(tile: GemmTile, knobs: Knobs, num_programs: int, *, fused: bool) -> LaunchPair:
    return shape_launches(
        tile=tile,
        knobs=knobs,
        num_programs=num_programs,
        fused=fused,
        moves_first=True,
        movers=1,
        move_registers=_FETCH_REGISTERS,
    )


def _fetch_constants(
    form: Form, layout: Layout, knobs: Knobs, shape: LaunchShape, hidden_size: int
) -> tuple[object, ...]:
    return (
        layout, form, hidden_size, *knobs.fetch_block(hidden_size, num_warps=shape.num_warps)
    )  # fmt: skip


def _multiply_constants(
    form: Form, layout: Layout, knobs: Knobs, tile: GemmTile, hidden_size: int, inner_size: int
) -> tuple[object, ...]:
    return (
        layout, form, hidden_size, inner_size, form.tile_columns(tile),
        tile.block_n, tile.block_k, tile.group, tile.run,
    )  # fmt: skip


def _describe_parts(
    pre_RG: torch.Tensor, form: Form, block_columns: int, layout: Layout
) -> TensorDescriptor:
    """Return the descriptor of what the activation is made of, (rows, parts, columns)."""
    pre = pre_RG.view(pre_RG.shape[0], form.num_parts, -1)
    return describe(pre, list(pre.shape), list(pre.stride()), [layout.block_m, 1, block_columns])
