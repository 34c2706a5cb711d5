# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Turn the counts of all ranks into first rows: of experts, of blocks of tokens, of lists."""

import triton
import triton.language as tl

from halley.fused.kernels.layout import MAX_CHUNKS, NUM_TICKETS, TASK_ROWS
from halley.fused.kernels.peer import failure, peer_ptr, report, signal, wait
from halley.fused.kernels.plan_words import (
    CALL,
    COUNTED,
    LAID_OUT,
    NUM_OWN_SENDS,
    NUM_SENDS,
    NUM_TILES,
    USABLE,
    base_of,
)
from halley.fused.kernels.publish import call_of, group_of, record_of
from halley.fused.kernels.status import ORDER, PLAN, ROWS, TOKENS


_TASK_ROWS = tl.constexpr(TASK_ROWS)
_NUM_TICKETS = tl.constexpr(NUM_TICKETS)
_MAX_CHUNKS = tl.constexpr(MAX_CHUNKS)
_PLAN = tl.constexpr(PLAN)
_ORDER = tl.constexpr(ORDER)
_ROWS = tl.constexpr(ROWS)
_TOKENS = tl.constexpr(TOKENS)
_STEP = tl.constexpr(1024)


@triton.jit
def _count_column(column, words, plan, epoch, rank, usable, LAYOUT: tl.constexpr):
    """Add up one column of the counts and write how many stand before each block (``base``).

    Sends are numbered from zero again behind this rank's own: those are a list of their own.
    """
    is_sends = column >= LAYOUT.num_local
    key = column - LAYOUT.num_local  # of the sends' two kinds of columns, one after the other
    total = 0
    for i in range(LAYOUT.num_ranks):
        record = record_of(words, (rank + i) % LAYOUT.num_ranks, epoch, LAYOUT)
        num_blocks = tl.cdiv(tl.load(record + LAYOUT.header) * usable, LAYOUT.block_tokens)
        counts = record + LAYOUT.counts + column * LAYOUT.max_blocks
        base = base_of(plan, i, column, LAYOUT)
        for start in range(0, num_blocks, _STEP):
            block = start + tl.arange(0, _STEP)
            count = tl.load(counts + block, mask=block < num_blocks, other=0)
            before = tl.cumsum(count, axis=0) - count
            tl.store(base + block, total + before, mask=block < num_blocks)
            total += tl.sum(count, axis=0)
        if i == 0:
            if is_sends:
                tl.store(plan + LAYOUT.own_sends + key, total)
                total = 0
    if is_sends:
        tl.store(plan + LAYOUT.other_sends + key, total)
    else:
        tl.store(plan + LAYOUT.expert_rows + column, total)


@triton.jit
def _begin_sends(counts, begins, keys, real, first, origins, plan):
    """Give the sends of each key their first place in a list; return the end, in whole tasks."""
    count = tl.load(plan + counts + keys, mask=real, other=0)
    tl.store(plan + begins + keys, first + tl.cumsum(count, axis=0) - count, mask=real)
    end = first + tl.sum(count, axis=0)
    whole = tl.cdiv(end, _TASK_ROWS) * _TASK_ROWS
    empty = end + tl.arange(0, _TASK_ROWS)
    tl.store(plan + origins + empty, -1, mask=empty < whole)
    return whole


