# Triton kernels: pyright reads them as plain Python and reports errors that are none.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""The second GEMM in chunks of columns, which counts finished tiles for ``combine_kernel``.

All tiles of a chunk come before those of the next one, so that the combine of a chunk runs while
the GEMM computes the next. Within a chunk, tiles are in the order of experts, and finished tiles
are counted by group of experts: the combine of a token starts when the groups of its experts are
done.

Source: COMET (arXiv:2502.19811), section 3.1: decompose the consumed tensor by columns.
"""

import triton
import triton.language as tl

from halley.fused.kernels.dispatch_plan import usable_here
from halley.fused.kernels.layout import NUM_TILES
from halley.fused.kernels.peer import MAX_ROWS, failure_code, report_failure, wait_bulk_stores
from halley.fused.kernels.routing_exchange import group_of
from halley.fused.launch_pair import let_second_begin
from halley.ops.kernels.tiles import multiply_step, multiply_tile, tile_of


# Words of the plan's tickets. The kernels of the first GEMM have words 0, 1 and 5.
TILE_TICKET = tl.constexpr(2)
TASK_TICKET = tl.constexpr(3)
SUM_TICKET = tl.constexpr(4)
_EXITED = tl.constexpr(6)
_MAX_RUN = tl.constexpr(1024)  # above the tiles of a run: counter and tiles share one word


@triton.jit
def count_exit(num_exits, plan, routing, status, host_status, LAYOUT: tl.constexpr):
    """Count a CTA that ends; the last one of both launches zeroes the counters for the next pass.

    The last one also reports a rank that raised its flags without sums, see ``count_task``.
    """
    tickets = plan + LAYOUT.tickets
    before = tl.atomic_add(tickets + _EXITED, 1, sem="acq_rel", scope="gpu")
    if before == num_exits - 1:
        tl.store(tickets + TILE_TICKET, 0)
        tl.store(tickets + TASK_TICKET, 0)
        tl.store(tickets + SUM_TICKET, 0)
        tl.store(tickets + _EXITED, 0)
        num_counts: tl.constexpr = LAYOUT.max_chunks * LAYOUT.num_groups
        tl.store(plan + LAYOUT.chunk_done + tl.arange(0, num_counts), 0)
        tl.store(plan + LAYOUT.chunk_sent + tl.arange(0, LAYOUT.max_chunks), 0)
        for peer in range(LAYOUT.num_ranks):
            num_rows = tl.load(routing + LAYOUT.overflow_rows + peer)
            if num_rows > 0:
                report_failure(status, host_status, failure_code(MAX_ROWS, peer, num_rows))


@triton.jit
def _multiply_run(
    ticket, pending, a_desc, b_desc, z_desc, plan, num_tiles,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, DEPTH: tl.constexpr, TRANSPOSED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Compute the tiles of a ticket and count the tiles of the ticket before (``pending``).

    Returns the tiles of this ticket, which the caller must have counted later: the counter's index
    times ``_MAX_RUN``, plus the number of tiles.
    """
    BLOCK_M: tl.constexpr = LAYOUT.block_m
    STEPS: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    num_columns: tl.constexpr = (HIDDEN_SIZE + BLOCK_N - 1) // BLOCK_N
    per_chunk: tl.constexpr = CHUNK // BLOCK_N
    chunk_runs: tl.constexpr = (per_chunk + RUN - 1) // RUN
    chunk = ticket // (num_tiles * chunk_runs)
    first_column = chunk * per_chunk
    end = tl.minimum(first_column + per_chunk, num_columns)
    within = ticket - chunk * num_tiles * chunk_runs
    tile, run = tile_of(within, num_tiles, tl.cdiv(end - first_column, RUN), GROUP)
    first = first_column + run * RUN
    columns = tl.minimum(end - first, RUN)
    expert = tl.load(plan + LAYOUT.tile_expert + tile)
    row = tile * BLOCK_M
    if RUN == 1:
        column = first * BLOCK_N
        acc = multiply_tile(
            a_desc, b_desc, row, expert, column, DEPTH, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K
        )
        _count_tiles(pending, plan, LAYOUT)
        z_desc.store([row, column], acc.to(z_desc.dtype))
    else:
        _count_tiles(pending, plan, LAYOUT)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, columns * STEPS):
            column = (first + step // STEPS) * BLOCK_N
            k = (step % STEPS) * BLOCK_K
            acc = multiply_step(
                acc, a_desc, b_desc, row, expert, column, k, TRANSPOSED, BLOCK_N, BLOCK_K
            )
            if step % STEPS == STEPS - 1:
                z_desc.store([row, column], acc.to(z_desc.dtype))
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    return (chunk * LAYOUT.num_groups + group_of(expert, LAYOUT)) * _MAX_RUN + columns


@triton.jit
def _count_tiles(pending, plan, LAYOUT: tl.constexpr):
    """Count tiles whose stores this CTA has issued, once the stores are complete."""
    if pending > 0:
        wait_bulk_stores()
        tl.debug_barrier()
        done = plan + LAYOUT.chunk_done + pending // _MAX_RUN
        tl.atomic_add(done, pending % _MAX_RUN, sem="release", scope="gpu")


@triton.jit(do_not_specialize=["capacity", "copy_capacity", "num_exits"])
def chunked_gemm_kernel(
    z_desc, plan, a_desc, b_desc, routing, capacity, copy_capacity, num_exits, status, host_status,
    LAYOUT: tl.constexpr, TRANSPOSED: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Multiply the tiles of the plan, one chunk of columns after another; count finished tiles.

    CTAs take tiles by tickets of one counter and wait for nothing but their own stores::

        a_desc, b_desc --multiply--> z_desc, then chunk_done[chunk, group] += 1 --> combine_kernel

    A CTA counts a tile only after the main loop of its next tile: by then the TMA stores are
    complete, and it does not wait for them.

    Example: 3 tiles of rows, hidden size 1024, chunks of 512 columns, ``BLOCK_N`` 256: tickets 0-5
    are chunk 0 (two columns of three tiles each), tickets 6-11 are chunk 1.
    """
    let_second_begin()
    num_columns: tl.constexpr = (HIDDEN_SIZE + BLOCK_N - 1) // BLOCK_N
    num_chunks: tl.constexpr = (HIDDEN_SIZE + CHUNK - 1) // CHUNK
    per_chunk: tl.constexpr = CHUNK // BLOCK_N
    last_columns: tl.constexpr = num_columns - (num_chunks - 1) * per_chunk
    chunk_runs: tl.constexpr = (per_chunk + RUN - 1) // RUN
    num_runs: tl.constexpr = (num_chunks - 1) * chunk_runs + (last_columns + RUN - 1) // RUN
    usable = usable_here(plan, capacity, copy_capacity, LAYOUT)
    num_tiles = tl.load(plan + LAYOUT.summary + NUM_TILES) * usable
    total = num_tiles * num_runs
    tickets = plan + LAYOUT.tickets + TILE_TICKET
    pending = 0  # tiles that are not counted yet, see _multiply_run
    ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    while ticket < total:
        pending = _multiply_run(
            ticket, pending, a_desc, b_desc, z_desc, plan, num_tiles,
            LAYOUT, HIDDEN_SIZE, DEPTH, TRANSPOSED, CHUNK, BLOCK_N, BLOCK_K, GROUP, RUN,
        )  # fmt: skip
        ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    _count_tiles(pending, plan, LAYOUT)
    count_exit(num_exits, plan, routing, status, host_status, LAYOUT)
