# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Begin a pass of a fused layer: fill the send buffer, and make or reuse a dispatch plan.

A forward pass makes the plan of this rank on the device. Backward and recompute use the plan of
their forward: ranks exchange only the number of the call whose plan they use. Different numbers
mean that they run layers in different orders.
"""

import torch
import triton
import triton.language as tl

from halley.fused.kernels import marks
from halley.fused.kernels.layout import (
    CALL,
    COUNTED,
    IS_USABLE,
    NUM_COPIES,
    PASS,
    PLAN_EXITS,
    PLAN_TICKET,
    PUBLISHED,
    ROWS_COPIED,
    KernelContext,
)
from halley.fused.kernels.peer import (
    ORDER,
    ROWS,
    copy_rows,
    count_pass,
    failure_code,
    next_epoch,
    peer_ptr,
    report_failure,
    signal_all,
    wait,
)
from halley.fused.kernels.routing_exchange import (
    block_bases,
    call_in_use,
    count_task,
    has_overflowed,
    last_group,
    load_packed,
    local_experts,
    place_tiles,
    publish_task,
    record_of,
    smallest_local,
    store_contributors,
    wait_for_plan,
)
from halley.ops.kernels.launch import Launcher, aligned


COPY_ROWS = 16  # rows that a CTA copies to the send buffer at once
_CTAS_PER_SM = 2  # of ``plan_kernel``, whose tasks are short and mostly wait for memory


@triton.jit
def _places(i, block, key, end_key, before, column, plan, LAYOUT: tl.constexpr):
    """Return the index of each token copy of a block in the fetch list or in the combine list.

    The block is from the i-th source rank in ring order; i = 0 is this rank. ``key`` sorts a list:
    it is a token's smallest local expert in the fetch list (``column`` 0) and the group of its
    largest one in the combine list (``column`` L). A token with ``end_key`` has no copy here.
    ``before`` counts the copies with the same key that precede a token in its block.
    Example: key 1 begins at index 70, earlier blocks have 3 copies with key 1, and 2 precede the
    token in its block. Its copy has index 70 + 3 + 2 = 75.
    """
    real = key < end_key
    base = block_bases(plan, i, LAYOUT.num_local + column, LAYOUT) + key * LAYOUT.max_blocks + block
    begin = plan + tl.where(i == 0, LAYOUT.own_begin, LAYOUT.other_begin) + column + key
    return tl.load(begin, mask=real, other=0) + tl.load(base, mask=real, other=0) + before


@triton.jit
def _place_copies(i, block, expert_TK, record, plan, rank, LAYOUT: tl.constexpr):
    STEP: tl.constexpr = min(32, LAYOUT.block_tokens)
    smallest = smallest_local(expert_TK, rank, LAYOUT)
    group = last_group(expert_TK, rank, LAYOUT)
    within = tl.arange(0, LAYOUT.block_tokens)
    same_smallest = tl.zeros_like(within)
    same_group = tl.zeros_like(within)
    for start in range(0, LAYOUT.block_tokens, STEP):
        other = start + tl.arange(0, STEP)
        packed = load_packed(record, block * LAYOUT.block_tokens + other, LAYOUT)
        expert = packed >> LAYOUT.order_bits
        earlier = other[None, :] < within[:, None]
        same = smallest_local(expert, rank, LAYOUT)[None, :] == smallest[:, None]
        same_smallest += tl.sum((same & earlier).to(tl.int32), axis=1)
        same = last_group(expert, rank, LAYOUT)[None, :] == group[:, None]
        same_group += tl.sum((same & earlier).to(tl.int32), axis=1)
    num_local: tl.constexpr = LAYOUT.num_local
    fetch = _places(i, block, smallest, num_local, same_smallest, 0, plan, LAYOUT)
    combine = _places(i, block, group, LAYOUT.num_groups, same_group, num_local, plan, LAYOUT)
    return fetch, combine


@triton.jit
def _place_block(i, block, routing, plan, epoch, rank, LAYOUT: tl.constexpr):
    """Store a block's fetch and combine list entries; for own tokens also which ranks send sums."""
    source = (rank + i) % LAYOUT.num_ranks
    record = record_of(routing, source, epoch, LAYOUT)
    token = block * LAYOUT.block_tokens + tl.arange(0, LAYOUT.block_tokens)
    k = tl.arange(0, LAYOUT.padded_k)
    packed = load_packed(record, token, LAYOUT)
    expert = packed >> LAYOUT.order_bits  # an empty slot stays -1
    local = local_experts(expert, rank, LAYOUT)
    mine = local < LAYOUT.num_local
    weights = (record + LAYOUT.weights).to(tl.pointer_type(tl.float32))
    at = token[:, None] * LAYOUT.top_k + k[None, :]
    weight = tl.load(weights + at, mask=mine, other=0.0)

    base = block_bases(plan, i, 0, LAYOUT) + local * LAYOUT.max_blocks + block
    row = tl.load(plan + LAYOUT.expert_begin + local, mask=mine, other=0)
    row += tl.load(base, mask=mine, other=0)
    row = tl.where(mine, row + (packed & ((1 << LAYOUT.order_bits) - 1)), -1)

    # A list entry has the token's rows on this rank, in order of the token's choices, then -1.
    here = mine.to(tl.int32)
    count = tl.sum(here, axis=1)
    place = tl.cumsum(here, axis=1) - here
    empty = count[:, None] + tl.cumsum(1 - here, axis=1) - (1 - here)
    place = tl.where(mine, place, empty)
    stored = (count > 0)[:, None] & (place < LAYOUT.top_k)
    origin = source * LAYOUT.max_tokens + token
    fetch, combine = _place_copies(i, block, expert, record, plan, rank, LAYOUT)
    tl.store(plan + LAYOUT.fetch_origin + fetch, origin, mask=count > 0)
    tl.store(plan + LAYOUT.combine_origin + combine, origin, mask=count > 0)
    line = fetch[:, None] * LAYOUT.top_k + place
    tl.store(plan + LAYOUT.fetch_rows + line, row, mask=stored)
    line = combine[:, None] * LAYOUT.top_k + place
    tl.store(plan + LAYOUT.combine_rows + line, row, mask=stored)
    combine_weight = (plan + LAYOUT.combine_weight).to(tl.pointer_type(tl.float32))
    tl.store(combine_weight + line, weight, mask=stored)
    if i == 0:
        store_contributors(expert, token, record, plan, LAYOUT)


