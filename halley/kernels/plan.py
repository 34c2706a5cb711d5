# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Make the plan of this rank from the routing tables of all ranks, on the device, in one launch.

Three kinds of work are taken by tickets, one kind after the other. ``publish``: lay out this rank's
rows for its peers and write its routing to every rank's mailbox. ``count``: wait for all tables and
turn the counts of blocks into first rows. ``place``: give each slot its row, each send its place in
the list.
"""

import torch
import triton
import triton.language as tl

from halley.kernels.launch import Launcher, aligned
from halley.kernels.layout import MAX_CHUNKS, NUM_TICKETS, ORDER_BITS, TASK_ROWS, Layout
from halley.kernels.peer import failure, wait
from halley.kernels.publish import (
    local_experts,
    missing_rows,
    publish_task,
    raise_flags,
    record_of,
    smallest_local,
)
from halley.kernels.status import PLAN


# Words of the summary.
USABLE = tl.constexpr(0)  # 1 when all tables came whole; else nothing else of the plan may be read
NUM_TILES = tl.constexpr(1)
NUM_SENDS = tl.constexpr(2)  # end of the list of sends, in whole tasks
NUM_OWN_SENDS = tl.constexpr(3)  # end of this rank's own, in whole tasks

# Words of the marks: how far a launch has come. All but _LAID_OUT are zero between launches.
NUM_MARKS = 16
_TICKET = tl.constexpr(0)
_PUBLISHED = tl.constexpr(1)
_COUNTED = tl.constexpr(2)
_LAID_OUT = tl.constexpr(3)  # epoch of the last plan whose tables were counted
_EXITED = tl.constexpr(4)

_STAGE_ROWS = 16
_ORDER_BITS = tl.constexpr(ORDER_BITS)
_ORDER_MASK = tl.constexpr((1 << ORDER_BITS) - 1)
_TASK_ROWS = tl.constexpr(TASK_ROWS)
_NUM_TICKETS = tl.constexpr(NUM_TICKETS)
_MAX_CHUNKS = tl.constexpr(MAX_CHUNKS)
_PLAN = tl.constexpr(PLAN)
_STEP = tl.constexpr(1024)


@triton.jit
def base_of(plan, i, column, LAYOUT: tl.constexpr):
    """Return where the bases of a column's blocks stand, of the ring's i-th source."""
    return plan + LAYOUT.base + (i * LAYOUT.num_columns + column) * LAYOUT.max_blocks


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
        if is_sends & (i == 0):
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
def _lay_out(plan, host_words, usable, wanted, LAYOUT: tl.constexpr, LOCAL_PADDED: tl.constexpr):
    """Give each expert its first row and its first sends; write the summary; zero the counters."""
    local = tl.arange(0, LOCAL_PADDED)
    real = local < LAYOUT.num_local
    rows = tl.load(plan + LAYOUT.expert_rows + local, mask=real, other=0)
    tiles = tl.cdiv(rows, LAYOUT.block_m)
    first = tl.cumsum(tiles, axis=0) - tiles
    num_tiles = tl.sum(tiles, axis=0)
    tl.store(plan + LAYOUT.expert_begin + local, first * LAYOUT.block_m, mask=real)
    fetch_origins: tl.constexpr = LAYOUT.fetch_origin
    own = _begin_sends(LAYOUT.own_sends, LAYOUT.own_begin, local, real, 0, fetch_origins, plan)
    end = _begin_sends(
        LAYOUT.other_sends, LAYOUT.other_begin, local, real, own, fetch_origins, plan
    )
    kind = tl.arange(0, LAYOUT.padded_k)
    real = kind < LAYOUT.top_k
    kind += LAYOUT.num_local
    sum_origins: tl.constexpr = LAYOUT.sum_origin
    other = _begin_sends(LAYOUT.other_sends, LAYOUT.other_begin, kind, real, 0, sum_origins, plan)
    _begin_sends(LAYOUT.own_sends, LAYOUT.own_begin, kind, real, other, sum_origins, plan)
    summary = plan + LAYOUT.summary
    tl.store(summary + USABLE, usable)
    tl.store(summary + NUM_TILES, num_tiles)
    tl.store(summary + NUM_SENDS, end)
    tl.store(summary + NUM_OWN_SENDS, own)
    tl.store(host_words + 1, (num_tiles * LAYOUT.block_m).to(tl.int64))
    tl.store(host_words + 2, wanted.to(tl.int64))
    tl.store(plan + LAYOUT.home_sources, 0)
    tl.store(plan + LAYOUT.tickets + tl.arange(0, _NUM_TICKETS), 0)
    chunk = tl.arange(0, _MAX_CHUNKS)
    tl.store(plan + LAYOUT.chunk_done + chunk, 0)
    tl.store(plan + LAYOUT.chunk_sent + chunk, 0)


@triton.jit
def _count(
    column, words, plan, epoch, rank, marks, status, host_words, timeout_ns,
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
        else:
            came = 0
    usable = came * (wanted == 0)
    _count_column(column, words, plan, epoch, rank, usable, LAYOUT)
    tl.debug_barrier()
    # Two sums in one word: programs that finished, and those among them that saw all tables.
    before = tl.atomic_add(marks + _COUNTED, 1 + came * 65536, sem="acq_rel", scope="gpu")
    if before % 65536 == num_columns - 1:
        all_came = (before // 65536 + came == num_columns).to(tl.int32)
        _lay_out(plan, host_words, usable * all_came, wanted, LAYOUT, LOCAL_PADDED)
        tl.debug_barrier()
        tl.atomic_xchg(marks + _LAID_OUT, epoch, sem="release", scope="gpu")


@triton.jit
def _load_packed(record, token, LAYOUT: tl.constexpr):
    """Return the packed slots of some tokens, (tokens, padded K); -1 where there is none."""
    k = tl.arange(0, LAYOUT.padded_k)
    real = (token < tl.load(record + LAYOUT.header))[:, None] & (k < LAYOUT.top_k)[None, :]
    at = token[:, None] * LAYOUT.top_k + k[None, :]
    return tl.load(record + LAYOUT.packed + at, mask=real, other=-1)


@triton.jit
def _places(i, block, key, other_key, before, column, plan, LAYOUT: tl.constexpr):
    """Return places in a list: where those of the key begin, of this block, before this one."""
    real = key < other_key
    base = base_of(plan, i, LAYOUT.num_local + column, LAYOUT) + key * LAYOUT.max_blocks + block
    begin = plan + tl.where(i == 0, LAYOUT.own_begin, LAYOUT.other_begin) + column + key
    return tl.load(begin, mask=real, other=0) + tl.load(base, mask=real, other=0) + before


@triton.jit
def _place_sends(i, block, expert_TK, record, plan, rank, LAYOUT: tl.constexpr):
    """Return the places of the sends of one block's tokens in both lists."""
    STEP: tl.constexpr = min(32, LAYOUT.block_tokens)
    smallest = smallest_local(expert_TK, rank, LAYOUT)
    missing = missing_rows(expert_TK, rank, LAYOUT)
    within = tl.arange(0, LAYOUT.block_tokens)
    same_smallest = tl.zeros_like(within)
    same_missing = tl.zeros_like(within)
    for start in range(0, LAYOUT.block_tokens, STEP):
        other = start + tl.arange(0, STEP)
        expert = _load_packed(record, block * LAYOUT.block_tokens + other, LAYOUT) >> _ORDER_BITS
        earlier = other[None, :] < within[:, None]
        same = smallest_local(expert, rank, LAYOUT)[None, :] == smallest[:, None]
        same_smallest += tl.sum((same & earlier).to(tl.int32), axis=1)
        same = missing_rows(expert, rank, LAYOUT)[None, :] == missing[:, None]
        same_missing += tl.sum((same & earlier).to(tl.int32), axis=1)
    fetch = _places(i, block, smallest, LAYOUT.num_local, same_smallest, 0, plan, LAYOUT)
    total = _places(i, block, missing, LAYOUT.top_k, same_missing, LAYOUT.num_local, plan, LAYOUT)
    return fetch, total


