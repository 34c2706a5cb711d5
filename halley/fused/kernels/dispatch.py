# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Dispatch with the first GEMM: multiply tiles whose rows have arrived while fetching other rows.

In forward, the rows are tokens, and the epilogue of a tile is the activation. In backward, the rows
are gradients of the output, and the epilogue is the gradient of the activation.

Source: COMET (arXiv:2502.19811), sections 3.1 and 3.2, with readiness by tile instead of by rank.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from halley.fused.kernels import marks
from halley.fused.kernels.layout import (
    DISPATCH_EXITS,
    FETCH_TICKET,
    FIRST_GEMM_TICKET,
    NUM_COPIES,
    NUM_OWN_COPIES,
    NUM_TILES,
    PASS,
)
from halley.fused.kernels.peer import (
    DISPATCH,
    end_with_first,
    exits_last,
    failure_code,
    fence_async,
    let_second_begin,
    usable_here,
    wait,
)
from halley.ops.kernels.tiles import (
    GemmTile,
    gelu,
    halves,
    multiply_step,
    multiply_tile,
    store_gradient,
    tile_of,
)


# ``fetch_kernel`` reads send buffers, or reads them and saves token copies, or reads saved copies.
FROM_PEERS = tl.constexpr(0)
FROM_PEERS_AND_SAVE = tl.constexpr(1)
FROM_SAVED = tl.constexpr(2)


