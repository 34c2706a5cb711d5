# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Tasks of ``plan_kernel``: exchange the routing of all ranks, and turn counts into offsets.

``publish_task`` stores a block of this rank's routing in this rank's record on every rank.
``count_task`` waits for the records of all ranks and turns the counts of their blocks into offsets:
the first row of each expert, and the first index of each block in the lists of token copies::

    rank s: publish tasks --> records on all ranks, then published[s] = n (release)
                                     |
    rank r: count tasks wait for published[s] >= n of all s (acquire), then PLANNED = n (release)
                                     |
    rank r: place tasks wait for PLANNED >= n
"""

import triton
import triton.language as tl

from halley.fused.kernels import marks
from halley.fused.kernels.layout import (
    CALL,
    COUNTED,
    IS_USABLE,
    NUM_COPIES,
    NUM_OWN_COPIES,
    NUM_TILES,
    PASS,
    PLANNED,
)
from halley.fused.kernels.peer import (
    MAX_ROWS,
    MAX_TOKENS,
    ORDER,
    PLAN,
    failure_code,
    peer_ptr,
    report_failure,
    signal,
    wait,
)


_STEP = tl.constexpr(1024)  # blocks whose counts one iteration adds
_NO_LIMIT_NS = tl.constexpr(2**62)


@triton.jit
def record_of(routing, source, epoch, LAYOUT: tl.constexpr):
    """Return the address, in a routing buffer, of rank ``source``'s record for pass ``epoch``."""
    half = (epoch % 2) * LAYOUT.num_ranks + source
    return routing + LAYOUT.records + half.to(tl.int64) * LAYOUT.record_words


@triton.jit
def call_in_use(routing, source, epoch, LAYOUT: tl.constexpr):
    """Return the address of the word that holds the call whose plan rank ``source`` uses."""
    return routing + LAYOUT.call_in_use + (epoch % 2) * LAYOUT.num_ranks + source


@triton.jit
def block_bases(plan, i, column, LAYOUT: tl.constexpr):
    """Return the address in a plan at which column ``column`` of ``block_base[i]`` begins."""
    return plan + LAYOUT.block_base + (i * LAYOUT.num_columns + column) * LAYOUT.max_blocks


@triton.jit
def first_expert(rank, LAYOUT: tl.constexpr):
    """Return the id of ``rank``'s first expert, equal for all ranks of a tensor-parallel group."""
    return rank // LAYOUT.tp_size * LAYOUT.num_local


@triton.jit
def local_experts(expert_TK, rank, LAYOUT: tl.constexpr):
    """Return each expert's index on ``rank``; ``num_local`` for other experts and empty slots."""
    local = expert_TK - first_expert(rank, LAYOUT)
    here = (expert_TK >= 0) & (local >= 0) & (local < LAYOUT.num_local)
    return tl.where(here, local, LAYOUT.num_local)


@triton.jit
def smallest_local(expert_TK, rank, LAYOUT: tl.constexpr):
    """Return each token's smallest local expert on ``rank``; ``num_local`` if it has none there."""
    return tl.min(local_experts(expert_TK, rank, LAYOUT), axis=1)


@triton.jit
def group_of(local, LAYOUT: tl.constexpr):
    """Return the expert group of a local expert, from 0 to ``num_groups`` - 1."""
    return local * LAYOUT.num_groups // LAYOUT.num_local


@triton.jit
def last_group(expert_TK, rank, LAYOUT: tl.constexpr):
    """Return each token's last expert group on ``rank``; ``num_groups`` for a token without one."""
    local = local_experts(expert_TK, rank, LAYOUT)
    largest = tl.max(tl.where(local < LAYOUT.num_local, local, -1), axis=1)
    return tl.where(largest >= 0, group_of(largest, LAYOUT), LAYOUT.num_groups)


@triton.jit
def _load_experts(idx_TK, slot, num_tokens, LAYOUT: tl.constexpr):
    """Return expert ids of slots ``token * padded_k + k``; -1 for dropped or padding slots."""
    token, k = slot // LAYOUT.padded_k, slot % LAYOUT.padded_k
    real = (k < LAYOUT.top_k) & (token < num_tokens)
    return tl.load(idx_TK + token * LAYOUT.top_k + k, mask=real, other=-1).to(tl.int32)