@triton.jit
def _place_slots(i, block, words, plan, epoch, rank, LAYOUT: tl.constexpr):
    """Give the slots of one block of tokens of the ring's i-th source their rows and sends."""
    source = (rank + i) % LAYOUT.num_ranks
    record = record_of(words, source, epoch, LAYOUT)
    token = block * LAYOUT.block_tokens + tl.arange(0, LAYOUT.block_tokens)
    k = tl.arange(0, LAYOUT.padded_k)
    packed = _load_packed(record, token, LAYOUT)
    expert = packed >> _ORDER_BITS  # -1 stays -1
    local = local_experts(expert, rank, LAYOUT)
    mine = local < LAYOUT.num_local
    weights = (record + LAYOUT.weights).to(tl.pointer_type(tl.float32))
    at = token[:, None] * LAYOUT.top_k + k[None, :]
    weight = tl.load(weights + at, mask=mine, other=0.0)

    base = base_of(plan, i, 0, LAYOUT) + local * LAYOUT.max_blocks + block
    row = tl.load(plan + LAYOUT.expert_begin + local, mask=mine, other=0)
    row += tl.load(base, mask=mine, other=0)
    row = tl.where(mine, row + (packed & _ORDER_MASK), -1)

    # Slots of this rank first, in the order of k; the rest of the line says that it is empty.
    here = mine.to(tl.int32)
    count = tl.sum(here, axis=1)
    place = tl.cumsum(here, axis=1) - here
    empty = count[:, None] + tl.cumsum(1 - here, axis=1) - (1 - here)
    place = tl.where(mine, place, empty)
    kept = (count > 0)[:, None] & (place < LAYOUT.top_k)
    origin = source * LAYOUT.max_tokens + token
    fetch, total = _place_sends(i, block, expert, record, plan, rank, LAYOUT)
    tl.store(plan + LAYOUT.fetch_origin + fetch, origin, mask=count > 0)
    tl.store(plan + LAYOUT.sum_origin + total, origin, mask=count > 0)
    line = fetch[:, None] * LAYOUT.top_k + place
    tl.store(plan + LAYOUT.fetch_slot + line, row, mask=kept)
    line = total[:, None] * LAYOUT.top_k + place
    tl.store(plan + LAYOUT.sum_slot + line, row, mask=kept)
    sum_weight = (plan + LAYOUT.sum_weight).to(tl.pointer_type(tl.float32))
    tl.store(sum_weight + line, weight, mask=kept)
    if i == 0:
        _note_home(expert, token, record, plan, LAYOUT)