@triton.jit
def _fetch_task(
    task, send_ptrs_W, first_token, copies_PD, x_RD, plan,
    LAYOUT: tl.constexpr, SOURCE: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Read ``ROWS`` token copies once; store each to all its rows; count the rows as arrived.

    The copies are in the send buffers of the source ranks, in the half that begins at row
    ``first_token``, or in ``copies_PD``.

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
    # Load the row indices of all k at once: one load for each k would wait for memory K times.
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
    """Return how many zero rows pad ``num_rows`` rows to a multiple of ``ZERO_MULTIPLE``."""
    return tl.cdiv(num_rows, ZERO_MULTIPLE) * ZERO_MULTIPLE - num_rows


@triton.jit
def _zero_task(
    local, x_RD, plan, LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr,
    ZERO_MULTIPLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Pad an expert's rows with zeros to a multiple of ``ZERO_MULTIPLE``; count these as arrived.

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
    """Return the fetch task of ticket ``task``: own tokens and other ranks' tokens alternate.

    So the link is busy from the start, and experts that begin with own rows are complete early.
    Example: own tasks 0 and 1, others 2, 3 and 4: tickets 0 to 4 get tasks 0, 2, 1, 3 and 4.
    """
    num_pairs = tl.minimum(num_own, num_tasks - num_own)
    paired = tl.where(task % 2 == 0, task // 2, num_own + task // 2)
    rest = tl.where(num_own > num_pairs, task - num_pairs, task)
    return tl.where(task < 2 * num_pairs, paired, rest)


@triton.jit
def end_dispatch(plan, num_tiles, num_exits, LAYOUT: tl.constexpr):
    """Count a CTA as ended; the last CTA of both kernels (fetch, GEMM) zeroes their counters."""
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
    send_ptrs_W, send_tokens, copies_PD, x_RD, plan, capacity, copy_capacity, num_exits, status,
    LAYOUT: tl.constexpr, MODE: tl.constexpr, HIDDEN_SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Fetch rows from all ranks, or from ``copies_PD``, to ``x_RD``; count arrived rows by tile.

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
    cta_record, num_marks = marks.begin(status, marks.FETCH_KERNEL, MODE.backward, LAYOUT)
    ZERO_MULTIPLE: tl.constexpr = MODE.zero_multiple
    usable = usable_here(plan, capacity, copy_capacity, LAYOUT)
    num_tiles = tl.load(plan + LAYOUT.summary + NUM_TILES) * usable
    num_fetch = tl.load(plan + LAYOUT.summary + NUM_COPIES) // ROWS * usable
    num_own = tl.load(plan + LAYOUT.summary + NUM_OWN_COPIES) // ROWS * usable
    # Tasks that write zero rows come first: an expert's last tile waits for these rows.
    num_zero = (LAYOUT.num_local if ZERO_MULTIPLE > 0 else 0) * usable
    num_tasks = num_fetch + num_zero
    first_token = (tl.load(plan + LAYOUT.summary + PASS) % 2).to(tl.int64) * send_tokens
    ticket = plan + LAYOUT.tickets + FETCH_TICKET
    more = num_tasks > 0
    while more:
        num_marks = marks.add(cta_record, num_marks, marks.FETCH, LAYOUT)
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
    num_marks = marks.add(cta_record, num_marks, marks.OTHER, LAYOUT)
    end_dispatch(plan, num_tiles, num_exits, LAYOUT)
    marks.end(cta_record, num_marks, LAYOUT)


@dataclass(frozen=True, kw_only=True)
class DispatchMode:
    """Options of ``fetch_kernel`` and ``arrived_gemm_kernel``, passed to them as one constexpr."""

    gated: bool  # whether the activation has two projections, gate and up (SwiGLU)
    backward: bool = False  # whether the rows are gradients of the output instead of tokens
    save_pre: bool = False  # whether forward stores the inputs of the activation for backward
    row_source: int = FROM_PEERS.value  # one of the constants ``FROM_...``
    zero_multiple: int = 0  # zero rows pad each expert's rows to a multiple of this; 0: no padding

    @property
    def num_projections(self) -> int:
        return 2 if self.gated else 1

    def tile_columns(self, tile: GemmTile) -> int:
        """Return the number of columns of the activation that one GEMM tile computes."""
        return tile.block_n if self.backward else tile.block_n // self.num_projections


@triton.jit
def _store_activated(
    acc, h_desc, pre_desc, row, column,
    GATED: tl.constexpr, SAVE_PRE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if GATED:
        gate, up = halves(acc, BLOCK_M, BLOCK_N)
        h_desc.store([row, column], (gate * tl.sigmoid(gate) * up).to(h_desc.dtype))
        if SAVE_PRE:
            half: tl.constexpr = BLOCK_N // 2
            pre_desc.store([row, 0, column], gate.to(h_desc.dtype).reshape(BLOCK_M, 1, half))
            pre_desc.store([row, 1, column], up.to(h_desc.dtype).reshape(BLOCK_M, 1, half))
    else:
        h_desc.store([row, column], gelu(acc).to(h_desc.dtype))
        if SAVE_PRE:
            pre_desc.store([row, 0, column], acc.to(h_desc.dtype).reshape(BLOCK_M, 1, BLOCK_N))


@triton.jit
def _prefetch_pre(
    pre_RG, row, column,
    GATED: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Prefetch a tile of ``pre_RG`` into the L2 cache, because ``store_gradient`` reads it."""
    LINE: tl.constexpr = 128 // (pre_RG.dtype.element_ty.primitive_bitwidth // 8)
    NUM_LINES: tl.constexpr = (BLOCK_N + LINE - 1) // LINE
    columns = column + tl.arange(0, NUM_LINES) * LINE
    columns = tl.minimum(columns, SIZE - 1)[None, :]
    rows = (row + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    for projection in tl.static_range(2 if GATED else 1):
        at = rows * (2 * SIZE if GATED else SIZE) + columns + projection * SIZE
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b64 $0, $1;", "=l,l", [(pre_RG + at).to(tl.int64)],
            dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _store_tile(
    acc, row, column, index, num_rows, h, pre, dpre, weight_R, dweight_RJ, MODE: tl.constexpr,
    SIZE: tl.constexpr, NUM_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if MODE.backward:
        store_gradient(
            acc, num_rows, h, pre, dpre, weight_R, dweight_RJ, row, column, index,
            MODE.gated, SIZE, NUM_COLUMNS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        _store_activated(acc, h, pre, row, column, MODE.gated, MODE.save_pre, BLOCK_M, BLOCK_N)


@triton.jit
def _first_gemm_run(
    row, expert, first, columns, num_rows, a_desc, b_desc, h, pre, dpre, weight_R, dweight_RJ,
    MODE: tl.constexpr, DEPTH: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Compute and store ``columns`` adjacent tiles of one row tile, from column tile ``first`` on.

    One loop has the steps of all tiles: loads of a tile start during the previous one.
    """
    TRANSPOSED: tl.constexpr = MODE.backward
    STEPS: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    NUM_COLUMNS: tl.constexpr = (SIZE + BLOCK_F - 1) // BLOCK_F
    if RUN == 1:
        column = first * BLOCK_F
        if MODE.backward:
            # The epilogue reads the activation's inputs: prefetch them during the main loop.
            _prefetch_pre(pre, row, column, MODE.gated, SIZE, BLOCK_M, BLOCK_N)
        acc = multiply_tile(
            a_desc, b_desc, row, expert, column, DEPTH, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K
        )
        _store_tile(
            acc, row, column, first, num_rows, h, pre, dpre, weight_R, dweight_RJ,
            MODE, SIZE, NUM_COLUMNS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, columns * STEPS):
            index = first + step // STEPS
            column = index * BLOCK_F
            k = (step % STEPS) * BLOCK_K
            if MODE.backward:
                if k == 0:
                    _prefetch_pre(pre, row, column, MODE.gated, SIZE, BLOCK_M, BLOCK_N)
            acc = multiply_step(
                acc, a_desc, b_desc, row, expert, column, k, TRANSPOSED, BLOCK_N, BLOCK_K
            )
            if step % STEPS == STEPS - 1:
                _store_tile(
                    acc, row, column, index, num_rows, h, pre, dpre, weight_R, dweight_RJ,
                    MODE, SIZE, NUM_COLUMNS, BLOCK_M, BLOCK_N,
                )  # fmt: skip
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit(do_not_specialize=["capacity", "copy_capacity", "num_exits", "timeout_ns"])
def arrived_gemm_kernel(
    plan, a_desc, b_desc, h, pre, dpre, weight_R, dweight_RJ,
    capacity, copy_capacity, num_exits, status, host_status, timeout_ns: tl.int64,
    LAYOUT: tl.constexpr, MODE: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, INTERMEDIATE_SIZE: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Compute the first GEMM of forward or backward; a tile waits until its rows have arrived.

    CTAs take tiles by tickets of one counter. A CTA waits for ``tile_arrived`` of its tile::

        fetch_kernel: store rows, tile_arrived[t] += n (release)
                                  |
        arrived_gemm_kernel: wait for tile_arrived[t] >= rows of tile t (acquire), load, multiply

    There is no deadlock. The fetch kernel waits for nothing and is launched first. This kernel
    begins only when all CTAs of the fetch kernel run, so it cannot occupy the SMs that they need.

    ``h``, ``pre`` and ``dpre`` are tensor descriptors in forward and pointers in backward. Backward
    stores four parts of a tile to three tensors each. With TMA it would wait for each store.

    Example: 300 rows of one expert are tiles 0, 1 and 2 with 128, 128 and 44 rows. With 2 column
    tiles and ``GROUP`` 8, tickets 0-2 are the tiles of column 0, tickets 3-5 those of column 1.
    """
    cta_record, num_marks = marks.begin(status, marks.FIRST_GEMM_KERNEL, MODE.backward, LAYOUT)
    BLOCK_M: tl.constexpr = LAYOUT.block_m
    ZERO_MULTIPLE: tl.constexpr = MODE.zero_multiple
    num_columns: tl.constexpr = (INTERMEDIATE_SIZE + BLOCK_F - 1) // BLOCK_F
    num_runs: tl.constexpr = (num_columns + RUN - 1) // RUN
    usable = usable_here(plan, capacity, copy_capacity, LAYOUT)
    num_tiles = tl.load(plan + LAYOUT.summary + NUM_TILES) * usable
    total = num_tiles * num_runs
    tickets = plan + LAYOUT.tickets + FIRST_GEMM_TICKET
    ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    while ticket < total:
        num_marks = marks.add(cta_record, num_marks, marks.WAIT, LAYOUT)
        tile, run = tile_of(ticket, num_tiles, num_runs, GROUP)
        expert = tl.load(plan + LAYOUT.tile_expert + tile)
        num_rows = tl.load(plan + LAYOUT.tile_rows + tile)
        need = num_rows
        if ZERO_MULTIPLE > 0:
            need += num_zero_rows(num_rows, ZERO_MULTIPLE)
        arrived = plan + LAYOUT.tile_arrived + tile
        code = failure_code(DISPATCH, 0, tile)
        if wait(arrived, need, timeout_ns, status, host_status, code, "gpu"):
            fence_async()
            num_marks = marks.add(cta_record, num_marks, marks.MULTIPLY, LAYOUT)
            first = run * RUN
            _first_gemm_run(
                tile * BLOCK_M, expert, first, tl.minimum(num_columns - first, RUN), num_rows,
                a_desc, b_desc, h, pre, dpre, weight_R, dweight_RJ,
                MODE, HIDDEN_SIZE, INTERMEDIATE_SIZE, RUN, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_F,
            )  # fmt: skip
            ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
        else:
            ticket = total  # a wait failed, so this CTA ends
    num_marks = marks.add(cta_record, num_marks, marks.OTHER, LAYOUT)
    end_dispatch(plan, num_tiles, num_exits, LAYOUT)
    end_with_first()
    marks.end(cta_record, num_marks, LAYOUT)
