# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Second GEMM with combine: send sums of finished columns while the GEMM computes the next ones.

In forward, the GEMM multiplies activations by the second projection, and a token's rows are summed
with its routing weights. In backward, it multiplies gradients by the transposed first projection,
and the sum has no weights; the gradients of the routing weights are sent as well.

Source: COMET (arXiv:2502.19811), sections 3.1 (columns first) and 3.2.
"""

import triton
import triton.language as tl

from halley.fused.kernels import marks
from halley.fused.kernels.layout import (
    COMBINE_EXITS,
    COMBINE_TICKET,
    NUM_COPIES,
    NUM_TILES,
    PASS,
    SECOND_GEMM_TICKET,
    SUM_TICKET,
)
from halley.fused.kernels.partial_sums import (
    count_sent,
    send_sums,
    send_weight_gradients,
    sum_task,
    sums_are_ready,
    wait_for_sums,
)
from halley.fused.kernels.peer import (
    COMBINE,
    MAX_ROWS,
    end_with_first,
    exits_last,
    failure_code,
    let_second_begin,
    poll,
    report_failure,
    usable_here,
    wait,
    wait_bulk_stores,
)
from halley.fused.kernels.routing_exchange import group_of
from halley.ops.kernels.tiles import multiply_step, multiply_tile, tile_of


_MAX_RUN = tl.constexpr(1024)  # exceeds the tiles of a ticket; see ``pending`` in _second_gemm_run


@triton.jit
def end_combine(num_exits, plan, routing, status, host_status, LAYOUT: tl.constexpr):
    """Count a CTA as ended; the last CTA of both kernels (GEMM, combine) zeroes their counters.

    The last CTA also reports ranks with too many rows, see ``_signal_overflow``.
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
    """Compute a ticket's tiles; count the previous ticket's tiles (``pending``) as finished.

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
        # Count the previous tile after the main loop: by then, its TMA stores are mostly complete.
        _count_tiles(pending, plan, LAYOUT)
        z_desc.store([row, column], acc.to(z_desc.dtype))
    else:
        # Count earlier tiles before the loop: the count waits for all stores issued so far.
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
    """Wait until the pending tiles are stored; add the number of these tiles to ``chunk_done``.

    ``pending`` is as in ``_second_gemm_run``; 0 for no tiles.
    """
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
    """Compute the second GEMM, one column chunk after another; count finished tiles of its output.

    CTAs take tiles by tickets of one counter. They wait for nothing but their own stores::

        chunked_gemm_kernel: load rows and weights, multiply, store z (TMA)
                             chunk_done[c, g] += number of tiles (release)
                                  |
        combine_kernel: waits for chunk_done[c, g]

    A CTA takes ``RUN`` adjacent tiles at a time. It counts them one ticket later, when their
    stores are complete: with ``RUN`` 1 after the next main loop, else before it.

    Example: 3 row tiles, hidden size 1024, chunks of 512 columns, ``BLOCK_N`` 256, ``RUN`` 1.
    Tickets 0-5 are chunk 0 (two column tiles of three row tiles), tickets 6-11 are chunk 1.
    """
    let_second_begin()
    cta_record, num_marks = marks.begin(status, marks.SECOND_GEMM_KERNEL, TRANSPOSED, LAYOUT)
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
    pending = 0  # counter and number of tiles not counted yet, see _second_gemm_run
    ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    while ticket < total:
        num_marks = marks.add(cta_record, num_marks, marks.MULTIPLY, LAYOUT)
        pending = _second_gemm_run(
            ticket, pending, a_desc, b_desc, z_desc, plan, num_tiles,
            LAYOUT, HIDDEN_SIZE, DEPTH, TRANSPOSED, CHUNK, BLOCK_N, BLOCK_K, GROUP, RUN,
        )  # fmt: skip
        ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    _count_tiles(pending, plan, LAYOUT)
    num_marks = marks.add(cta_record, num_marks, marks.OTHER, LAYOUT)
    end_combine(num_exits, plan, routing, status, host_status, LAYOUT)
    marks.end(cta_record, num_marks, LAYOUT)


@triton.jit
def _task_at(index, num_tasks, plan, LAYOUT: tl.constexpr):
    """Return the number of the combine task that comes at position ``index`` in a column chunk.

    Tasks for own tokens are spread evenly among the others, so that the link is always busy.
    Example: tasks 0 to 3 for other ranks, own tasks 4 and 5: the order is 0, 1, 4, 2, 3, 5.
    """
    num_others = tl.load(plan + LAYOUT.own_begin + LAYOUT.num_local) // LAYOUT.task_rows
    num_own = num_tasks - num_others
    own = index.to(tl.int64) * num_own // num_tasks
    is_own = (index + 1).to(tl.int64) * num_own // num_tasks > own
    own = own.to(tl.int32)
    return tl.where(is_own, num_others + own, index - own)


@triton.jit
def _groups_of_task(task, plan, LAYOUT: tl.constexpr):
    """Return how many expert groups, from group 0, the GEMM must finish before a combine task."""
    group = tl.arange(0, LAYOUT.num_groups)
    first = task * LAYOUT.task_rows
    is_own = first >= tl.load(plan + LAYOUT.own_begin + LAYOUT.num_local)
    begins = tl.where(is_own, LAYOUT.own_begin, LAYOUT.other_begin)
    counts = tl.where(is_own, LAYOUT.own_copies, LAYOUT.other_copies)
    begin = tl.load(plan + begins + LAYOUT.num_local + group)
    count = tl.load(plan + counts + LAYOUT.num_local + group)
    has = (count > 0) & (begin < first + LAYOUT.task_rows)
    return tl.max(tl.where(has, group + 1, 0), axis=0)


@triton.jit
def _next_counter(num_done, num_columns, plan, LAYOUT: tl.constexpr):
    """Return the address and the final value of element ``num_done`` of ``chunk_done``."""
    need = tl.load(plan + LAYOUT.group_tiles + num_done % LAYOUT.num_groups) * num_columns
    return plan + LAYOUT.chunk_done + num_done, need


@triton.jit
def _count_done(num_done, chunk, num_wanted, num_columns, plan, LAYOUT: tl.constexpr):
    """Return the first unfinished (chunk, expert group) pair, polling only up to ``num_wanted``."""
    num_done = tl.maximum(num_done, chunk * LAYOUT.num_groups)
    more = num_done < num_wanted
    while more:
        counter, need = _next_counter(num_done, num_columns, plan, LAYOUT)
        more = poll(counter, "gpu") >= need
        num_done += more.to(tl.int32)
        more &= num_done < num_wanted
    return num_done


@triton.jit(do_not_specialize=[
    "num_tokens", "combine_tokens", "capacity", "copy_capacity", "rank", "num_exits", "timeout_ns",
])  # fmt: skip
def combine_kernel(
    y_TD, z_RD, plan, combine_buffer_WTD, combine_ptrs_W, routing, routing_ptrs_W,
    dweight_RJ, idx_TK, dweights_TK, dweight_ptrs_W,
    num_tokens, combine_tokens, capacity, copy_capacity, rank, num_exits,
    status, host_status, timeout_ns: tl.int64,
    LAYOUT: tl.constexpr, NUM_SUMMANDS: tl.constexpr, HIDDEN_SIZE: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, SUM_ROWS: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Send partial sums, in backward also routing-weight gradients; add the sums that arrive.

    This rank's own tokens take the same path as those of other ranks. CTAs take two kinds of tasks,
    each by tickets of its own counter. Pass n of rank r::

        combine task   wait for chunk_done[c, g] of this rank's GEMM, for all groups g of its tokens
                       store partial sums in the source ranks' combine buffers
                       last task of chunk c: sums_ready[r, c] = n on every rank
        sum task       wait for sums_ready[s, c] >= n of all ranks s that contribute to this rank
                       add the sums of the ranks in order, store y_TD

    If the tiles of a combine task are not finished, the CTA does a sum task instead, provided that
    its sums have arrived. It waits for partial sums only when no combine task is left.

    There is no deadlock. Combine tasks wait for the GEMM, which waits for nothing and is launched
    first. This kernel begins only when all CTAs of the GEMM run. Sum tasks wait for combine tasks
    of ranks that follow the same rule.

    Example: 100 tokens, ``SUM_ROWS`` 8, hidden size 1024, chunks of 512 columns: 13 sum tasks for
    chunk 0, then 13 for chunk 1. A combine list of 192 entries has 3 combine tasks for each chunk
    (64 entries each).

    ``NUM_SUMMANDS`` is the number of columns of ``dweight_RJ`` in backward, and 0 in forward.
    ``COLUMNS`` is the width of a tile of the GEMM.
    """
    # ``let_second_begin`` has no effect here: no launch overlaps this one (``shape_launches``). It
    # can be deleted, but this changes the compiled kernel, so time the kernel again afterwards.
    let_second_begin()
    BACKWARD: tl.constexpr = NUM_SUMMANDS > 0
    cta_record, num_marks = marks.begin(status, marks.COMBINE_KERNEL, BACKWARD, LAYOUT)
    all_columns: tl.constexpr = (HIDDEN_SIZE + COLUMNS - 1) // COLUMNS
    num_chunks: tl.constexpr = (HIDDEN_SIZE + CHUNK - 1) // CHUNK
    chunk_columns: tl.constexpr = CHUNK // COLUMNS
    epoch = tl.load(plan + LAYOUT.summary + PASS)
    usable = usable_here(plan, capacity, copy_capacity, LAYOUT)
    chunk_tasks = tl.load(plan + LAYOUT.summary + NUM_COPIES) // LAYOUT.task_rows * usable
    num_tasks = chunk_tasks * num_chunks
    chunk_sum_tasks = tl.cdiv(num_tokens, SUM_ROWS)
    num_sum_tasks = chunk_sum_tasks * num_chunks * usable
    tickets = plan + LAYOUT.tickets
    combine_ticket = tl.atomic_add(tickets + COMBINE_TICKET, 1, sem="relaxed", scope="gpu")
    sum_ticket = tl.atomic_add(tickets + SUM_TICKET, 1, sem="relaxed", scope="gpu")
    arrived_chunk = -1  # the last chunk of which this CTA has seen all partial sums arrive
    num_done = 0  # (chunk, expert group) pairs that this CTA has seen finished, in order
    while combine_ticket < num_tasks:
        num_marks = marks.add(cta_record, num_marks, marks.WAIT, LAYOUT)
        chunk = combine_ticket // chunk_tasks
        num_columns = tl.minimum(all_columns - chunk * chunk_columns, chunk_columns)
        task = _task_at(combine_ticket - chunk * chunk_tasks, chunk_tasks, plan, LAYOUT)
        num_wanted = chunk * LAYOUT.num_groups + _groups_of_task(task, plan, LAYOUT)
        num_done = _count_done(num_done, chunk, num_wanted, num_columns, plan, LAYOUT)
        can_sum = False
        if num_done < num_wanted:
            can_sum = sums_are_ready(
                sum_ticket, num_sum_tasks, chunk_sum_tasks, arrived_chunk, plan, routing, epoch,
                LAYOUT,
            )  # fmt: skip
        if num_done >= num_wanted:
            num_marks = marks.add(cta_record, num_marks, marks.SEND, LAYOUT)
            send_sums(
                task, chunk, z_RD, plan, combine_ptrs_W, combine_tokens, rank,
                LAYOUT, HIDDEN_SIZE, ROWS, CHUNK, STAGES, not BACKWARD,
            )  # fmt: skip
            if BACKWARD:
                if chunk == 0:
                    send_weight_gradients(
                        task, dweight_RJ, plan, dweight_ptrs_W, combine_tokens, rank,
                        LAYOUT, NUM_SUMMANDS, ROWS,
                    )  # fmt: skip
            count_sent(chunk, chunk_tasks, plan, routing, routing_ptrs_W, rank, epoch, LAYOUT)
            combine_ticket = tl.atomic_add(tickets + COMBINE_TICKET, 1, sem="relaxed", scope="gpu")
        elif can_sum:
            num_marks = marks.add(cta_record, num_marks, marks.ADD, LAYOUT)
            arrived_chunk = sum_ticket // chunk_sum_tasks
            sum_task(
                sum_ticket % chunk_sum_tasks, arrived_chunk, y_TD, combine_buffer_WTD,
                combine_tokens, plan, num_tokens, idx_TK, dweights_TK, dweight_ptrs_W, rank,
                LAYOUT, BACKWARD, HIDDEN_SIZE, SUM_ROWS, CHUNK,
            )  # fmt: skip
            sum_ticket = tl.atomic_add(tickets + SUM_TICKET, 1, sem="relaxed", scope="gpu")
        else:
            code = failure_code(COMBINE, 0, chunk)
            counter, need = _next_counter(num_done, num_columns, plan, LAYOUT)
            if not wait(counter, need, timeout_ns, status, host_status, code, "gpu"):
                combine_ticket = num_tasks  # a wait failed, so this CTA sends no more sums
    if sum_ticket >= num_sum_tasks:
        sum_ticket = tl.atomic_add(tickets + SUM_TICKET, 1, sem="relaxed", scope="gpu")
    while sum_ticket < num_sum_tasks:
        num_marks = marks.add(cta_record, num_marks, marks.WAIT, LAYOUT)
        chunk = sum_ticket // chunk_sum_tasks
        if chunk != arrived_chunk:
            arrived_chunk = chunk
            if not wait_for_sums(
                chunk, plan, routing, epoch, rank, status, host_status, timeout_ns, LAYOUT
            ):
                num_sum_tasks = 0  # a wait failed, so this CTA ends
        if num_sum_tasks > 0:
            num_marks = marks.add(cta_record, num_marks, marks.ADD, LAYOUT)
            sum_task(
                sum_ticket % chunk_sum_tasks, chunk, y_TD, combine_buffer_WTD, combine_tokens,
                plan, num_tokens, idx_TK, dweights_TK, dweight_ptrs_W, rank,
                LAYOUT, BACKWARD, HIDDEN_SIZE, SUM_ROWS, CHUNK,
            )  # fmt: skip
        sum_ticket = tl.atomic_add(tickets + SUM_TICKET, 1, sem="relaxed", scope="gpu")
    num_marks = marks.add(cta_record, num_marks, marks.OTHER, LAYOUT)
    end_combine(num_exits, plan, routing, status, host_status, LAYOUT)
    end_with_first()
    marks.end(cta_record, num_marks, LAYOUT)
