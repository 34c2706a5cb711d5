# Triton kernels: pyright reads them as plain Python and reports errors that are none.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Make the dispatch plan of a rank on the device, in one launch: publish, count, copy, place.

This is the first launch of a forward pass. It also copies this rank's tokens to its send buffer,
from which the other ranks fetch them (``fetch.py``).
"""

import torch
import triton
import triton.language as tl

from halley.fused.kernels.layout import (
    COUNTED,
    IS_USABLE,
    NUM_COPIES,
    NUM_TILES,
    PLAN_EXITS,
    PLAN_TICKET,
    PLANNED,
    PUBLISHED,
    ROWS_COPIED,
    KernelContext,
)
from halley.fused.kernels.peer import (
    PLAN,
    ROWS,
    count_pass,
    failure_code,
    next_epoch,
    signal_all,
    wait,
)
from halley.fused.kernels.routing_exchange import (
    block_bases,
    count_task,
    last_group,
    local_experts,
    publish_task,
    record_of,
    smallest_local,
)
from halley.ops.kernels.launch import Launcher, aligned


COPY_ROWS = 16  # rows that a CTA copies to the send buffer at once
_CTAS_PER_SM = 2  # tasks are short and mostly wait for memory
_NO_LIMIT_NS = tl.constexpr(2**62)


@triton.jit
def usable_here(plan, capacity, copy_capacity, LAYOUT: tl.constexpr):
    """Return 1 if a plan is usable and its rows and token copies fit into the buffers, else 0.

    It is a number because kernels multiply their number of tasks by it.
    """
    summary = plan + LAYOUT.summary
    rows_fit = tl.load(summary + NUM_TILES) * LAYOUT.block_m <= capacity
    copies_fit = tl.load(summary + NUM_COPIES) <= copy_capacity
    return tl.load(summary + IS_USABLE) * (rows_fit & copies_fit)


@triton.jit
def copy_rows(
    first, x_TD, send_buffer_TD, num_tokens,
    HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy ``ROWS`` rows of this rank, from ``first`` on, to its send buffer."""
    row = first + tl.arange(0, ROWS)
    for start in range(0, HIDDEN_SIZE, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        at = row.to(tl.int64)[:, None] * HIDDEN_SIZE + column[None, :]
        mask = (row < num_tokens)[:, None] & (column < HIDDEN_SIZE)[None, :]
        tl.store(send_buffer_TD + at, tl.load(x_TD + at, mask=mask), mask=mask)


@triton.jit
def _load_packed(record, token, LAYOUT: tl.constexpr):
    """Return the packed slots of some tokens, (tokens, padded K); -1 for empty slots."""
    k = tl.arange(0, LAYOUT.padded_k)
    real = (token < tl.load(record + LAYOUT.header))[:, None] & (k < LAYOUT.top_k)[None, :]
    at = token[:, None] * LAYOUT.top_k + k[None, :]
    return tl.load(record + LAYOUT.packed + at, mask=real, other=-1)


@triton.jit
def _places(i, block, key, end_key, before, column, plan, LAYOUT: tl.constexpr):
    """Return the indices of token copies in a list that is sorted by key.

    An index is the first index of the key, plus the copies of this key in earlier blocks, plus
    those earlier in this block (``before``).
    """
    real = key < end_key
    base = block_bases(plan, i, LAYOUT.num_local + column, LAYOUT) + key * LAYOUT.max_blocks + block
    begin = plan + tl.where(i == 0, LAYOUT.own_begin, LAYOUT.other_begin) + column + key
    return tl.load(begin, mask=real, other=0) + tl.load(base, mask=real, other=0) + before


@triton.jit
def _place_copies(i, block, expert_TK, record, plan, rank, LAYOUT: tl.constexpr):
    """Return the indices of one block's token copies in the fetch list and in the combine list."""
    STEP: tl.constexpr = min(32, LAYOUT.block_tokens)
    smallest = smallest_local(expert_TK, rank, LAYOUT)
    group = last_group(expert_TK, rank, LAYOUT)
    within = tl.arange(0, LAYOUT.block_tokens)
    same_smallest = tl.zeros_like(within)
    same_group = tl.zeros_like(within)
    for start in range(0, LAYOUT.block_tokens, STEP):
        other = start + tl.arange(0, STEP)
        packed = _load_packed(record, block * LAYOUT.block_tokens + other, LAYOUT)
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
    """Store the rows of one block of tokens, and its token copies in both lists.

    ``i`` is the distance of the source rank from this rank in ring order.

    Example: expert 0 begins at row 0, and earlier blocks have 3 rows of it. A token of this block
    with ``packed`` 0 << 16 | 2 gets row 0 + 3 + 2 = 5.
    """
    source = (rank + i) % LAYOUT.num_ranks
    record = record_of(routing, source, epoch, LAYOUT)
    token = block * LAYOUT.block_tokens + tl.arange(0, LAYOUT.block_tokens)
    k = tl.arange(0, LAYOUT.padded_k)
    packed = _load_packed(record, token, LAYOUT)
    expert = packed >> LAYOUT.order_bits  # -1 stays -1
    local = local_experts(expert, rank, LAYOUT)
    mine = local < LAYOUT.num_local
    weights = (record + LAYOUT.weights).to(tl.pointer_type(tl.float32))
    at = token[:, None] * LAYOUT.top_k + k[None, :]
    weight = tl.load(weights + at, mask=mine, other=0.0)

    base = block_bases(plan, i, 0, LAYOUT) + local * LAYOUT.max_blocks + block
    row = tl.load(plan + LAYOUT.expert_begin + local, mask=mine, other=0)
    row += tl.load(base, mask=mine, other=0)
    row = tl.where(mine, row + (packed & ((1 << LAYOUT.order_bits) - 1)), -1)

    # A token copy's line begins with the slots of this rank, in the order of k; -1 fills the rest.
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
        _store_contributors(expert, token, record, plan, LAYOUT)


@triton.jit
def _store_contributors(expert, token, record, plan, LAYOUT: tl.constexpr):
    """Store which ranks will send partial sums for this rank's tokens, one bit for each rank.

    Example: two experts a rank, no tensor parallelism, experts (0, 5): bits 0 and 2, which is 5.
    """
    owner = tl.where(expert >= 0, expert // LAYOUT.num_local, -1)
    ranks = tl.zeros_like(token)
    all_ranks = 0
    for peer in range(LAYOUT.num_ranks):
        needs = tl.max((owner == peer // LAYOUT.tp_size).to(tl.int32), axis=1)
        ranks |= needs << peer
        all_ranks |= tl.max(needs, axis=0) << peer
    num_tokens = tl.load(record + LAYOUT.header)
    tl.store(plan + LAYOUT.token_contributors + token, ranks, mask=token < num_tokens)
    tl.atomic_or(plan + LAYOUT.contributors, all_ranks, sem="relaxed", scope="gpu")


@triton.jit
def _place_tiles(local, plan, LAYOUT: tl.constexpr):
    """Store expert, number of rows and a zero arrival count for each tile of one expert."""
    STEP: tl.constexpr = 64
    rows = tl.load(plan + LAYOUT.expert_rows + local)
    first = tl.load(plan + LAYOUT.expert_begin + local) // LAYOUT.block_m
    num_tiles = tl.cdiv(rows, LAYOUT.block_m)
    for start in range(0, num_tiles, STEP):
        tile = start + tl.arange(0, STEP)
        real = tile < num_tiles
        left = tl.minimum(rows - tile * LAYOUT.block_m, LAYOUT.block_m)
        tl.store(plan + LAYOUT.tile_expert + first + tile, tl.zeros_like(tile) + local, mask=real)
        tl.store(plan + LAYOUT.tile_rows + first + tile, left, mask=real)
        tl.store(plan + LAYOUT.tile_arrived + first + tile, tl.zeros_like(tile), mask=real)


@triton.jit
def _place_task(task, routing, plan, epoch, rank, LAYOUT: tl.constexpr):
    """Place one block of tokens (the first W * blocks tasks) or the tiles of one expert."""
    if tl.load(plan + LAYOUT.summary + IS_USABLE) != 0:
        if task < LAYOUT.num_ranks * LAYOUT.max_blocks:
            i = task // LAYOUT.max_blocks
            block = task % LAYOUT.max_blocks
            record = record_of(routing, (rank + i) % LAYOUT.num_ranks, epoch, LAYOUT)
            if block * LAYOUT.block_tokens < tl.load(record + LAYOUT.header):
                _place_block(i, block, routing, plan, epoch, rank, LAYOUT)
        else:
            _place_tiles(task - LAYOUT.num_ranks * LAYOUT.max_blocks, plan, LAYOUT)


@triton.jit
def _wait_for_rows(
    routing, plan, epoch, status, host_status, timeout_ns, LAYOUT: tl.constexpr
):  # fmt: skip
    """Wait until all ranks have filled their send buffers; else make the plan unusable."""
    for peer in range(LAYOUT.num_ranks):
        code = failure_code(ROWS, peer, 0)
        flag = routing + LAYOUT.rows_ready + peer
        if not wait(flag, epoch, timeout_ns, status, host_status, code, "sys"):
            tl.store(plan + LAYOUT.summary + IS_USABLE, 0)


@triton.jit(
    do_not_specialize=[
        "num_tokens", "excess_tokens", "rank", "num_tasks", "send_tokens", "max_rows", "timeout_ns"
    ]
)  # fmt: skip
def plan_kernel(
    x_TD, idx_TK, weights_TK, num_tokens, excess_tokens, rank, num_tasks, send_buffer_HTD,
    send_tokens, routing, routing_ptrs_W, plan, max_rows, counters, status, host_status,
    timeout_ns: tl.int64,
    LAYOUT: tl.constexpr, LOCAL_PADDED: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Exchange the routing of all ranks and make this rank's plan.

    CTAs take four kinds of tasks, in this order, by tickets of one counter. Pass n of rank r::

        publish   write routing to all ranks   last task: published[r] = n on every rank
        count     wait for published[s] >= n of all ranks s
                                               last task: counter PLANNED = n on this rank
        copy      x_TD -> send buffer n % 2    last task: rows_ready[r] = n on every rank
        place     wait for PLANNED >= n, store lists and tiles

    The CTA that ends last waits for ``rows_ready[s] >= n`` of all ranks s. So when the launch has
    ended, the rows of all ranks can be fetched.

    There is no deadlock. Publish and copy tasks wait for nothing. Count tasks wait for publish
    tasks of all ranks. Place tasks wait for count tasks, which have lower tickets and run already.

    Example: 40 tokens, 16 tokens for each task, 10 columns of counts. Tickets 0-2 publish, 3-12
    count, 13-15 copy, and the others place.
    """
    first_count = num_tasks
    first_copy = first_count + LAYOUT.num_columns
    first_place = first_copy + num_tasks
    end = first_place + LAYOUT.num_ranks * LAYOUT.max_blocks + LAYOUT.num_local
    healthy = True
    epoch = next_epoch(counters, status, host_status)
    send_buffer_TD = send_buffer_HTD + (epoch % 2).to(tl.int64) * send_tokens * HIDDEN_SIZE
    task = tl.atomic_add(counters + PLAN_TICKET, 1, sem="relaxed", scope="gpu")
    while task < end:
        if task < first_count:
            publish_task(
                task, idx_TK, weights_TK, num_tokens, excess_tokens, epoch, rank,
                routing, routing_ptrs_W, LAYOUT,
            )  # fmt: skip
            tl.debug_barrier()
            before = tl.atomic_add(counters + PUBLISHED, 1, sem="acq_rel", scope="sys")
            if before == num_tasks - 1:
                signal_all(LAYOUT.published, epoch, rank, routing, routing_ptrs_W, LAYOUT)
        elif task < first_copy:
            count_task(
                task - first_count, routing, routing_ptrs_W, plan, epoch, rank, max_rows,
                counters, status, host_status, timeout_ns, LAYOUT, LOCAL_PADDED,
            )  # fmt: skip
        elif task < first_place:
            row = (task - first_copy) * ROWS
            copy_rows(row, x_TD, send_buffer_TD, num_tokens, HIDDEN_SIZE, ROWS, COLUMNS)
            tl.debug_barrier()
            before = tl.atomic_add(counters + ROWS_COPIED, 1, sem="acq_rel", scope="sys")
            if before == num_tasks - 1:
                signal_all(LAYOUT.rows_ready, epoch, rank, routing, routing_ptrs_W, LAYOUT)
        elif healthy:
            # This wait has no time limit. With one, it could report this rank before a count task
            # reports the missing rank. Count tasks run already, and their waits are limited.
            code = failure_code(PLAN, rank, 0)
            planned = counters + PLANNED
            healthy = wait(planned, epoch, _NO_LIMIT_NS, status, host_status, code, "gpu")
            if healthy:
                _place_task(task - first_place, routing, plan, epoch, rank, LAYOUT)
        task = tl.atomic_add(counters + PLAN_TICKET, 1, sem="relaxed", scope="gpu")
    before = tl.atomic_add(counters + PLAN_EXITS, 1, sem="acq_rel", scope="gpu")
    if before == tl.num_programs(0) - 1:
        tl.store(counters + PLAN_TICKET, 0)
        tl.store(counters + PUBLISHED, 0)
        tl.store(counters + COUNTED, 0)
        tl.store(counters + ROWS_COPIED, 0)
        tl.store(counters + PLAN_EXITS, 0)
        count_pass(counters, epoch)
        _wait_for_rows(routing, plan, epoch, status, host_status, timeout_ns, LAYOUT)


_launch = Launcher(plan_kernel)


def make_plan(
    context: KernelContext,
    plan: torch.Tensor,
    *,
    x_TD: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    max_rows: int = 0,
) -> None:
    """Begin a call: fill the send buffer, exchange the routing, and make the plan of this rank.

    When the launch has ended, the rows of all ranks can be fetched.

    Args:
        context: buffers of this rank.
        plan: written: ``(layout.plan_words,)`` int32, any content before.
        x_TD: tokens of this rank. If they exceed the send buffer, only their number is published.
        topk_idx_TK: expert ids in ``[0, E)`` or ``DROPPED``, an int dtype.
        topk_weights_TK: routing weights, a float dtype.
        max_rows: capacity in rows if the host does not read the size of the plan, else 0.

    If a rank has too many tokens, the plan is unusable on all ranks, and ``host_status[2]`` is the
    largest number of tokens of any rank; else it is 0. With ``max_rows``, too many tokens of a rank
    or more rows than ``max_rows`` are a failure.
    """
    layout, routing, send = context.layout, context.routing_buffer, context.send_buffer.local
    x_TD, idx_TK, weights_TK = aligned(x_TD), aligned(topk_idx_TK), aligned(topk_weights_TK)
    num_tokens, hidden_size = x_TD.shape
    excess_tokens = 0
    if num_tokens > send.shape[1]:
        num_tokens, excess_tokens = 0, num_tokens
    task_tokens = min(COPY_ROWS, layout.block_tokens)
    num_tasks = max(1, -(-num_tokens // task_tokens))
    _launch(
        _CTAS_PER_SM * context.num_sms,
        (x_TD, idx_TK, weights_TK, num_tokens, excess_tokens, context.rank, num_tasks, send,
         send.shape[1], routing.local, routing.ptrs_W, plan, max_rows, context.counters,
         context.status, context.host_status, context.timeout_ns),
        (layout, triton.next_power_of_2(layout.num_local), hidden_size, COPY_ROWS,
         min(1024, triton.next_power_of_2(hidden_size))),
        dtypes=(x_TD.dtype, idx_TK.dtype, weights_TK.dtype), num_warps=8, max_registers=128,
    )  # fmt: skip
