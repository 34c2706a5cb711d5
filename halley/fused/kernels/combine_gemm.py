# Triton kernels: pyright reads them as plain Python and reports errors that are none.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Second GEMM, one column chunk after another; counts finished tiles for ``combine_kernel``.

All tiles of a chunk are computed before those of the next chunk, so that the combine of a chunk
runs while the GEMM computes the next one. Within a chunk, tiles are in the order of experts, and
finished tiles are counted by group of experts. The combine of a token starts when the groups of its
experts are done.

Source: COMET (arXiv:2502.19811), section 3.1: decompose the consumed tensor by columns.
"""

import triton
import triton.language as tl

from halley.fused.kernels.dispatch_plan import usable_here
from halley.fused.kernels.layout import (
    COMBINE_EXITS,
    COMBINE_TICKET,
    NUM_TILES,
    SECOND_GEMM_TICKET,
    SUM_TICKET,
)
from halley.fused.kernels.peer import (
    MAX_ROWS,
    exits_last,
    failure_code,
    report_failure,
    wait_bulk_stores,
)
from halley.fused.kernels.routing_exchange import group_of
from halley.fused.launch_pair import let_second_begin
from halley.ops.kernels.tiles import multiply_step, multiply_tile, tile_of


_MAX_RUN = tl.constexpr(1024)  # above the tiles of a run: see _second_gemm_run


@triton.jit
def end_combine(num_exits, plan, routing, status, host_status, LAYOUT: tl.constexpr):
    """Count a CTA that ends; the last one of second GEMM and combine zeroes their counters.

    The last one also reports ranks with more rows than ``max_rows``. Such a rank sets its
    ``sums_ready`` flags without sending sums, see ``count_task``.
    """
    tickets = plan + LAYOUT.tickets
    if exits_last(tickets + COMBINE_EXITS, num_exits):
        tl.store(tickets + SECOND_GEMM_TICKET, 0)
        tl.store(tickets + COMBINE_TICKET, 0)
        tl.store(tickets + SUM_TICKET, 0)
        tl.store(tickets + COMBINE_EXITS, 0)
        num_counts: tl.constexpr = LAYOUT.max_chunks * LAYOUT.num_groups
        tl.store(plan + LAYOUT.chunk_done + tl.arange(0, num_counts), 0)
        tl.store(plan + LAYOUT.chunk_sent + tl.arange(0, LAYOUT.max_chunks), 0)
        for peer in range(LAYOUT.num_ranks):
            num_rows = tl.load(routing + LAYOUT.overflow_rows + peer)
            if num_rows > 0:
                report_failure(status, host_status, failure_code(MAX_ROWS, peer, num_rows))


@triton.jit
def _second_gemm_run(
    ticket, pending, a_desc, b_desc, z_desc, plan, num_tiles,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, DEPTH: tl.constexpr, TRANSPOSED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Compute the tiles of a ticket, and count the finished tiles of the previous ticket.

    A CTA may count tiles only when their TMA stores are complete. So it counts them one ticket
    later, and does not wait for the stores of its last tile.

    ``pending`` describes the tiles of the previous ticket in one word: ``_MAX_RUN`` times the index
    of their counter in ``chunk_done``, plus the number of tiles. The function returns the same word
    for this ticket. Example: 2 tiles of chunk 1 and group 3, 8 groups: 1024 * 11 + 2.
    """
    BLOCK_M: tl.constexpr = LAYOUT.block_m
    STEPS: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    num_columns: tl.constexpr = (HIDDEN_SIZE + BLOCK_N - 1) // BLOCK_N
    per_chunk: tl.constexpr = CHUNK // BLOCK_N
    chunk_runs: tl.constexpr = (per_chunk + RUN - 1) // RUN
    chunk = ticket // (num_tiles * chunk_runs)
    first_column = chunk * per_chunk
    end = tl.minimum(first_column + per_chunk, num_columns)
    ticket_in_chunk = ticket - chunk * num_tiles * chunk_runs
    tile, run = tile_of(ticket_in_chunk, num_tiles, tl.cdiv(end - first_column, RUN), GROUP)
    first = first_column + run * RUN
    columns = tl.minimum(end - first, RUN)
    expert = tl.load(plan + LAYOUT.tile_expert + tile)
    row = tile * BLOCK_M
    if RUN == 1:
        column = first * BLOCK_N
        acc = multiply_tile(
            a_desc, b_desc, row, expert, column, DEPTH, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K
        )
        # After the main loop, when the stores of the previous tile are complete.
        _count_tiles(pending, plan, LAYOUT)
        z_desc.store([row, column], acc.to(z_desc.dtype))
    else:
        # Before the loop: the stores in the loop would have to be waited for as well.
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
    """Wait until the stores of tiles are complete, then count the tiles; see _second_gemm_run."""
    if pending > 0:
        wait_bulk_stores()
        tl.debug_barrier()  # the stores of all threads are complete before one thread releases
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

    CTAs take tiles by tickets of one counter. They wait for nothing but their own stores::

        chunked_gemm_kernel: load rows and weights, multiply, store z (TMA)
                             chunk_done[c, g] += number of tiles (release)
                                  |
        combine_kernel: waits for chunk_done[c, g]

    A CTA takes ``RUN`` neighbouring tiles at a time. It counts them one ticket later, when their
    stores are complete: with ``RUN`` 1 after the next main loop, else before it.

    Example: 3 row tiles, hidden size 1024, chunks of 512 columns, ``BLOCK_N`` 256, ``RUN`` 1.
    Tickets 0-5 are chunk 0 (two column tiles of three row tiles), tickets 6-11 are chunk 1.
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
    tickets = plan + LAYOUT.tickets + SECOND_GEMM_TICKET
    pending = 0  # tiles that are not counted yet, see _second_gemm_run
    ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    while ticket < total:
        pending = _second_gemm_run(
            ticket, pending, a_desc, b_desc, z_desc, plan, num_tiles,
            LAYOUT, HIDDEN_SIZE, DEPTH, TRANSPOSED, CHUNK, BLOCK_N, BLOCK_K, GROUP, RUN,
        )  # fmt: skip
        ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    _count_tiles(pending, plan, LAYOUT)
    end_combine(num_exits, plan, routing, status, host_status, LAYOUT)