@triton.jit
def _place_task(task, routing, plan, epoch, rank, LAYOUT: tl.constexpr):
    if tl.load(plan + LAYOUT.summary + IS_USABLE) != 0:
        if task < LAYOUT.num_ranks * LAYOUT.max_blocks:
            i = task // LAYOUT.max_blocks
            block = task % LAYOUT.max_blocks
            record = record_of(routing, (rank + i) % LAYOUT.num_ranks, epoch, LAYOUT)
            if block * LAYOUT.block_tokens < tl.load(record + LAYOUT.header):
                _place_block(i, block, routing, plan, epoch, rank, LAYOUT)
        else:
            place_tiles(task - LAYOUT.num_ranks * LAYOUT.max_blocks, plan, LAYOUT)


@triton.jit
def _wait_for_rows(routing, plan, epoch, status, host_status, timeout_ns, LAYOUT: tl.constexpr):
    """Wait until all ranks have filled their send buffers; mark the plan unusable if that fails."""
    for peer in range(LAYOUT.num_ranks):
        code = failure_code(ROWS, peer, 0)
        flag = routing + LAYOUT.rows_ready + peer
        if not wait(flag, epoch, timeout_ns, status, host_status, code, "sys"):
            tl.store(plan + LAYOUT.summary + IS_USABLE, 0)


