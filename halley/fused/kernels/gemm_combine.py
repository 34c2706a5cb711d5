# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Combine the columns that are multiplied already while the next ones are multiplied.

Forward, rows of the activation are multiplied by the down projection and weighted (layer1).
Backward, rows of gradients are multiplied by the up projection, transposed, and only summed; the
gradients of the routing weights go to their tokens' ranks as well: the same kernels.

Two kernels run side by side (``kernels.parts``). ``multiply_columns_kernel`` makes tiles by chunks
of columns. ``combine_kernel`` waits until the rows of a (token, source rank) are multiplied in a
chunk, weights and sums them in float32 and stores the sum in the home buffer of the token's rank.
After the last sum of a chunk it sets a flag on that rank, where the same kernel adds up what the
ranks have sent. Persistent programs take all three kinds of work by atomic tickets. Programs wait
for tiles that were taken before, and for ranks that obey the same rule.

Source: COMET (arXiv:2502.19811), section 3.1 (columns first) and 3.2.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from halley.fused.kernels.combine import combine_task, count_sent, send_weight_gradients
from halley.fused.kernels.combine_tiles import (
    count_ready,
    count_tiles,
    counter_of,
    groups_of_task,
    multiply_tiles,
    nth_task,
)
from halley.fused.kernels.home import (
    chunk_came,
    look_for_overflow,
    take_home,
    take_the_rest_home,
)
from halley.fused.kernels.layout import ANY_SENDS, MAX_CHUNKS, TASK_ROWS, Layout
from halley.fused.kernels.peer import failure, wait
from halley.fused.kernels.plan_words import EPOCH, NUM_SENDS, NUM_TILES, usable_here
from halley.fused.kernels.status import COMBINE
from halley.ops.kernels.gemm_config import GemmTile, Knobs
from halley.ops.kernels.launch import Launcher, aligned
from halley.ops.kernels.launch_pair import (
    LaunchPair,
    end_with_first,
    let_second_begin,
    shape_launches,
    side_by_side,
)
from halley.ops.kernels.tiles import describe_rows, describe_weights


_COMBINE = tl.constexpr(COMBINE)
_TASK_ROWS = tl.constexpr(TASK_ROWS)
_MAX_CHUNKS = tl.constexpr(MAX_CHUNKS)
# Words of the tickets; dispatch_gemm has the others.
_TILE_TICKET = tl.constexpr(2)
_TASK_TICKET = tl.constexpr(3)
_HOME_TICKET = tl.constexpr(4)
_EXITED = tl.constexpr(6)
_COMBINE_REGISTERS = 160  # of a thread, of all programs that combine on a multiprocessor together


@triton.jit
def _reset(plan, LAYOUT: tl.constexpr):
    """Set the counters to 0, as the plan has them, for the next pass with this plan."""
    tickets = plan + LAYOUT.tickets
    tl.store(tickets + _TILE_TICKET, 0)
    tl.store(tickets + _TASK_TICKET, 0)
    tl.store(tickets + _HOME_TICKET, 0)
    tl.store(tickets + _EXITED, 0)
    tl.store(plan + LAYOUT.chunk_done + tl.arange(0, _MAX_CHUNKS * LAYOUT.num_groups), 0)
    tl.store(plan + LAYOUT.chunk_sent + tl.arange(0, _MAX_CHUNKS), 0)


@triton.jit
def _leave(num_leaving, plan, words, status, host_words, LAYOUT: tl.constexpr):
    """Count a program that ends; the last one of both launches resets the counters."""
    tickets = plan + LAYOUT.tickets
    before = tl.atomic_add(tickets + _EXITED, 1, sem="acq_rel", scope="gpu")
    if before == num_leaving - 1:
        _reset(plan, LAYOUT)
        look_for_overflow(words, status, host_words, LAYOUT)