@triton.jit
def _lay_out(
    plan, host_words, epoch, usable, wanted, max_rows,
    LAYOUT: tl.constexpr, LOCAL_PADDED: tl.constexpr,
):  # fmt: skip
    """Give each expert its first row and its first sends; write the summary; zero the counters.

    Returns the number of rows. The plan is not usable if they are more than there is room for.
    """
    local = tl.arange(0, LOCAL_PADDED)
    real = local < LAYOUT.num_local
    rows = tl.load(plan + LAYOUT.expert_rows + local, mask=real, other=0)
    tiles = tl.cdiv(rows, LAYOUT.block_m)
    first = tl.cumsum(tiles, axis=0) - tiles
    num_tiles = tl.sum(tiles, axis=0)
    tl.store(plan + LAYOUT.expert_begin + local, first * LAYOUT.block_m, mask=real)
    for group in range(LAYOUT.num_groups):
        inside = real & (group_of(local, LAYOUT) == group)
        tl.store(plan + LAYOUT.group_tiles + group, tl.sum(tl.where(inside, tiles, 0), axis=0))
    fetch_origins: tl.constexpr = LAYOUT.fetch_origin
    own = _begin_sends(LAYOUT.own_sends, LAYOUT.own_begin, local, real, 0, fetch_origins, plan)
    end = _begin_sends(
        LAYOUT.other_sends, LAYOUT.other_begin, local, real, own, fetch_origins, plan
    )
    group = tl.arange(0, LAYOUT.num_groups)
    real = group >= 0
    group += LAYOUT.num_local
    sum_origins: tl.constexpr = LAYOUT.sum_origin
    other = _begin_sends(LAYOUT.other_sends, LAYOUT.other_begin, group, real, 0, sum_origins, plan)
    _begin_sends(LAYOUT.own_sends, LAYOUT.own_begin, group, real, other, sum_origins, plan)
    num_rows = num_tiles * LAYOUT.block_m
    if (max_rows > 0) & (num_rows > max_rows):
        usable *= 0
    summary = plan + LAYOUT.summary
    tl.store(summary + USABLE, usable)
    tl.store(summary + NUM_TILES, num_tiles)
    tl.store(summary + NUM_SENDS, end)
    tl.store(summary + NUM_OWN_SENDS, own)
    tl.store(summary + CALL, epoch)
    tl.store(host_words + 1, num_rows.to(tl.int64))
    tl.store(host_words + 2, wanted.to(tl.int64))
    tl.store(host_words + 3, end.to(tl.int64))
    tl.store(plan + LAYOUT.home_sources, 0)
    tl.store(plan + LAYOUT.tickets + tl.arange(0, _NUM_TICKETS), 0)
    tl.store(plan + LAYOUT.chunk_done + tl.arange(0, _MAX_CHUNKS * LAYOUT.num_groups), 0)
    tl.store(plan + LAYOUT.chunk_sent + tl.arange(0, _MAX_CHUNKS), 0)
    return num_rows


@triton.jit
def _tell_overflow(num_rows, epoch, rank, words, words_ptrs_W, LAYOUT: tl.constexpr):
    """Tell all ranks that no sums will come, so that none waits for them."""
    for peer in range(LAYOUT.num_ranks):
        theirs = peer_ptr(words_ptrs_W, peer, words)
        tl.store(theirs + LAYOUT.overflow + rank, num_rows)
        for chunk in range(_MAX_CHUNKS):
            signal(theirs + LAYOUT.home + rank * _MAX_CHUNKS + chunk, epoch)


@triton.jit
def count_task(
    column, words, words_ptrs_W, plan, epoch, rank, max_rows, marks, status, host_words, timeout_ns,
    LAYOUT: tl.constexpr, LOCAL_PADDED: tl.constexpr,
):  # fmt: skip
    """Wait for all tables and count one column; the last to finish lays out the rest."""
    num_columns: tl.constexpr = LAYOUT.num_columns
    came = 1
    wanted = 0
    for peer in range(LAYOUT.num_ranks):
        code = failure(_PLAN, peer, 0)
        flag = words + LAYOUT.arrived + peer
        if wait(flag, epoch, timeout_ns, status, host_words, code, "sys"):
            record = record_of(words, peer, epoch, LAYOUT)
            wanted = tl.maximum(wanted, tl.load(record + LAYOUT.header + 1))
            call = tl.load(call_of(words, peer, epoch, LAYOUT))
            if call != 0:
                report(status, host_words, failure(_ORDER, peer, call))
                came = 0
        else:
            came = 0
    usable = came * (wanted == 0)
    _count_column(column, words, plan, epoch, rank, usable, LAYOUT)
    tl.debug_barrier()
    # Two sums in one word: programs that finished, and those among them that saw all tables.
    before = tl.atomic_add(marks + COUNTED, 1 + came * 65536, sem="acq_rel", scope="gpu")
    if before % 65536 == num_columns - 1:
        all_came = (before // 65536 + came == num_columns).to(tl.int32)
        num_rows = _lay_out(
            plan, host_words, epoch, usable * all_came, wanted, max_rows, LAYOUT, LOCAL_PADDED
        )
        if max_rows > 0:
            if wanted > 0:
                report(status, host_words, failure(_TOKENS, 0, wanted))
            if num_rows > max_rows:
                report(status, host_words, failure(_ROWS, rank, num_rows))
                _tell_overflow(num_rows, epoch, rank, words, words_ptrs_W, LAYOUT)
        tl.debug_barrier()
        tl.atomic_xchg(marks + LAID_OUT, epoch, sem="release", scope="gpu")