@triton.jit(do_not_specialize=[
    "num_tokens", "excess_tokens", "rank", "num_tasks", "send_tokens", "max_rows", "timeout_ns",
])  # fmt: skip
def plan_kernel(
    x_TD, idx_TK, weights_TK, num_tokens, excess_tokens, rank, num_tasks, send_buffer_HTD,
    send_tokens, routing, routing_ptrs_W, plan, max_rows, counters, status, host_status,
    timeout_ns: tl.int64,
    LAYOUT: tl.constexpr, LOCAL_PADDED: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Fill the send buffer, exchange routing with all ranks, and make this rank's dispatch plan.

    CTAs take four kinds of tasks, in this order, by tickets of one counter. Pass n of rank r::

        publish   write routing to all ranks   last task: published[r] = n on every rank
        count     wait for published[s] >= n of all ranks s
                                               last task: counter PLANNED = n on this rank
        copy      x_TD -> send buffer n % 2    last task: rows_ready[r] = n on every rank
        place     wait for PLANNED >= n, store lists and tiles

    The CTA that ends last waits for ``rows_ready[s] >= n`` of all ranks s. So when the launch has
    ended, the rows of all ranks can be fetched. With ``max_rows``, the last copy task waits for
    PLANNED >= n before it sets ``rows_ready``, see ``_signal_overflow``.
    There is no deadlock. Publish tasks wait for nothing, and count tasks for publish tasks of all
    ranks. Other tasks wait for count tasks, which have lower tickets and run already.

    Example: 40 tokens, 16 tokens for each task, 10 columns of counts. Tickets 0-2 publish, 3-12
    count, 13-15 copy, and the others place.
    """
    cta_record, num_marks = marks.begin(status, marks.PLAN_KERNEL, False, LAYOUT)
    first_count = num_tasks
    first_copy = first_count + LAYOUT.num_columns
    first_place = first_copy + num_tasks
    end = first_place + LAYOUT.num_ranks * LAYOUT.max_blocks + LAYOUT.num_local
    healthy = True
    may_publish = not has_overflowed(status)
    epoch = next_epoch(counters, status, host_status)
    send_buffer_TD = send_buffer_HTD + (epoch % 2).to(tl.int64) * send_tokens * HIDDEN_SIZE
    task = tl.atomic_add(counters + PLAN_TICKET, 1, sem="relaxed", scope="gpu")
    while task < end:
        num_marks = marks.add(cta_record, num_marks, marks.PUBLISH, LAYOUT)
        if task < first_count:
            if may_publish:
                publish_task(
                    task, idx_TK, weights_TK, num_tokens, excess_tokens, epoch, rank,
                    routing, routing_ptrs_W, LAYOUT,
                )  # fmt: skip
            tl.debug_barrier()
            before = tl.atomic_add(counters + PUBLISHED, 1, sem="acq_rel", scope="sys")
            if before == num_tasks - 1:
                signal_all(LAYOUT.published, epoch, rank, routing, routing_ptrs_W, LAYOUT)
        elif task < first_copy:
            num_marks = count_task(
                task - first_count, cta_record, num_marks, routing, routing_ptrs_W, plan, epoch,
                rank, max_rows, counters, status, host_status, timeout_ns, LAYOUT, LOCAL_PADDED,
            )  # fmt: skip
        elif task < first_place:
            row = (task - first_copy) * ROWS
            copy_rows(row, x_TD, send_buffer_TD, num_tokens, HIDDEN_SIZE, ROWS, COLUMNS)
            tl.debug_barrier()
            before = tl.atomic_add(counters + ROWS_COPIED, 1, sem="acq_rel", scope="sys")
            if before == num_tasks - 1:
                if max_rows > 0:
                    wait_for_plan(epoch, rank, counters, status, host_status)
                signal_all(LAYOUT.rows_ready, epoch, rank, routing, routing_ptrs_W, LAYOUT)
        elif healthy:
            num_marks = marks.add(cta_record, num_marks, marks.WAIT, LAYOUT)
            healthy = wait_for_plan(epoch, rank, counters, status, host_status)
            num_marks = marks.add(cta_record, num_marks, marks.PLAN, LAYOUT)
            if healthy:
                _place_task(task - first_place, routing, plan, epoch, rank, LAYOUT)
        task = tl.atomic_add(counters + PLAN_TICKET, 1, sem="relaxed", scope="gpu")
    num_marks = marks.add(cta_record, num_marks, marks.OTHER, LAYOUT)
    before = tl.atomic_add(counters + PLAN_EXITS, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.store(counters + PLAN_TICKET, 0)
        tl.store(counters + PUBLISHED, 0)
        tl.store(counters + COUNTED, 0)
        tl.store(counters + ROWS_COPIED, 0)
        tl.store(counters + PLAN_EXITS, 0)
        count_pass(counters, epoch)
        num_marks = marks.add(cta_record, num_marks, marks.WAIT, LAYOUT)
        _wait_for_rows(routing, plan, epoch, status, host_status, timeout_ns, LAYOUT)
    marks.end(cta_record, num_marks, LAYOUT)


@triton.jit
def _spread_weights(plan, weight_R, LAYOUT: tl.constexpr):
    num_copies = tl.load(plan + LAYOUT.summary + NUM_COPIES)
    num_copies *= tl.load(plan + LAYOUT.summary + IS_USABLE)
    weights = (plan + LAYOUT.combine_weight).to(tl.pointer_type(tl.float32))
    k = tl.arange(0, LAYOUT.padded_k)
    step = tl.num_programs(0) * LAYOUT.task_rows
    for first in range(tl.program_id(0) * LAYOUT.task_rows, num_copies, step):
        copy = first + tl.arange(0, LAYOUT.task_rows)
        real = tl.load(plan + LAYOUT.combine_origin + copy) >= 0
        line = copy[:, None] * LAYOUT.top_k + k[None, :]
        listed = real[:, None] & (k < LAYOUT.top_k)[None, :]
        row = tl.load(plan + LAYOUT.combine_rows + line, mask=listed, other=-1)
        weight = tl.load(weights + line, mask=row >= 0, other=0.0)
        tl.store(weight_R + row, weight, mask=row >= 0)


@triton.jit
def _wait_and_compare_calls(
    routing, plan, call, epoch, status, host_status, timeout_ns, LAYOUT: tl.constexpr
):
    """Wait for all ranks' rows; mark the plan unusable if a rank is late or uses another plan."""
    complete = True
    for peer in range(LAYOUT.num_ranks):
        code = failure_code(ROWS, peer, call)
        flag = routing + LAYOUT.published + peer
        if wait(flag, epoch, timeout_ns, status, host_status, code, "sys"):
            theirs = tl.load(call_in_use(routing, peer, epoch, LAYOUT))
            if theirs != call:
                report_failure(status, host_status, failure_code(ORDER, peer, theirs))
                complete = False
        else:
            complete = False
    if not complete:
        tl.store(plan + LAYOUT.summary + IS_USABLE, 0)


@triton.jit(do_not_specialize=["num_tokens", "rank", "send_tokens", "timeout_ns"])
def publish_rows_kernel(
    x_TD, num_tokens, rank, send_buffer_HTD, send_tokens, routing, routing_ptrs_W, plan, weight_R,
    counters, status, host_status, timeout_ns: tl.int64,
    LAYOUT: tl.constexpr, SPREAD_WEIGHTS: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy rows to the send buffer; wait until all ranks did; check that all use one call's plan.

    Pass n of rank r with the plan of call c::

        all CTAs        x_TD -> send buffer n % 2
        CTA 0           call_in_use[n % 2, r] = c on every rank
        last CTA        published[r] = n on every rank
        last CTA        wait for published[s] >= n of all ranks s, compare call_in_use[n % 2, s]

    There is no deadlock: each CTA copies its rows before it counts itself, and only the last CTA
    waits, after it has set the flags.

    Example: 100 rows, ``ROWS`` 16, 4 CTAs: CTA 0 copies rows 0-15 and 64-79.
    """
    cta_record, num_marks = marks.begin(status, marks.PUBLISH_KERNEL, True, LAYOUT)
    call = tl.load(plan + LAYOUT.summary + CALL)
    num_marks = marks.add(cta_record, num_marks, marks.PUBLISH, LAYOUT)
    epoch = next_epoch(counters, status, host_status)
    send_buffer_TD = send_buffer_HTD + (epoch % 2).to(tl.int64) * send_tokens * HIDDEN_SIZE
    for first in range(tl.program_id(0) * ROWS, num_tokens, tl.num_programs(0) * ROWS):
        copy_rows(first, x_TD, send_buffer_TD, num_tokens, HIDDEN_SIZE, ROWS, COLUMNS)
    if (tl.program_id(0) == 0) & (not has_overflowed(status)):
        for peer in range(LAYOUT.num_ranks):
            theirs = peer_ptr(routing_ptrs_W, peer, routing)
            tl.store(call_in_use(theirs, rank, epoch, LAYOUT), call)
    tl.debug_barrier()  # the rows of all threads are stored before one thread releases
    before = tl.atomic_add(counters + PUBLISHED, 1, sem="acq_rel", scope="sys")
    is_last = before == tl.num_programs(0) - 1
    if is_last:
        tl.store(counters + PUBLISHED, 0)
        tl.store(plan + LAYOUT.summary + PASS, epoch)
        count_pass(counters, epoch)
        signal_all(LAYOUT.published, epoch, rank, routing, routing_ptrs_W, LAYOUT)
    if SPREAD_WEIGHTS:
        _spread_weights(plan, weight_R, LAYOUT)
    if is_last:
        num_marks = marks.add(cta_record, num_marks, marks.WAIT, LAYOUT)
        _wait_and_compare_calls(routing, plan, call, epoch, status, host_status, timeout_ns, LAYOUT)
    marks.end(cta_record, num_marks, LAYOUT)


_launch_plan = Launcher(plan_kernel)
_launch_rows = Launcher(publish_rows_kernel)


def make_plan(
    context: KernelContext,
    plan: torch.Tensor,
    *,
    x_TD: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    max_rows: int = 0,
) -> None:
    """Launch ``plan_kernel``: fill the send buffer, exchange routing, make the dispatch plan.

    Written: ``plan``, ``(layout.plan_words,)`` int32. ``max_rows`` is the capacity in rows if the
    host does not read the size of the plan, else 0.

    If the tokens of a rank exceed its send buffer, it publishes only their number. Then the plan is
    unusable on all ranks, and ``host_status[2]`` is the largest number of tokens of any rank; else
    it is 0. With ``max_rows``, too many tokens or rows are a failure.
    """
    layout, routing, send = context.layout, context.routing_buffer, context.send_buffer.local
    x_TD, idx_TK, weights_TK = aligned(x_TD), aligned(topk_idx_TK), aligned(topk_weights_TK)
    num_tokens, hidden_size = x_TD.shape
    excess_tokens = num_tokens if num_tokens > send.shape[1] else 0
    num_tokens -= excess_tokens
    task_tokens = min(COPY_ROWS, layout.block_tokens)
    num_tasks = max(1, -(-num_tokens // task_tokens))
    _launch_plan(
        _CTAS_PER_SM * context.num_sms,
        (x_TD, idx_TK, weights_TK, num_tokens, excess_tokens, context.rank, num_tasks, send,
         send.shape[1], routing.local, routing.ptrs_W, plan, max_rows, context.counters,
         context.status, context.host_status, context.timeout_ns),
        (layout, triton.next_power_of_2(layout.num_local), hidden_size, COPY_ROWS,
         min(1024, triton.next_power_of_2(hidden_size))),
        dtypes=(x_TD.dtype, idx_TK.dtype, weights_TK.dtype), num_warps=8, max_registers=128,
    )  # fmt: skip


def publish_rows(
    context: KernelContext,
    plan: torch.Tensor,
    *,
    x_TD: torch.Tensor,
    weight_R: torch.Tensor | None = None,
) -> None:
    """Launch ``publish_rows_kernel`` for an existing plan: fill send buffer, wait for all ranks.

    ``x_TD`` has a row for each token of the plan's call: the token, or the gradient of its output.
    ``plan`` becomes unusable if a rank is late or in another call. Written if given: ``weight_R``,
    the routing weight of each row of the plan, float32; padding rows keep their content.
    """
    routing, send = context.routing_buffer, context.send_buffer.local
    x_TD, hidden_size = aligned(x_TD), x_TD.shape[1]
    num_tokens = min(x_TD.shape[0], send.shape[1])  # fewer only for an unusable plan: see max_load
    _launch_rows(
        context.num_sms,
        (x_TD, num_tokens, context.rank, send, send.shape[1], routing.local, routing.ptrs_W, plan,
         context.status if weight_R is None else weight_R, context.counters,
         context.status, context.host_status, context.timeout_ns),
        (context.layout, weight_R is not None, hidden_size, COPY_ROWS,
         min(1024, triton.next_power_of_2(hidden_size))),
        dtypes=(x_TD.dtype,), num_warps=8,
    )  # fmt: skip