@triton.jit
def _note_home(expert, token, record, plan, LAYOUT: tl.constexpr):
    """Write down which ranks will send sums home for this rank's tokens, a bit a rank."""
    owner = tl.where(expert >= 0, expert // LAYOUT.num_local, -1)
    ranks = tl.zeros_like(token)
    sources = 0
    for peer in range(LAYOUT.num_ranks):
        needs = tl.max((owner == peer).to(tl.int32), axis=1)
        ranks |= needs << peer
        sources |= tl.max(needs, axis=0) << peer
    num_tokens = tl.load(record + LAYOUT.header)
    tl.store(plan + LAYOUT.home_ranks + token, ranks, mask=token < num_tokens)
    tl.atomic_or(plan + LAYOUT.home_sources, sources, sem="relaxed", scope="gpu")


@triton.jit
def _place_tiles(local, plan, LAYOUT: tl.constexpr):
    """Write the tiles of one expert: whose they are, how many rows, nothing arrived yet."""
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
def _place(task, words, plan, epoch, rank, LAYOUT: tl.constexpr):
    """Tasks [0, W * blocks) place the slots of a block each; the next L an expert's tiles."""
    if tl.load(plan + LAYOUT.summary + USABLE) != 0:
        if task < LAYOUT.num_ranks * LAYOUT.max_blocks:
            i = task // LAYOUT.max_blocks
            block = task % LAYOUT.max_blocks
            record = record_of(words, (rank + i) % LAYOUT.num_ranks, epoch, LAYOUT)
            if block * LAYOUT.block_tokens < tl.load(record + LAYOUT.header):
                _place_slots(i, block, words, plan, epoch, rank, LAYOUT)
        else:
            _place_tiles(task - LAYOUT.num_ranks * LAYOUT.max_blocks, plan, LAYOUT)


@triton.jit(
    do_not_specialize=["num_tokens", "wanted_tokens", "epoch", "rank", "num_tasks", "timeout_ns"]
)
def plan_kernel(
    x_TD, idx_TK, weights_TK, num_tokens, wanted_tokens, epoch, rank, num_tasks, stage_TD,
    words, words_ptrs_W, plan, marks, status, host_words, timeout_ns: tl.int64,
    LAYOUT: tl.constexpr, LOCAL_PADDED: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Publish, count and place, by tickets in this order: a task waits for earlier ones only."""
    first_count = num_tasks
    first_place = first_count + LAYOUT.num_columns
    end = first_place + LAYOUT.num_ranks * LAYOUT.max_blocks + LAYOUT.num_local
    healthy = True
    task = tl.atomic_add(marks + _TICKET, 1, sem="relaxed", scope="gpu")
    while task < end:
        if task < first_count:
            publish_task(
                task, x_TD, idx_TK, weights_TK, num_tokens, wanted_tokens, epoch, rank, stage_TD,
                words, words_ptrs_W, LAYOUT, HIDDEN_SIZE, ROWS, COLUMNS,
            )  # fmt: skip
            tl.debug_barrier()
            before = tl.atomic_add(marks + _PUBLISHED, 1, sem="acq_rel", scope="sys")
            if before == num_tasks - 1:
                raise_flags(epoch, rank, words, words_ptrs_W, LAYOUT)
        elif task < first_place:
            _count(
                task - first_count, words, plan, epoch, rank, marks, status, host_words, timeout_ns,
                LAYOUT, LOCAL_PADDED,
            )  # fmt: skip
        elif healthy:
            # Long enough for every count task to tell which rank it is that does not come.
            patience = timeout_ns * (LAYOUT.num_ranks + 1)
            code = failure(_PLAN, rank, 0)
            laid_out = marks + _LAID_OUT
            healthy = wait(laid_out, epoch, patience, status, host_words, code, "gpu")
            if healthy:
                _place(task - first_place, words, plan, epoch, rank, LAYOUT)
        task = tl.atomic_add(marks + _TICKET, 1, sem="relaxed", scope="gpu")
    exited = tl.atomic_add(marks + _EXITED, 1, sem="acq_rel", scope="gpu")
    if exited == tl.num_programs(0) - 1:
        tl.store(marks + _TICKET, 0)
        tl.store(marks + _PUBLISHED, 0)
        tl.store(marks + _COUNTED, 0)
        tl.store(marks + _EXITED, 0)


_launch = Launcher(plan_kernel)


def make_plan(
    plan: torch.Tensor,
    x_TD: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    *,
    epoch: int,
    rank: int,
    layout: Layout,
    stage_TD: torch.Tensor,
    words: torch.Tensor,
    words_ptrs_W: torch.Tensor,
    marks: torch.Tensor,
    num_programs: int,
    status: torch.Tensor,
    host_words: torch.Tensor,
    timeout_ns: int,
) -> None:
    """Exchange rows and routing with all ranks and write the plan of this rank.

    When it is done, the rows of all ranks stand in their stages for peers to read.

    Args:
        plan: written: ``(layout.plan_words,)`` int32, any content before.
        x_TD: tokens of this rank. If they are more than ``layout.max_tokens``, none is published
            but their number.
        topk_idx_TK: expert ids in ``[0, E)`` or ``DROPPED``, an int dtype.
        topk_weights_TK: weights, a float dtype.
        epoch: number of this call: one more than the last, the same on all ranks.
        rank: this rank's index in the group.
        layout: sizes of the group.
        stage_TD: this rank's copy of the symmetric stage, ``(max_tokens, D)``; peers read it.
        words: this rank's mailbox, int32, zero before the first call.
        words_ptrs_W: addresses of all ranks' mailboxes, int64.
        marks: ``(NUM_MARKS,)`` int32, zero before the first call: how far the launch has come.
        num_programs: programs of the launch.
        status, host_words: see ``kernels.status``.
        timeout_ns: how long to wait for a peer.

    If a rank has more tokens than there is room for, the plan is not usable on any rank, and
    ``host_words[2]`` is that number on all of them; it is 0 otherwise.
    """
    x_TD, idx_TK, weights_TK = aligned(x_TD), aligned(topk_idx_TK), aligned(topk_weights_TK)
    num_tokens, hidden_size = x_TD.shape
    wanted_tokens = 0
    if num_tokens > layout.max_tokens:
        num_tokens, wanted_tokens = 0, num_tokens
    tokens_a_task = min(_STAGE_ROWS, layout.block_tokens)
    num_tasks = max(1, -(-num_tokens // tokens_a_task))
    _launch(
        num_programs,
        (x_TD, idx_TK, weights_TK, num_tokens, wanted_tokens, epoch, rank, num_tasks, stage_TD,
         words, words_ptrs_W, plan, marks, status, host_words, timeout_ns),
        (layout, triton.next_power_of_2(layout.num_local), hidden_size, _STAGE_ROWS,
         min(1024, triton.next_power_of_2(hidden_size))),
        dtypes=(x_TD.dtype, idx_TK.dtype, weights_TK.dtype), num_warps=8,
    )  # fmt: skip
