# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""The tiles of gemm_combine, chunk by chunk of columns, and which of them sums wait for.

Within a chunk tiles are counted by groups of experts. Those of a group are begun after those of the
groups before it, and sends are combined in the order of their last group: while the tiles of the
next are made, and not only while those of the next chunk are.
"""

import triton
import triton.language as tl

from halley.fused.kernels.layout import TASK_ROWS
from halley.fused.kernels.peer import poll, wait_bulk_stores
from halley.fused.kernels.publish import group_of
from halley.ops.kernels.tiles import multiply_step, multiply_tile, tile_of


_MAX_RUN = tl.constexpr(1024)  # more tiles than a run has: counter and tiles fit one word
_TASK_ROWS = tl.constexpr(TASK_ROWS)


@triton.jit
def multiply_tiles(
    ticket, pending, a_desc, b_desc, z_desc, plan, num_tiles,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, DEPTH: tl.constexpr, TURNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Make the tiles of a ticket, side by side, and count those of the ticket before.

    Returns what the caller must have counted in turn (``count_tiles``).
    """
    BLOCK_M: tl.constexpr = LAYOUT.block_m
    STEPS: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    num_columns: tl.constexpr = (HIDDEN_SIZE + BLOCK_N - 1) // BLOCK_N
    per_chunk: tl.constexpr = CHUNK // BLOCK_N
    runs_a_chunk: tl.constexpr = (per_chunk + RUN - 1) // RUN
    chunk = ticket // (num_tiles * runs_a_chunk)
    first_column = chunk * per_chunk
    end = tl.minimum(first_column + per_chunk, num_columns)
    within = ticket - chunk * num_tiles * runs_a_chunk
    tile, run = tile_of(within, num_tiles, tl.cdiv(end - first_column, RUN), GROUP)
    first = first_column + run * RUN
    columns = tl.minimum(end - first, RUN)
    expert = tl.load(plan + LAYOUT.tile_expert + tile)
    row = tile * BLOCK_M
    if RUN == 1:
        column = first * BLOCK_N
        acc = multiply_tile(
            a_desc, b_desc, row, expert, column, DEPTH, TURNED, BLOCK_M, BLOCK_N, BLOCK_K
        )
        count_tiles(pending, plan, LAYOUT)
        z_desc.store([row, column], acc.to(z_desc.dtype))
    else:
        count_tiles(pending, plan, LAYOUT)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, columns * STEPS):
            column = (first + step // STEPS) * BLOCK_N
            k = (step % STEPS) * BLOCK_K
            acc = multiply_step(
                acc, a_desc, b_desc, row, expert, column, k, TURNED, BLOCK_N, BLOCK_K
            )
            if step % STEPS == STEPS - 1:
                z_desc.store([row, column], acc.to(z_desc.dtype))
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    return (chunk * LAYOUT.num_groups + group_of(expert, LAYOUT)) * _MAX_RUN + columns


@triton.jit
def count_tiles(pending, plan, LAYOUT: tl.constexpr):
    """Count the tiles that this program stored last for chunk and group, if there are any."""
    if pending > 0:
        wait_bulk_stores()
        tl.debug_barrier()
        done = plan + LAYOUT.chunk_done + pending // _MAX_RUN
        tl.atomic_add(done, pending % _MAX_RUN, sem="release", scope="gpu")


@triton.jit
def nth_task(within, num_tasks, plan, LAYOUT: tl.constexpr):
    """Return the task of a chunk that is taken as the ``within``-th.

    This rank's own are spread evenly among those of others, so that the link always has work.
    """
    num_others = tl.load(plan + LAYOUT.own_begin + LAYOUT.num_local) // _TASK_ROWS
    num_own = num_tasks - num_others
    own = within.to(tl.int64) * num_own // num_tasks
    is_own = (within + 1).to(tl.int64) * num_own // num_tasks > own
    own = own.to(tl.int32)
    return tl.where(is_own, num_others + own, within - own)


@triton.jit
def groups_of_task(task, plan, LAYOUT: tl.constexpr):
    """Return how many groups of experts, from the first, have rows of the task's sends."""
    group = tl.arange(0, LAYOUT.num_groups)
    first = task * _TASK_ROWS
    is_own = first >= tl.load(plan + LAYOUT.own_begin + LAYOUT.num_local)
    begins = tl.where(is_own, LAYOUT.own_begin, LAYOUT.other_begin)
    counts = tl.where(is_own, LAYOUT.own_sends, LAYOUT.other_sends)
    begin = tl.load(plan + begins + LAYOUT.num_local + group)
    count = tl.load(plan + counts + LAYOUT.num_local + group)
    has = (count > 0) & (begin < first + _TASK_ROWS)
    return tl.max(tl.where(has, group + 1, 0), axis=0)


@triton.jit
def counter_of(ready, columns, plan, LAYOUT: tl.constexpr):
    """Return the counter of the group after the first ``ready`` of all chunks, and its tiles."""
    need = tl.load(plan + LAYOUT.group_tiles + ready % LAYOUT.num_groups) * columns
    return plan + LAYOUT.chunk_done + ready, need


@triton.jit
def count_ready(ready, chunk, wanted, columns, plan, LAYOUT: tl.constexpr):
    """Return how many groups of all chunks are whole, at most ``wanted``.

    ``ready`` are known to be, and so are those of the chunks before.
    """
    ready = tl.maximum(ready, chunk * LAYOUT.num_groups)
    more = ready < wanted
    while more:
        done, need = counter_of(ready, columns, plan, LAYOUT)
        more = poll(done, "gpu") >= need
        ready += more.to(tl.int32)
        more &= ready < wanted
    return ready
