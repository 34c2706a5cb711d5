# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Layer0: fetch the rows of other ranks while the tiles whose rows are here are multiplied.

One persistent launch. Fetch tasks and tiles are taken by atomic tickets, so a program's role is
what it does next: all begin with this rank's own rows, a few go on fetching, the rest multiply, and
a program whose tile still waits for rows fetches some meanwhile. A program waits only for tickets
that were taken before, by programs that never wait while they fetch: no deadlock, whatever the
number of programs that run at a time.

Source: COMET (arXiv:2502.19811), sections 3.1 and 3.2, with readiness by tile and not by rank.
"""

import torch
import triton
import triton.language as tl

from halley.kernels.knobs import Knobs
from halley.kernels.launch import Launcher
from halley.kernels.layout import Layout
from halley.kernels.peer import failure, fence_async, poll, wait
from halley.kernels.plan_words import NUM_OWN_SENDS, NUM_SENDS, NUM_TILES, USABLE
from halley.kernels.status import DISPATCH
from halley.kernels.tiles import (
    describe,
    describe_rows,
    describe_weights,
    gelu,
    halves,
    multiply_step,
    multiply_tile,
    tile_of,
)


_DISPATCH = tl.constexpr(DISPATCH)
# Words of the tickets; gemm_combine has the others.
_FETCH_TICKET = tl.constexpr(0)
_TILE_TICKET = tl.constexpr(1)
_EXITED = tl.constexpr(5)


@triton.jit
def _fetch(
    task, stage_ptrs_W, x_RD, plan,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Read the rows of some sends once over the link, write each to all its experts' rows.

    Example: send 5 is token 9 of rank 1 with slots (3, 130): row 9 of rank 1's stage becomes rows 3
    and 130 of ``x_RD``, and tiles 0 and 1 (of 128 rows) count one row more.
    """
    TOP_K: tl.constexpr = LAYOUT.top_k
    send = task * ROWS + tl.arange(0, ROWS)
    origin = tl.load(plan + LAYOUT.fetch_origin + send)
    real = origin >= 0
    k = tl.arange(0, LAYOUT.padded_k)
    line = (send * TOP_K)[:, None] + k[None, :]
    listed = real[:, None] & (k < TOP_K)[None, :]
    # All slots at once, then taken apart in registers: a load of each would be a wait of each.
    row_RK = tl.load(plan + LAYOUT.fetch_slot + line, mask=listed, other=-1)
    most = tl.max(tl.sum((row_RK >= 0).to(tl.int32), axis=1), axis=0)
    token = (origin % LAYOUT.max_tokens).to(tl.int64)
    stage = tl.load(stage_ptrs_W + origin // LAYOUT.max_tokens, mask=real, other=0)
    base = tl.multiple_of(stage.to(x_RD.dtype), 16)[:, None]
    for start in range(0, HIDDEN_SIZE, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (column < HIDDEN_SIZE)[None, :]
        at = (token * HIDDEN_SIZE)[:, None] + column[None, :]
        value = tl.load(base + at, mask=real[:, None] & inside)
        for slot in tl.static_range(TOP_K):
            if slot < most:
                row = tl.max(tl.where(k[None, :] == slot, row_RK, -1), axis=1)
                to = (row.to(tl.int64) * HIDDEN_SIZE)[:, None] + column[None, :]
                tl.store(x_RD + to, value, mask=(row >= 0)[:, None] & inside)
    tl.debug_barrier()
    arrived = plan + LAYOUT.tile_arrived + row_RK // LAYOUT.block_m
    tl.atomic_add(arrived, 1, mask=row_RK >= 0, sem="release", scope="gpu")


@triton.jit
def _reset(plan, num_tiles, LAYOUT: tl.constexpr):
    """Leave the counters as the plan had them, for whoever runs on this plan again."""
    STEP: tl.constexpr = 1024
    tickets = plan + LAYOUT.tickets
    tl.store(tickets + _FETCH_TICKET, 0)
    tl.store(tickets + _TILE_TICKET, 0)
    tl.store(tickets + _EXITED, 0)
    for start in range(0, num_tiles, STEP):
        tile = start + tl.arange(0, STEP)
        tl.store(plan + LAYOUT.tile_arrived + tile, 0, mask=tile < num_tiles)


@triton.jit
def _store_activated(
    acc, h_desc, pre_desc, row, column,
    GATED: tl.constexpr, KEEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the activation of a tile and, for backward, what went into it."""
    if GATED:
        gate, up = halves(acc, BLOCK_M, BLOCK_N)
        h_desc.store([row, column], (gate * tl.sigmoid(gate) * up).to(h_desc.dtype))
        if KEEP:
            part: tl.constexpr = BLOCK_N // 2
            pre_desc.store([row, 0, column], gate.to(h_desc.dtype).reshape(BLOCK_M, 1, part))
            pre_desc.store([row, 1, column], up.to(h_desc.dtype).reshape(BLOCK_M, 1, part))
    else:
        h_desc.store([row, column], gelu(acc).to(h_desc.dtype))
        if KEEP:
            pre_desc.store([row, 0, column], acc.to(h_desc.dtype).reshape(BLOCK_M, 1, BLOCK_N))


@triton.jit
def _multiply_run(
    row, expert, first, columns, a_desc, b_desc, h_desc, pre_desc,
    DEPTH: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr, RUN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Make some tiles side by side; if more than one, in one loop, whose loads run on."""
    BLOCK_F: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    STEPS: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    if RUN == 1:
        column = first * BLOCK_F
        acc = multiply_tile(a_desc, b_desc, row, expert, column, DEPTH, BLOCK_M, BLOCK_N, BLOCK_K)
        _store_activated(acc, h_desc, pre_desc, row, column, GATED, KEEP, BLOCK_M, BLOCK_N)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, columns * STEPS):
            column = (first + step // STEPS) * BLOCK_F
            k = (step % STEPS) * BLOCK_K
            acc = multiply_step(acc, a_desc, b_desc, row, expert, column, k, BLOCK_N, BLOCK_K)
            if step % STEPS == STEPS - 1:
                _store_activated(acc, h_desc, pre_desc, row, column, GATED, KEEP, BLOCK_M, BLOCK_N)
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit(
    do_not_specialize=["num_fetchers", "capacity", "fetch_part", "multiply_part", "timeout_ns"]
)
def dispatch_gemm_kernel(
    stage_ptrs_W, x_RD, plan, a_desc, b_desc, h_desc, pre_desc,
    num_fetchers, capacity, fetch_part, multiply_part, status, host_words, timeout_ns: tl.int64,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, INTERMEDIATE_SIZE: tl.constexpr,
    GATED: tl.constexpr, KEEP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Fetch and multiply by tickets. A ``_part`` is 1, or 0 to leave that out."""
    BLOCK_M: tl.constexpr = LAYOUT.block_m
    BLOCK_F: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    num_columns: tl.constexpr = (INTERMEDIATE_SIZE + BLOCK_F - 1) // BLOCK_F
    num_runs: tl.constexpr = (num_columns + RUN - 1) // RUN
    num_tiles = tl.load(plan + LAYOUT.summary + NUM_TILES)
    usable = tl.load(plan + LAYOUT.summary + USABLE) * (num_tiles * BLOCK_M <= capacity)
    num_tiles *= usable
    total = num_tiles * num_runs * multiply_part
    num_tasks = tl.load(plan + LAYOUT.summary + NUM_SENDS) // ROWS * usable * fetch_part
    num_first = tl.load(plan + LAYOUT.summary + NUM_OWN_SENDS) // ROWS * usable * fetch_part
    if (tl.program_id(0) < num_fetchers) | (multiply_part == 0):
        num_first = num_tasks
    tickets = plan + LAYOUT.tickets
    ticket = tl.atomic_add(tickets + _TILE_TICKET, multiply_part, sem="relaxed", scope="gpu")
    more = num_tasks > 0
    fetching = num_first > 0
    while (ticket < total) | fetching:
        tile, run = tile_of(ticket % tl.maximum(total, 1), num_tiles, num_runs, GROUP)
        expert = tl.load(plan + LAYOUT.tile_expert + tile)
        need = tl.load(plan + LAYOUT.tile_rows + tile)
        arrived = plan + LAYOUT.tile_arrived + tile
        ready = False
        if not fetching:
            ready = poll(arrived, "gpu") >= need
        if fetching | (more & (not ready)):
            task = tl.atomic_add(tickets + _FETCH_TICKET, 1, sem="relaxed", scope="gpu")
            if task < num_tasks:
                _fetch(task, stage_ptrs_W, x_RD, plan, LAYOUT, HIDDEN_SIZE, ROWS, COLUMNS)
            more = task + 1 < num_tasks
            fetching = task + 1 < num_first
        else:
            if not ready:
                code = failure(_DISPATCH, 0, tile)
                ready = wait(arrived, need, timeout_ns, status, host_words, code, "gpu")
            if ready:
                fence_async()
                first = run * RUN
                _multiply_run(
                    tile * BLOCK_M, expert, first, tl.minimum(num_columns - first, RUN),
                    a_desc, b_desc, h_desc, pre_desc,
                    HIDDEN_SIZE, GATED, KEEP, RUN, BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                ticket = tl.atomic_add(tickets + _TILE_TICKET, 1, sem="relaxed", scope="gpu")
            else:
                ticket = total
    if multiply_part != 0:  # the last part there is
        before = tl.atomic_add(tickets + _EXITED, 1, sem="acq_rel", scope="gpu")
        if before == tl.num_programs(0) - 1:
            _reset(plan, num_tiles, LAYOUT)


_launch = Launcher(dispatch_gemm_kernel)


def dispatch_gemm(
    x_RD: torch.Tensor,
    h_RF: torch.Tensor,
    pre_RG: torch.Tensor | None,
    *,
    stage_ptrs_W: torch.Tensor,
    plan: torch.Tensor,
    up_LGD: torch.Tensor,
    gated: bool,
    layout: Layout,
    knobs: Knobs,
    num_programs: int,
    status: torch.Tensor,
    host_words: torch.Tensor,
    timeout_ns: int,
    fused: bool = True,
) -> None:
    """Bring this rank's rows together and multiply them by the first projection.

    Args:
        x_RD: written: rows sorted by expert, padded to tiles, any content before.
        h_RF: written: activations of these rows.
        pre_RG: written if given: what the activation was made of (gate, up), for backward.
        stage_ptrs_W: addresses of all ranks' stages.
        plan: made by ``make_plan`` for this call.
        up_LGD: stacked weights, ``(L, 2F, D)`` if gated (gate first), else ``(L, F, D)``.
        fused: False fetches all rows first, in a launch of its own.

    A plan with more rows than ``x_RD`` does nothing: the caller reads the number of rows and comes
    again with larger buffers.
    """
    hidden_size, intermediate_size = x_RD.shape[1], h_RF.shape[1]
    tile, parts = knobs.up, 2 if gated else 1
    block_f = tile.block_n // parts
    h_desc = describe_rows(h_RF, block_rows=layout.block_m, block_columns=block_f)
    pre_desc = h_desc
    if pre_RG is not None:
        pre = pre_RG.view(-1, parts, intermediate_size)
        block = [layout.block_m, 1, block_f]
        pre_desc = describe(pre, list(pre.shape), list(pre.stride()), block)
    x_desc = describe_rows(x_RD, block_rows=layout.block_m, block_columns=tile.block_k)
    up_desc = describe_weights(up_LGD, parts=parts, tile=tile)
    for fetch, multiply in ((1, 1),) if fused else ((1, 0), (0, 1)):
        _launch(
            num_programs,
            (stage_ptrs_W, x_RD, plan, x_desc, up_desc, h_desc, pre_desc, knobs.num_fetchers,
             x_RD.shape[0], fetch, multiply, status, host_words, timeout_ns),
            (layout, hidden_size, intermediate_size, gated, pre_RG is not None,
             *knobs.fetch_block(hidden_size), tile.block_n, tile.block_k, tile.group,
             tile.run),
            dtypes=(x_RD.dtype,), num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