@triton.jit
def _publish_block(
    block, idx_TK, weights_TK, num_tokens, epoch, rank, routing, routing_ptrs_W,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """Store packed slots, weights and counts of a block in this rank's record on every rank.

    Example: two tokens with experts (2, 0) and (2, 1) are packed as (2 << 16, 0 << 16) and
    (2 << 16 | 1, 1 << 16), because one slot of expert 2 precedes the second one in the block.
    """
    SLOTS: tl.constexpr = LAYOUT.block_tokens * LAYOUT.padded_k
    STEP: tl.constexpr = min(32, SLOTS)
    slot = block * SLOTS + tl.arange(0, SLOTS)
    expert = _load_experts(idx_TK, slot, num_tokens, LAYOUT)
    before = tl.zeros((SLOTS,), tl.int32)
    for start in range(0, SLOTS, STEP):
        other = block * SLOTS + start + tl.arange(0, STEP)
        other_expert = _load_experts(idx_TK, other, num_tokens, LAYOUT)
        earlier = (expert[:, None] == other_expert[None, :]) & (other[None, :] < slot[:, None])
        before += tl.sum(earlier.to(tl.int32), axis=1)
    packed = tl.where(expert >= 0, (expert << LAYOUT.order_bits) | before, -1)
    token, k = slot // LAYOUT.padded_k, slot % LAYOUT.padded_k
    real = (k < LAYOUT.top_k) & (token < num_tokens)
    at = token * LAYOUT.top_k + k
    weight = tl.load(weights_TK + at, mask=real, other=0.0).to(tl.float32)

    expert_TK = expert.reshape(LAYOUT.block_tokens, LAYOUT.padded_k)
    for peer in range(LAYOUT.num_ranks):
        record = record_of(peer_ptr(routing_ptrs_W, peer, routing), rank, epoch, LAYOUT)
        tl.store(record + LAYOUT.packed + at, packed, mask=real)
        weights = (record + LAYOUT.weights).to(tl.pointer_type(tl.float32))
        tl.store(weights + at, weight, mask=real)
        smallest = smallest_local(expert_TK, peer, LAYOUT)
        for start in range(0, LAYOUT.num_local, STEP):
            local = start + tl.arange(0, STEP)
            inside = local < LAYOUT.num_local
            column = record + LAYOUT.counts + local * LAYOUT.max_blocks + block
            rows = expert[:, None] == (first_expert(peer, LAYOUT) + local)[None, :]
            tl.store(column, tl.sum(rows.to(tl.int32), axis=0), mask=inside)
            copies = smallest[:, None] == local[None, :]
            column += LAYOUT.num_local * LAYOUT.max_blocks
            tl.store(column, tl.sum(copies.to(tl.int32), axis=0), mask=inside)
        group = tl.arange(0, LAYOUT.num_groups)
        copies = last_group(expert_TK, peer, LAYOUT)[:, None] == group[None, :]
        column = record + LAYOUT.counts + (2 * LAYOUT.num_local + group) * LAYOUT.max_blocks + block
        tl.store(column, tl.sum(copies.to(tl.int32), axis=0))


@triton.jit
def has_overflowed(status):
    """Return whether an earlier pass had too many rows or tokens, see ``_signal_overflow``."""
    return tl.load(status) >> 48 >= MAX_ROWS  # the two kinds with the largest numbers


@triton.jit
def publish_task(
    task, idx_TK, weights_TK, num_tokens, excess_tokens, epoch, rank, routing, routing_ptrs_W,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """Store a block's routing on all ranks; task 0 also stores the header and marks a new call."""
    if task == 0:
        for peer in range(LAYOUT.num_ranks):
            record = record_of(peer_ptr(routing_ptrs_W, peer, routing), rank, epoch, LAYOUT)
            tl.store(record + LAYOUT.header, num_tokens)
            tl.store(record + LAYOUT.header + 1, excess_tokens)
            theirs = peer_ptr(routing_ptrs_W, peer, routing)
            tl.store(call_in_use(theirs, rank, epoch, LAYOUT), 0)
    if task * LAYOUT.block_tokens < num_tokens:
        _publish_block(
            task, idx_TK, weights_TK, num_tokens, epoch, rank, routing, routing_ptrs_W, LAYOUT
        )


@triton.jit
def _count_column(column, routing, plan, epoch, rank, usable, LAYOUT: tl.constexpr):
    """Store in the plan the total of one column of counts, and the sum before each block."""
    is_copies = column >= LAYOUT.num_local
    key = column - LAYOUT.num_local  # sort keys: first smallest local experts, then expert groups
    total = 0
    for i in range(LAYOUT.num_ranks):
        record = record_of(routing, (rank + i) % LAYOUT.num_ranks, epoch, LAYOUT)
        num_blocks = tl.cdiv(tl.load(record + LAYOUT.header) * usable, LAYOUT.block_tokens)
        counts = record + LAYOUT.counts + column * LAYOUT.max_blocks
        base = block_bases(plan, i, column, LAYOUT)
        for start in range(0, num_blocks, _STEP):
            block = start + tl.arange(0, _STEP)
            count = tl.load(counts + block, mask=block < num_blocks, other=0)
            before = tl.cumsum(count, axis=0) - count
            tl.store(base + block, total + before, mask=block < num_blocks)
            total += tl.sum(count, axis=0)
        if i == 0:
            if is_copies:
                tl.store(plan + LAYOUT.own_copies + key, total)
                total = 0
    if is_copies:
        tl.store(plan + LAYOUT.other_copies + key, total)
    else:
        tl.store(plan + LAYOUT.expert_rows + column, total)


@triton.jit
def _place_list(counts, begins, keys, real, first, origins, plan, LAYOUT: tl.constexpr):
    """Store the first index of each sort key in a part of a list; return the index after the part.

    The list is the fetch or the combine list, and the part begins at index ``first``. ``counts``
    holds the number of token copies of each key. The padding, which ends the part, gets -1.
    """
    count = tl.load(plan + counts + keys, mask=real, other=0)
    tl.store(plan + begins + keys, first + tl.cumsum(count, axis=0) - count, mask=real)
    end = first + tl.sum(count, axis=0)
    padded_end = tl.cdiv(end, LAYOUT.task_rows) * LAYOUT.task_rows
    empty = end + tl.arange(0, LAYOUT.task_rows)
    tl.store(plan + origins + empty, -1, mask=empty < padded_end)
    return padded_end


@triton.jit
def _lay_out(
    plan, host_status, epoch, usable, most_tokens, max_rows,
    LAYOUT: tl.constexpr, LOCAL_PADDED: tl.constexpr,
):  # fmt: skip
    """Store each expert's first row and each sort key's first index; return the number of rows.

    Also store the plan's summary, zero its counters, and store its sizes for the host.
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
    fetch: tl.constexpr = LAYOUT.fetch_origin
    own = _place_list(LAYOUT.own_copies, LAYOUT.own_begin, local, real, 0, fetch, plan, LAYOUT)
    end = _place_list(
        LAYOUT.other_copies, LAYOUT.other_begin, local, real, own, fetch, plan, LAYOUT
    )
    group = tl.arange(0, LAYOUT.num_groups)
    real = group >= 0
    group += LAYOUT.num_local
    combine: tl.constexpr = LAYOUT.combine_origin
    other = _place_list(
        LAYOUT.other_copies, LAYOUT.other_begin, group, real, 0, combine, plan, LAYOUT
    )
    _place_list(LAYOUT.own_copies, LAYOUT.own_begin, group, real, other, combine, plan, LAYOUT)
    num_rows = num_tiles * LAYOUT.block_m
    if (max_rows > 0) & (num_rows > max_rows):
        usable *= 0
    summary = plan + LAYOUT.summary
    tl.store(summary + IS_USABLE, usable)
    tl.store(summary + NUM_TILES, num_tiles)
    tl.store(summary + NUM_COPIES, end)
    tl.store(summary + NUM_OWN_COPIES, own)
    tl.store(summary + CALL, epoch)
    tl.store(summary + PASS, epoch)
    tl.store(host_status + 1, num_rows.to(tl.int64))
    tl.store(host_status + 2, most_tokens.to(tl.int64))
    tl.store(host_status + 3, end.to(tl.int64))
    tl.store(plan + LAYOUT.contributors, 0)
    tl.store(plan + LAYOUT.tickets + tl.arange(0, LAYOUT.num_tickets), 0)
    num_counts: tl.constexpr = LAYOUT.max_chunks * LAYOUT.num_groups
    tl.store(plan + LAYOUT.chunk_done + tl.arange(0, num_counts), 0)
    tl.store(plan + LAYOUT.chunk_sent + tl.arange(0, LAYOUT.max_chunks), 0)
    return num_rows


@triton.jit
def _signal_overflow(num_rows, epoch, rank, routing, routing_ptrs_W, LAYOUT: tl.constexpr):
    """Tell all ranks that this rank has too many rows, and end their waits for its partial sums.

    This rank computes nothing and sends no sums. So it sets the flags ``sums_ready`` here, and the
    other ranks do not wait for these flags until the time limit.

    All ranks report the overflow at the end of this pass (``end_combine``): they wait for
    ``rows_ready`` of this rank, which follows these stores. In later passes no rank has a usable
    plan, so none waits for sums. Ranks then run ahead of each other, because their waits fail. So
    they publish no routing: a slow rank may still read that of this pass.
    """
    for peer in range(LAYOUT.num_ranks):
        theirs = peer_ptr(routing_ptrs_W, peer, routing)
        tl.store(theirs + LAYOUT.overflow_rows + rank, num_rows)
        for chunk in range(LAYOUT.max_chunks):
            signal(theirs + LAYOUT.sums_ready + rank * LAYOUT.max_chunks + chunk, epoch)


@triton.jit
def count_task(
    column, cta_record, num_marks, routing, routing_ptrs_W, plan, epoch, rank, max_rows,
    counters, status, host_status, timeout_ns, LAYOUT: tl.constexpr, LOCAL_PADDED: tl.constexpr,
):  # fmt: skip
    """Wait for the routing of all ranks and sum one column of counts; the last task calls _lay_out.

    ``cta_record`` and ``num_marks`` are as in ``marks.py``; the function returns ``num_marks``.
    Example: experts 0 and 1 of this rank have 130 and 5 rows, and tiles have 128 rows. Expert 0
    begins at row 0 and has two tiles. Expert 1 begins at row 256. The plan has 3 tiles, 384 rows.
    """
    num_columns: tl.constexpr = LAYOUT.num_columns
    complete = (tl.load(status) == 0).to(tl.int32)  # 0 after a failure in an earlier pass
    most_tokens = 0
    num_marks = marks.add(cta_record, num_marks, marks.WAIT, LAYOUT)
    for peer in range(LAYOUT.num_ranks):
        code = failure_code(PLAN, peer, 0)
        flag = routing + LAYOUT.published + peer
        if wait(flag, epoch, timeout_ns, status, host_status, code, "sys"):
            record = record_of(routing, peer, epoch, LAYOUT)
            most_tokens = tl.maximum(most_tokens, tl.load(record + LAYOUT.header + 1))
            call = tl.load(call_in_use(routing, peer, epoch, LAYOUT))
            if call != 0:
                report_failure(status, host_status, failure_code(ORDER, peer, call))
                complete = 0
        else:
            complete = 0
    num_marks = marks.add(cta_record, num_marks, marks.PLAN, LAYOUT)
    usable = complete * (most_tokens == 0)
    _count_column(column, routing, plan, epoch, rank, usable, LAYOUT)
    tl.debug_barrier()
    # COUNTED has two counts: finished tasks (low 16 bits), tasks that saw all records (high bits).
    before = tl.atomic_add(counters + COUNTED, 1 + complete * 65536, sem="acq_rel", scope="gpu")
    if before % 65536 == num_columns - 1:
        all_complete = (before // 65536 + complete == num_columns).to(tl.int32)
        num_rows = _lay_out(
            plan, host_status, epoch, usable * all_complete, most_tokens, max_rows,
            LAYOUT, LOCAL_PADDED,
        )  # fmt: skip
        if max_rows > 0:
            if most_tokens > 0:
                report_failure(status, host_status, failure_code(MAX_TOKENS, 0, most_tokens))
            if num_rows > max_rows:
                # Signal first: a reported failure ends the wait of the last copy task.
                _signal_overflow(num_rows, epoch, rank, routing, routing_ptrs_W, LAYOUT)
                report_failure(status, host_status, failure_code(MAX_ROWS, rank, num_rows))
        tl.debug_barrier()
        tl.atomic_xchg(counters + PLANNED, epoch, sem="release", scope="gpu")
    return num_marks


@triton.jit
def wait_for_plan(epoch, rank, counters, status, host_status):
    """Wait until this rank's count tasks have ended; return False if a failure ended the wait.

    There is no time limit: a timeout here could report this rank before a count task reports the
    rank that is missing. Count tasks already run, and their waits have limits.
    """
    code = failure_code(PLAN, rank, 0)
    return wait(counters + PLANNED, epoch, _NO_LIMIT_NS, status, host_status, code, "gpu")


@triton.jit
def store_contributors(expert, token, record, plan, LAYOUT: tl.constexpr):
    """Store in the plan, as bits, which ranks will send partial sums for a block of own tokens."""
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
def place_tiles(local, plan, LAYOUT: tl.constexpr):
    """Store in the plan, for each tile of an expert: expert, number of rows, 0 arrived rows."""
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
def load_packed(record, token, LAYOUT: tl.constexpr):
    """Return packed slots of some tokens of a record, (tokens, padded K); -1 for empty slots."""
    k = tl.arange(0, LAYOUT.padded_k)
    real = (token < tl.load(record + LAYOUT.header))[:, None] & (k < LAYOUT.top_k)[None, :]
    at = token[:, None] * LAYOUT.top_k + k[None, :]
    return tl.load(record + LAYOUT.packed + at, mask=real, other=-1)