@triton.jit(do_not_specialize=["capacity", "send_capacity", "num_leaving"])
def multiply_columns_kernel(
    z_desc, plan, a_desc, b_desc, words, capacity, send_capacity, num_leaving, status, host_words,
    LAYOUT: tl.constexpr, BACKWARD: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Multiply the tiles of the plan, one chunk of columns after another, and count those done."""
    let_second_begin()
    num_columns: tl.constexpr = (HIDDEN_SIZE + BLOCK_N - 1) // BLOCK_N
    num_chunks: tl.constexpr = (HIDDEN_SIZE + CHUNK - 1) // CHUNK
    per_chunk: tl.constexpr = CHUNK // BLOCK_N
    last_columns: tl.constexpr = num_columns - (num_chunks - 1) * per_chunk
    runs_a_chunk: tl.constexpr = (per_chunk + RUN - 1) // RUN
    num_runs: tl.constexpr = (num_chunks - 1) * runs_a_chunk + (last_columns + RUN - 1) // RUN
    usable = usable_here(plan, capacity, send_capacity, LAYOUT)
    num_tiles = tl.load(plan + LAYOUT.summary + NUM_TILES) * usable
    total = num_tiles * num_runs
    tickets = plan + LAYOUT.tickets + _TILE_TICKET
    pending = 0  # chunk and number of the tiles made last, until they are counted
    ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    while ticket < total:
        # Counts the tiles of the ticket before, whose stores are done by then.
        pending = multiply_tiles(
            ticket, pending, a_desc, b_desc, z_desc, plan, num_tiles,
            LAYOUT, HIDDEN_SIZE, DEPTH, BACKWARD, CHUNK, BLOCK_N, BLOCK_K, GROUP, RUN,
        )  # fmt: skip
        ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    count_tiles(pending, plan, LAYOUT)
    _leave(num_leaving, plan, words, status, host_words, LAYOUT)


@triton.jit(do_not_specialize=[
    "num_tokens", "home_tokens", "capacity", "send_capacity", "rank", "num_leaving", "timeout_ns",
])  # fmt: skip
def combine_kernel(
    y_TD, z_RD, plan, home_WTD, home_ptrs_W, words, words_ptrs_W,
    dweight_RC, idx_TK, dweights_TK, weights_home_WTK, weights_home_ptrs_W,
    num_tokens, home_tokens, capacity, send_capacity, marks, rank, num_leaving,
    status, host_words, timeout_ns: tl.int64,
    LAYOUT: tl.constexpr, NUM_PARTS: tl.constexpr, HIDDEN_SIZE: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, HOME_ROWS: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the rows of sends that are multiplied and send the sums; add up the sums that arrive.

    ``NUM_PARTS`` are those of the gradient of a routing weight, in backward; 0 is forward.
    ``COLUMNS`` are those of a tile that is multiplied.
    """
    let_second_begin()
    BACKWARD: tl.constexpr = NUM_PARTS > 0
    num_columns: tl.constexpr = (HIDDEN_SIZE + COLUMNS - 1) // COLUMNS
    num_chunks: tl.constexpr = (HIDDEN_SIZE + CHUNK - 1) // CHUNK
    per_chunk: tl.constexpr = CHUNK // COLUMNS
    epoch = tl.load(marks + EPOCH)
    usable = usable_here(plan, capacity, send_capacity, LAYOUT)
    tasks_a_chunk = tl.load(plan + LAYOUT.summary + NUM_SENDS) // _TASK_ROWS * usable
    num_tasks = tasks_a_chunk * num_chunks
    homes_a_chunk = tl.cdiv(num_tokens, HOME_ROWS)
    num_homes = homes_a_chunk * num_chunks * usable
    tickets = plan + LAYOUT.tickets
    task = tl.atomic_add(tickets + _TASK_TICKET, 1, sem="relaxed", scope="gpu")
    home = tl.atomic_add(tickets + _HOME_TICKET, 1, sem="relaxed", scope="gpu")
    arrived = -1  # the last chunk that all ranks have sent, as far as this program knows
    ready = 0  # groups of experts that this program has seen to be whole, those of all chunks
    while task < num_tasks:
        chunk = task // tasks_a_chunk
        columns = tl.minimum(num_columns - chunk * per_chunk, per_chunk)
        which = nth_task(task - chunk * tasks_a_chunk, tasks_a_chunk, plan, LAYOUT)
        wanted = chunk * LAYOUT.num_groups + groups_of_task(which, plan, LAYOUT)
        ready = count_ready(ready, chunk, wanted, columns, plan, LAYOUT)
        going_home = False
        if ready < wanted:
            going_home = chunk_came(
                home, num_homes, homes_a_chunk, arrived, plan, words, epoch, LAYOUT
            )
        if ready >= wanted:
            combine_task(
                which, chunk, z_RD, plan, home_ptrs_W, home_tokens, rank,
                LAYOUT, HIDDEN_SIZE, ROWS, CHUNK, STAGES, not BACKWARD,
            )  # fmt: skip
            if BACKWARD:
                if chunk == 0:
                    send_weight_gradients(
                        which, dweight_RC, plan, weights_home_ptrs_W, home_tokens, rank,
                        LAYOUT, NUM_PARTS, ROWS,
                    )  # fmt: skip
            count_sent(chunk, tasks_a_chunk, plan, words, words_ptrs_W, rank, epoch, LAYOUT)
            task = tl.atomic_add(tickets + _TASK_TICKET, 1, sem="relaxed", scope="gpu")
        elif going_home:
            arrived = home // homes_a_chunk
            take_home(
                home % homes_a_chunk, arrived, y_TD, home_WTD, home_tokens, plan, num_tokens,
                idx_TK, dweights_TK, weights_home_WTK,
                LAYOUT, BACKWARD, HIDDEN_SIZE, HOME_ROWS, CHUNK,
            )  # fmt: skip
            home = tl.atomic_add(tickets + _HOME_TICKET, 1, sem="relaxed", scope="gpu")
        else:
            code = failure(_COMBINE, 0, chunk)
            done, need = counter_of(ready, columns, plan, LAYOUT)
            if not wait(done, need, timeout_ns, status, host_words, code, "gpu"):
                task = num_tasks
    take_the_rest_home(
        home, num_homes, homes_a_chunk, arrived, tickets + _HOME_TICKET, y_TD,
        home_WTD, home_tokens, plan, num_tokens, idx_TK, dweights_TK, weights_home_WTK, words,
        epoch, rank, status, host_words, timeout_ns,
        LAYOUT, BACKWARD, HIDDEN_SIZE, HOME_ROWS, CHUNK,
    )  # fmt: skip
    _leave(num_leaving, plan, words, status, host_words, LAYOUT)
    end_with_first()


_launch_multiply = Launcher(multiply_columns_kernel)
_launch_combine = Launcher(combine_kernel)


def gemm_combine(
    y_TD: torch.Tensor,
    z_RD: torch.Tensor,
    h_RF: torch.Tensor,
    *,
    plan: torch.Tensor,
    down_LDF: torch.Tensor,
    home_WTD: torch.Tensor,
    home_ptrs_W: torch.Tensor,
    words: torch.Tensor,
    words_ptrs_W: torch.Tensor,
    marks: torch.Tensor,
    rank: int,
    layout: Layout,
    knobs: Knobs,
    num_programs: int,
    status: torch.Tensor,
    host_words: torch.Tensor,
    timeout_ns: int,
    fused: bool = True,
    send_capacity: int = ANY_SENDS,
) -> None:
    """Multiply by the second projection and return the sums over its experts to each token's rank.

    Args:
        y_TD: written: the layer's output for this rank's tokens.
        z_RD: written: rows of the second projection, scratch.
        h_RF: activations of ``dispatch_gemm``.
        plan: made by ``make_plan`` for this call.
        down_LDF: stacked weights, ``(L, D, F)``.
        home_WTD: this rank's copy of the symmetric home buffer, ``(W, tokens, D)``: each rank
            writes its own part of it on every rank.
        home_ptrs_W: addresses of all ranks' home buffers.
        marks: as for ``make_plan``.
        fused: False runs the GEMM first, then the kernel that combines.
        send_capacity: for how many sends ``dispatch_gemm`` had room, if it wrote them.

    A plan with more rows than ``h_RF`` or ``z_RD``, or more sends, does nothing, as in
    ``dispatch_gemm``.
    """
    tile = knobs.down
    a_desc, b_desc, z_desc = _describe(h_RF, down_LDF, z_RD, tile, layout, turned=False)
    capacity = min(z_RD.shape[0], h_RF.shape[0])
    shapes = _shape_launches(tile, knobs, num_programs, fused=fused)
    with side_by_side(fused):
        _launch_multiply(
            shapes.multiply.num_programs,
            (z_desc, plan, a_desc, b_desc, words,
             capacity, send_capacity, shapes.multiply.num_leaving, status, host_words),
            _multiply_constants(z_RD, h_RF, tile, layout, knobs, backward=False),
            dtypes=(z_RD.dtype,), **shapes.multiply.options,
        )  # fmt: skip
        _launch_combine(
            shapes.move.num_programs,
            (y_TD, z_RD, plan, home_WTD, home_ptrs_W, words, words_ptrs_W,
             status, status, status, status, status, y_TD.shape[0], home_WTD.shape[1],
             capacity, send_capacity, marks, rank, shapes.move.num_leaving,
             status, host_words, timeout_ns),
            _combine_constants(z_RD, 0, tile, layout, knobs),
            dtypes=(z_RD.dtype,), **shapes.move.options,
        )  # fmt: skip


def dgrad_combine(
    dx_TD: torch.Tensor,
    dweights_TK: torch.Tensor,
    z_RD: torch.Tensor,
    dpre_RG: torch.Tensor,
    dweight_RC: torch.Tensor,
    *,
    plan: torch.Tensor,
    up_LGD: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    home_WTD: torch.Tensor,
    home_ptrs_W: torch.Tensor,
    weights_home_WTK: torch.Tensor,
    weights_home_ptrs_W: torch.Tensor,
    words: torch.Tensor,
    words_ptrs_W: torch.Tensor,
    marks: torch.Tensor,
    rank: int,
    layout: Layout,
    knobs: Knobs,
    num_programs: int,
    status: torch.Tensor,
    host_words: torch.Tensor,
    timeout_ns: int,
    fused: bool = True,
) -> None:
    """Multiply gradients by the first projection and return their sums to each token's rank.

    Args:
        dx_TD: written: the gradient of this rank's tokens.
        dweights_TK: written: the gradient of their routing weights, float32; 0 where dropped.
        z_RD: written: the gradient of each row, scratch.
        dpre_RG, dweight_RC: as ``dispatch_dgrad`` wrote them.
        plan: of the call whose gradient this is.
        up_LGD: stacked weights, as in forward.
        topk_idx_TK: expert ids of that call.
        home_WTD, home_ptrs_W: as for ``gemm_combine``.
        weights_home_WTK, weights_home_ptrs_W: the same for gradients of routing weights, float32.
        marks: as for ``make_plan``.
        fused: False runs the GEMM first, then the kernel that combines.
    """
    tile = knobs.up_grad
    a_desc, b_desc, z_desc = _describe(dpre_RG, up_LGD, z_RD, tile, layout, turned=True)
    idx_TK = aligned(topk_idx_TK)
    capacity = dpre_RG.shape[0]
    shapes = _shape_launches(tile, knobs, num_programs, fused=fused)
    with side_by_side(fused):
        _launch_multiply(
            shapes.multiply.num_programs,
            (z_desc, plan, a_desc, b_desc, words,
             capacity, ANY_SENDS, shapes.multiply.num_leaving, status, host_words),
            _multiply_constants(z_RD, dpre_RG, tile, layout, knobs, backward=True),
            dtypes=(z_RD.dtype,), **shapes.multiply.options,
        )  # fmt: skip
        _launch_combine(
            shapes.move.num_programs,
            (dx_TD, z_RD, plan, home_WTD, home_ptrs_W, words, words_ptrs_W,
             dweight_RC, idx_TK, dweights_TK, weights_home_WTK, weights_home_ptrs_W,
             dx_TD.shape[0], home_WTD.shape[1], capacity, ANY_SENDS, marks, rank,
             shapes.move.num_leaving, status, host_words, timeout_ns),
            _combine_constants(z_RD, dweight_RC.shape[1], tile, layout, knobs),
            dtypes=(z_RD.dtype, idx_TK.dtype), **shapes.move.options,
        )  # fmt: skip


def _describe(
    rows: torch.Tensor,
    weights: torch.Tensor,
    product: torch.Tensor,
    tile: GemmTile,
    layout: Layout,
    *,
    turned: bool,
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    return (
        describe_rows(rows, block_rows=layout.block_m, block_columns=tile.block_k),
        describe_weights(weights, parts=1, tile=tile, turned=turned),
        describe_rows(product, block_rows=layout.block_m, block_columns=tile.block_n),
    )


def _shape_launches(tile: GemmTile, knobs: Knobs, num_programs: int, *, fused: bool) -> LaunchPair:
    return shape_launches(
        tile=tile,
        knobs=knobs,
        num_programs=num_programs,
        fused=fused,
        moves_first=False,
        movers=knobs.combiners_beside,
        movers_after=knobs.combiners_after,
        move_registers=_COMBINE_REGISTERS // knobs.combiners_beside,
    )


def _multiply_constants(
    z_RD: torch.Tensor,
    rows: torch.Tensor,
    tile: GemmTile,
    layout: Layout,
    knobs: Knobs,
    *,
    backward: bool,
) -> tuple[object, ...]:
    return (
        layout, backward, z_RD.shape[1], rows.shape[1], knobs.chunk_columns,
        tile.block_n, tile.block_k, tile.group, tile.run,
    )  # fmt: skip


def _combine_constants(
    z_RD: torch.Tensor, num_parts: int, tile: GemmTile, layout: Layout, knobs: Knobs
) -> tuple[object, ...]:
    return (
        layout, num_parts, z_RD.shape[1], knobs.combine_rows, knobs.combine_stages,
        knobs.home_rows, knobs.chunk_columns, tile.block_n,
    )  # fmt: skip
