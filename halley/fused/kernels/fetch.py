# Triton kernels: pyright reads them as plain Python and reports errors that are none.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Fetch the rows of a plan: read each token copy once over the link, store it to all its rows.

``dispatch.py`` launches this kernel beside the GEMM that multiplies the rows.
"""

import triton
import triton.language as tl

from halley.fused.kernels.dispatch_plan import usable_here
from halley.fused.kernels.layout import (
    DISPATCH_EXITS,
    FETCH_TICKET,
    FIRST_GEMM_TICKET,
    NUM_COPIES,
    NUM_OWN_COPIES,
    NUM_TILES,
    PASS,
)
from halley.fused.kernels.peer import exits_last
from halley.fused.launch_pair import let_second_begin


# The memory from which rows are read, and whether token copies are saved.
FROM_PEERS = tl.constexpr(0)
FROM_PEERS_AND_SAVE = tl.constexpr(1)
FROM_SAVED = tl.constexpr(2)


@triton.jit
def _fetch_task(
    task, send_ptrs_W, first_token, copies_PD, x_RD, plan,
    LAYOUT: tl.constexpr, SOURCE: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Read ``ROWS`` token copies once over the link and store each to all its rows.

    ``first_token`` is the first row of this pass's half of the send buffers.

    Example: token copy 5 is token 9 of rank 1 with rows (3, 130). Row 9 of rank 1's send buffer is
    stored to rows 3 and 130 of ``x_RD``. Then ``tile_arrived`` of tiles 0 and 1 (128 rows each)
    grows by one. If token copies are saved, the row is also stored to row 5 of ``copies_PD``.
    """
    TOP_K: tl.constexpr = LAYOUT.top_k
    copy = task * ROWS + tl.arange(0, ROWS)
    origin = tl.load(plan + LAYOUT.fetch_origin + copy)  # source rank * max_tokens + token
    real = origin >= 0
    k = tl.arange(0, LAYOUT.padded_k)
    line = (copy * TOP_K)[:, None] + k[None, :]
    listed = real[:, None] & (k < TOP_K)[None, :]
    # One load for all rows of the copies: a load for each k would wait for memory K times.
    row_RK = tl.load(plan + LAYOUT.fetch_rows + line, mask=listed, other=-1)
    most_rows = tl.max(tl.sum((row_RK >= 0).to(tl.int32), axis=1), axis=0)
    if SOURCE == FROM_SAVED:
        base = copies_PD + (copy.to(tl.int64) * HIDDEN_SIZE)[:, None]
    else:
        token = first_token + (origin % LAYOUT.max_tokens).to(tl.int64)
        sender = tl.load(send_ptrs_W + origin // LAYOUT.max_tokens, mask=real, other=0)
        base = tl.multiple_of(sender.to(x_RD.dtype), 16)[:, None] + (token * HIDDEN_SIZE)[:, None]
    for start in range(0, HIDDEN_SIZE, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (column < HIDDEN_SIZE)[None, :]
        value = tl.load(base + column[None, :], mask=real[:, None] & inside)
        if SOURCE == FROM_PEERS_AND_SAVE:
            to = (copy.to(tl.int64) * HIDDEN_SIZE)[:, None] + column[None, :]
            tl.store(copies_PD + to, value, mask=real[:, None] & inside)
        for slot in tl.static_range(TOP_K):
            if slot < most_rows:
                row = tl.max(tl.where(k[None, :] == slot, row_RK, -1), axis=1)
                to = (row.to(tl.int64) * HIDDEN_SIZE)[:, None] + column[None, :]
                tl.store(x_RD + to, value, mask=(row >= 0)[:, None] & inside)
    tl.debug_barrier()  # the rows of all threads are stored before one thread releases
    arrived = plan + LAYOUT.tile_arrived + row_RK // LAYOUT.block_m
    tl.atomic_add(arrived, 1, mask=row_RK >= 0, sem="release", scope="gpu")


@triton.jit
def num_zero_rows(num_rows, ZERO_MULTIPLE: tl.constexpr):
    """Return how many rows follow ``num_rows`` up to a multiple of ``ZERO_MULTIPLE``."""
    return tl.cdiv(num_rows, ZERO_MULTIPLE) * ZERO_MULTIPLE - num_rows


@triton.jit
def _zero_task(
    local, x_RD, plan, LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr,
    ZERO_MULTIPLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Zero the rows after an expert's rows up to a multiple, and count them as arrived.

    The weight-gradient GEMM sums over whole steps of ``block_k`` rows. A row that is zero in
    ``x_RD`` is zero in all results of its tile, forward and backward, so it adds nothing.
    """
    num_rows = tl.load(plan + LAYOUT.expert_rows + local)
    begin = tl.load(plan + LAYOUT.expert_begin + local) + num_rows
    end = begin + num_zero_rows(num_rows, ZERO_MULTIPLE)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        for start in range(0, HIDDEN_SIZE, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            to = (row.to(tl.int64) * HIDDEN_SIZE)[:, None] + column[None, :]
            inside = (row < end)[:, None] & (column < HIDDEN_SIZE)[None, :]
            tl.store(x_RD + to, tl.zeros((ROWS, COLUMNS), x_RD.dtype.element_ty), mask=inside)
    if end > begin:
        tl.debug_barrier()
        arrived = plan + LAYOUT.tile_arrived + begin // LAYOUT.block_m
        tl.atomic_add(arrived, end - begin, sem="release", scope="gpu")


@triton.jit
def _alternate(task, num_own, num_tasks):
    """Return the fetch task of a ticket: tasks of own rows and of other ranks' rows alternate.

    So the link is busy from the start, and experts that begin with own rows are complete early.
    Example: own tasks 0 and 1, others 2, 3 and 4: tickets 0 to 4 get tasks 0, 2, 1, 3 and 4.
    """
    num_pairs = tl.minimum(num_own, num_tasks - num_own)
    paired = tl.where(task % 2 == 0, task // 2, num_own + task // 2)
    rest = tl.where(num_own > num_pairs, task - num_pairs, task)
    return tl.where(task < 2 * num_pairs, paired, rest)


@triton.jit
def end_dispatch(plan, num_tiles, num_exits, LAYOUT: tl.constexpr):
    """Count a CTA that ends; the last one of fetch and first GEMM zeroes their counters.

    So another pass can use the same plan.
    """
    STEP: tl.constexpr = 1024
    tickets = plan + LAYOUT.tickets
    if exits_last(tickets + DISPATCH_EXITS, num_exits):
        tl.store(tickets + FETCH_TICKET, 0)
        tl.store(tickets + FIRST_GEMM_TICKET, 0)
        tl.store(tickets + DISPATCH_EXITS, 0)
        for start in range(0, num_tiles, STEP):
            tile = start + tl.arange(0, STEP)
            tl.store(plan + LAYOUT.tile_arrived + tile, 0, mask=tile < num_tiles)


@triton.jit(do_not_specialize=["send_tokens", "capacity", "copy_capacity", "num_exits"])
def fetch_kernel(
    send_ptrs_W, send_tokens, copies_PD, x_RD, plan, capacity, copy_capacity, num_exits,
    LAYOUT: tl.constexpr, MODE: tl.constexpr, HIDDEN_SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store all rows of the plan to ``x_RD``, zero padding rows, and count arrivals by tile.

    CTAs take zero tasks, then fetch tasks, by tickets of one counter::

        send buffers of all ranks, or copies_PD
                 | load, store to x_RD
        fetch_kernel: tile_arrived[t] += n (release)
                 |
        arrived_gemm_kernel: waits for tile_arrived[t]

    This kernel waits for nothing. The launch before it (``plan_kernel`` or ``publish_rows_kernel``)
    ends only when the rows of all ranks are in their send buffers. So the GEMM beside this kernel
    always gets its rows.

    Example: expert 0 has 3 rows and ``MODE.zero_multiple`` is 4. A zero task zeroes row 3, and tile
    0 has all its rows when ``tile_arrived[0]`` is 4.
    """
    let_second_begin()
    ZERO_MULTIPLE: tl.constexpr = MODE.zero_multiple
    usable = usable_here(plan, capacity, copy_capacity, LAYOUT)
    num_tiles = tl.load(plan + LAYOUT.summary + NUM_TILES) * usable
    num_fetch = tl.load(plan + LAYOUT.summary + NUM_COPIES) // ROWS * usable
    num_own = tl.load(plan + LAYOUT.summary + NUM_OWN_COPIES) // ROWS * usable
    # Zero tasks first: the tiles of experts with few rows wait for them.
    num_zero = (LAYOUT.num_local if ZERO_MULTIPLE > 0 else 0) * usable
    num_tasks = num_fetch + num_zero
    first_token = (tl.load(plan + LAYOUT.summary + PASS) % 2).to(tl.int64) * send_tokens
    ticket = plan + LAYOUT.tickets + FETCH_TICKET
    more = num_tasks > 0
    while more:
        task = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
        if task < num_zero:
            if ZERO_MULTIPLE > 0:
                _zero_task(task, x_RD, plan, LAYOUT, HIDDEN_SIZE, ZERO_MULTIPLE, ROWS, COLUMNS)
        elif task < num_tasks:
            _fetch_task(
                _alternate(task - num_zero, num_own, num_fetch),
                send_ptrs_W, first_token, copies_PD, x_RD, plan,
                LAYOUT, MODE.row_source, HIDDEN_SIZE, ROWS, COLUMNS,
            )  # fmt: skip
        more = task + 1 < num_tasks
    end_dispatch(plan, num_tiles, num_exits, LAYOUT)
