# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Layer1: sum and send home the columns that are multiplied while the next are.

One persistent launch. Tiles go columns first, in chunks; when all rows of a chunk stand, the rows
of each (token, source rank) are weighted, summed in float32 and stored in the home buffer of the
token's rank; when the last of a chunk is sent, a flag goes after it, and home adds up what its
ranks sent. All three kinds of work are taken by atomic tickets. Programs wait for tiles that were
taken before, and for ranks that obey the same rule.

Source: COMET (arXiv:2502.19811), section 3.1 (columns first) and 3.2.
"""

import torch
import triton
import triton.language as tl

from halley.kernels.knobs import Knobs
from halley.kernels.launch import Launcher
from halley.kernels.layout import MAX_CHUNKS, TASK_ROWS, Layout
from halley.kernels.peer import failure, peer_ptr, poll, signal, wait, wait_bulk_stores
from halley.kernels.plan_words import NUM_SENDS, NUM_TILES, USABLE
from halley.kernels.status import COMBINE, HOME
from halley.kernels.tiles import (
    describe_rows,
    describe_weights,
    multiply_step,
    multiply_tile,
    tile_of,
)


_COMBINE = tl.constexpr(COMBINE)
_HOME = tl.constexpr(HOME)
_TASK_ROWS = tl.constexpr(TASK_ROWS)
_MAX_CHUNKS = tl.constexpr(MAX_CHUNKS)
_MAX_RUN = tl.constexpr(1024)  # more tiles than a run has: chunk and tiles fit one word
# Words of the tickets; dispatch_gemm has the others.
_TILE_TICKET = tl.constexpr(2)
_TASK_TICKET = tl.constexpr(3)
_HOME_TICKET = tl.constexpr(4)
_EXITED = tl.constexpr(6)


@triton.jit
def _load_sends(first, plan, LAYOUT: tl.constexpr, ROWS: tl.constexpr):
    """Return origin, rows and weights of some sends; what is not there is -1, -1 and 0."""
    send = first + tl.arange(0, ROWS)
    k = tl.arange(0, LAYOUT.padded_k)
    origin = tl.load(plan + LAYOUT.sum_origin + send)
    line = send[:, None] * LAYOUT.top_k + k[None, :]
    weights = (plan + LAYOUT.sum_weight).to(tl.pointer_type(tl.float32))
    real = (origin >= 0)[:, None] & (k < LAYOUT.top_k)[None, :]
    row_RK = tl.load(plan + LAYOUT.sum_slot + line, mask=real, other=-1)
    weight_RK = tl.load(weights + line, mask=real, other=0.0)
    return origin, row_RK, weight_RK


@triton.jit
def _combine(
    task, chunk, num_tasks, z_RD, plan, home_ptrs_W, words, words_ptrs_W, rank, epoch,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum the rows of some sends over one chunk of columns and store them at their home.

    Example: send 5 is token 9 of rank 1 with slots (3, 130) and weights (0.6, 0.4); on rank 0 its
    sum ``0.6 z[3] + 0.4 z[130]`` becomes row 9 of rank 0's part of rank 1's home buffer.
    """
    TOP_K: tl.constexpr = LAYOUT.top_k
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = (column < HIDDEN_SIZE)[None, :] if HIDDEN_SIZE % CHUNK else True
    k = tl.arange(0, LAYOUT.padded_k)
    first = task * _TASK_ROWS
    origin, row_RK, weight_RK = _load_sends(first, plan, LAYOUT, ROWS)
    for start in range(0, _TASK_ROWS, ROWS):
        # What the next rows are is read while these rows are on their way.
        next_send = first + tl.minimum(start + ROWS, _TASK_ROWS - ROWS)
        next_origin, next_row_RK, next_weight_RK = _load_sends(next_send, plan, LAYOUT, ROWS)
        most = tl.max(tl.sum((row_RK >= 0).to(tl.int32), axis=1), axis=0)
        acc = tl.zeros((ROWS, CHUNK), tl.float32)
        for first_slot in tl.static_range(0, TOP_K, UNROLL):
            if first_slot < most:
                # Loads of several slots are in flight at once.
                for i in tl.static_range(UNROLL):
                    this = k[None, :] == first_slot + i
                    row = tl.max(tl.where(this, row_RK, -1), axis=1)
                    weight = tl.sum(tl.where(this, weight_RK, 0.0), axis=1)
                    at = (row.to(tl.int64) * HIDDEN_SIZE)[:, None] + column[None, :]
                    mask = (row >= 0)[:, None] & inside
                    value = tl.load(z_RD + at, mask=mask, other=0.0)
                    acc += weight[:, None] * value.to(tl.float32)
        real = origin >= 0
        token = (origin % LAYOUT.max_tokens).to(tl.int64)
        home = tl.load(home_ptrs_W + origin // LAYOUT.max_tokens, mask=real, other=0)
        home = tl.multiple_of(home.to(z_RD.dtype), 16)[:, None]
        to = ((rank * LAYOUT.max_tokens + token) * HIDDEN_SIZE)[:, None] + column[None, :]
        tl.store(home + to, acc.to(z_RD.dtype.element_ty), mask=real[:, None] & inside)
        origin, row_RK, weight_RK = next_origin, next_row_RK, next_weight_RK
    tl.debug_barrier()
    sent = plan + LAYOUT.chunk_sent + chunk
    if tl.atomic_add(sent, 1, sem="acq_rel", scope="sys") == num_tasks - 1:
        for peer in range(LAYOUT.num_ranks):
            flag = peer_ptr(words_ptrs_W, peer, words) + LAYOUT.home
            signal(flag + rank * _MAX_CHUNKS + chunk, epoch)


@triton.jit
def _chunk_came(home, num_homes, homes_a_chunk, arrived, plan, words, epoch, LAYOUT: tl.constexpr):
    """Return whether a task of the sum at home can be done without waiting."""
    came = home < num_homes
    if came:
        chunk = home // homes_a_chunk
        if chunk != arrived:
            sources = tl.load(plan + LAYOUT.home_sources)
            for peer in range(LAYOUT.num_ranks):
                if (((sources >> peer) & 1) != 0) & came:
                    came = poll(words + LAYOUT.home + peer * _MAX_CHUNKS + chunk, "sys") >= epoch
    return came


@triton.jit
def _wait_for_chunk(
    chunk, plan, words, epoch, status, host_words, timeout_ns, LAYOUT: tl.constexpr
):
    """Wait until all ranks that have sums for this one have sent those of a chunk."""
    sources = tl.load(plan + LAYOUT.home_sources)
    came = True
    for peer in range(LAYOUT.num_ranks):
        if (((sources >> peer) & 1) != 0) & came:
            code = failure(_HOME, peer, chunk)
            flag = words + LAYOUT.home + peer * _MAX_CHUNKS + chunk
            came = wait(flag, epoch, timeout_ns, status, host_words, code, "sys")
    return came


@triton.jit
def _reset(plan, LAYOUT: tl.constexpr):
    """Leave the counters as the plan had them, for whoever runs on this plan again."""
    tickets = plan + LAYOUT.tickets
    tl.store(tickets + _TILE_TICKET, 0)
    tl.store(tickets + _TASK_TICKET, 0)
    tl.store(tickets + _HOME_TICKET, 0)
    tl.store(tickets + _EXITED, 0)
    chunk = tl.arange(0, _MAX_CHUNKS)
    tl.store(plan + LAYOUT.chunk_done + chunk, 0)
    tl.store(plan + LAYOUT.chunk_sent + chunk, 0)


@triton.jit
def _sum_at_home(
    task, chunk, y_TD, home_WTD, plan, num_tokens,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Add up what the ranks sent for some tokens, in the order of ranks."""
    NUM_RANKS: tl.constexpr = LAYOUT.num_ranks
    token = task * ROWS + tl.arange(0, ROWS)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = (column < HIDDEN_SIZE)[None, :] if HIDDEN_SIZE % CHUNK else True
    ranks = tl.load(plan + LAYOUT.home_ranks + token, mask=token < num_tokens, other=0)
    acc = tl.zeros((ROWS, CHUNK), tl.float32)
    for source in tl.static_range(NUM_RANKS):
        has = ((ranks >> source) & 1) != 0
        row = source * LAYOUT.max_tokens + token.to(tl.int64)
        at = (row * HIDDEN_SIZE)[:, None] + column[None, :]
        value = tl.load(home_WTD + at, mask=has[:, None] & inside, other=0.0)
        acc += value.to(tl.float32)
    to = (token.to(tl.int64) * HIDDEN_SIZE)[:, None] + column[None, :]
    mask = (token < num_tokens)[:, None] & inside
    tl.store(y_TD + to, acc.to(y_TD.dtype.element_ty), mask=mask)


@triton.jit
def _multiply(
    ticket, pending, a_desc, b_desc, z_desc, plan, num_tiles,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, INTERMEDIATE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Make the tiles of a ticket, side by side, and count those of the ticket before.

    Returns what the caller must have counted in turn (``_count_tiles``).
    """
    BLOCK_M: tl.constexpr = LAYOUT.block_m
    STEPS: tl.constexpr = (INTERMEDIATE_SIZE + BLOCK_K - 1) // BLOCK_K
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
            a_desc, b_desc, row, expert, column, INTERMEDIATE_SIZE, BLOCK_M, BLOCK_N, BLOCK_K
        )
        _count_tiles(pending, plan, LAYOUT)
        z_desc.store([row, column], acc.to(z_desc.dtype))
    else:
        _count_tiles(pending, plan, LAYOUT)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, columns * STEPS):
            column = (first + step // STEPS) * BLOCK_N
            k = (step % STEPS) * BLOCK_K
            acc = multiply_step(acc, a_desc, b_desc, row, expert, column, k, BLOCK_N, BLOCK_K)
            if step % STEPS == STEPS - 1:
                z_desc.store([row, column], acc.to(z_desc.dtype))
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    return chunk * _MAX_RUN + columns


@triton.jit
def _count_tiles(pending, plan, LAYOUT: tl.constexpr):
    """Count the tiles that this program stored last for their chunk, if there are any."""
    if pending > 0:
        wait_bulk_stores()
        tl.debug_barrier()
        done = plan + LAYOUT.chunk_done + pending // _MAX_RUN
        tl.atomic_add(done, pending % _MAX_RUN, sem="release", scope="gpu")


@triton.jit(do_not_specialize=[
    "num_tokens", "epoch", "rank", "num_combiners", "multiply_part", "combine_part", "home_part",
    "timeout_ns",
])  # fmt: skip
def gemm_combine_kernel(
    y_TD, z_RD, plan, a_desc, b_desc, z_desc, home_WTD, home_ptrs_W, words, words_ptrs_W,
    num_tokens, epoch, rank, num_combiners, multiply_part, combine_part, home_part,
    status, host_words, timeout_ns: tl.int64,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, INTERMEDIATE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, UNROLL: tl.constexpr, HOME_ROWS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Multiply, combine and sum by tickets. A ``_part`` is 1, or 0 to leave that out."""
    num_columns: tl.constexpr = (HIDDEN_SIZE + BLOCK_N - 1) // BLOCK_N
    num_chunks: tl.constexpr = (HIDDEN_SIZE + CHUNK - 1) // CHUNK
    per_chunk: tl.constexpr = CHUNK // BLOCK_N
    usable = tl.load(plan + LAYOUT.summary + USABLE)
    num_tiles = tl.load(plan + LAYOUT.summary + NUM_TILES) * usable
    tasks_a_chunk = tl.load(plan + LAYOUT.summary + NUM_SENDS) // _TASK_ROWS * usable
    last_columns: tl.constexpr = num_columns - (num_chunks - 1) * per_chunk
    runs_a_chunk: tl.constexpr = (per_chunk + RUN - 1) // RUN
    num_runs: tl.constexpr = (num_chunks - 1) * runs_a_chunk + (last_columns + RUN - 1) // RUN
    total = num_tiles * num_runs * multiply_part
    num_tasks = tasks_a_chunk * num_chunks * combine_part
    tickets = plan + LAYOUT.tickets
    multiplying = total > 0
    task = num_tasks
    homes_a_chunk = tl.cdiv(num_tokens, HOME_ROWS)
    num_homes = homes_a_chunk * num_chunks * usable * home_part
    home = num_homes
    if (tl.program_id(0) < num_combiners) | (total == 0):
        task = tl.atomic_add(tickets + _TASK_TICKET, combine_part, sem="relaxed", scope="gpu")
        home = tl.atomic_add(tickets + _HOME_TICKET, home_part, sem="relaxed", scope="gpu")
    arrived = -1  # the last chunk that all ranks have sent, as far as this program knows
    pending = 0  # chunk and number of the tiles made last, until they are counted
    ready = -1  # the last chunk that this program has seen to be whole
    while multiplying | (task < num_tasks):
        chunk = task // tl.maximum(tasks_a_chunk, 1)
        done = plan + LAYOUT.chunk_done + chunk
        need = num_tiles * tl.minimum(num_columns - chunk * per_chunk, per_chunk)
        combine = task < num_tasks
        if combine & (chunk != ready):
            if multiplying:
                combine = poll(done, "gpu") >= need
            else:
                code = failure(_COMBINE, 0, chunk)
                combine = wait(done, need, timeout_ns, status, host_words, code, "gpu")
                if not combine:
                    task = num_tasks
            if combine:
                ready = chunk
        if combine:
            _combine(
                task - chunk * tasks_a_chunk, chunk, tasks_a_chunk, z_RD, plan, home_ptrs_W,
                words, words_ptrs_W, rank, epoch, LAYOUT, HIDDEN_SIZE, ROWS, CHUNK, UNROLL,
            )  # fmt: skip
            task = tl.atomic_add(tickets + _TASK_TICKET, combine_part, sem="relaxed", scope="gpu")
        elif _chunk_came(home, num_homes, homes_a_chunk, arrived, plan, words, epoch, LAYOUT):
            arrived = home // homes_a_chunk
            _sum_at_home(
                home % homes_a_chunk, arrived, y_TD, home_WTD, plan, num_tokens,
                LAYOUT, HIDDEN_SIZE, HOME_ROWS, CHUNK,
            )  # fmt: skip
            home = tl.atomic_add(tickets + _HOME_TICKET, 1, sem="relaxed", scope="gpu")
        else:
            # Taken only now: a tile that waits in the hand of a program holds up its chunk.
            ticket = tl.atomic_add(tickets + _TILE_TICKET, 1, sem="relaxed", scope="gpu")
            multiplying = ticket < total
            if multiplying:
                pending = _multiply(
                    ticket, pending, a_desc, b_desc, z_desc, plan, num_tiles,
                    LAYOUT, HIDDEN_SIZE, INTERMEDIATE_SIZE, CHUNK, BLOCK_N, BLOCK_K, GROUP, RUN,
                )  # fmt: skip
            # Tiles are counted when the next are begun: by then their stores are done.
            if (not multiplying) | (task < num_tasks):
                _count_tiles(pending, plan, LAYOUT)
                pending = 0
            if (not multiplying) & (task >= num_tasks):
                task = tl.atomic_add(
                    tickets + _TASK_TICKET, combine_part, sem="relaxed", scope="gpu"
                )
    if home >= num_homes:
        home = tl.atomic_add(tickets + _HOME_TICKET, home_part, sem="relaxed", scope="gpu")
    while home < num_homes:
        chunk = home // homes_a_chunk
        if chunk != arrived:
            arrived = chunk
            if not _wait_for_chunk(
                chunk, plan, words, epoch, status, host_words, timeout_ns, LAYOUT
            ):
                num_homes = 0
        if num_homes > 0:
            _sum_at_home(
                home % homes_a_chunk, chunk, y_TD, home_WTD, plan, num_tokens,
                LAYOUT, HIDDEN_SIZE, HOME_ROWS, CHUNK,
            )  # fmt: skip
        home = tl.atomic_add(tickets + _HOME_TICKET, home_part, sem="relaxed", scope="gpu")
    if home_part != 0:  # the last part there is
        before = tl.atomic_add(tickets + _EXITED, 1, sem="acq_rel", scope="gpu")
        if before == tl.num_programs(0) - 1:
            _reset(plan, LAYOUT)


_launch = Launcher(gemm_combine_kernel)


def gemm_combine(
    y_TD: torch.Tensor,
    z_RD: torch.Tensor,
    h_RF: torch.Tensor,
    *,
    plan: torch.Tensor,
    down_LDF: torch.Tensor,
    home_WTD: torch.Tensor,
    home_ptrs_W: torch.Tensor,
    words: torch.Tensor,
    words_ptrs_W: torch.Tensor,
    epoch: int,
    rank: int,
    layout: Layout,
    knobs: Knobs,
    num_programs: int,
    status: torch.Tensor,
    host_words: torch.Tensor,
    timeout_ns: int,
    fused: bool = True,
) -> None:
    """Multiply by the second projection, sum over each token's experts, bring the sums home.

    Args:
        y_TD: written: the layer's output for this rank's tokens.
        z_RD: written: rows of the second projection, scratch.
        h_RF: activations of ``dispatch_gemm``.
        plan: made by ``make_plan`` for this call.
        down_LDF: stacked weights, ``(L, D, F)``.
        home_WTD: this rank's copy of the symmetric home buffer, ``(W, max_tokens, D)``: each rank
            writes its own part of it on every rank.
        home_ptrs_W: addresses of all ranks' home buffers.
        epoch: number of this call, as published.
        fused: False runs the three parts one after another.
    """
    hidden_size, tile = z_RD.shape[1], knobs.down
    h_desc = describe_rows(h_RF, block_rows=layout.block_m, block_columns=tile.block_k)
    down_desc = describe_weights(down_LDF, parts=1, tile=tile)
    z_desc = describe_rows(z_RD, block_rows=layout.block_m, block_columns=tile.block_n)
    num_combiners = knobs.combiners(h_RF.shape[1])
    one_by_one = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    for parts in ((1, 1, 1),) if fused else one_by_one:
        _launch(
            num_programs,
            (y_TD, z_RD, plan, h_desc, down_desc, z_desc, home_WTD, home_ptrs_W, words,
             words_ptrs_W, y_TD.shape[0], epoch, rank, num_combiners, *parts, status,
             host_words, timeout_ns),
            (layout, hidden_size, h_RF.shape[1], knobs.combine_rows,
             min(knobs.combine_unroll, layout.padded_k), knobs.home_rows, knobs.chunk_columns,
             tile.block_n, tile.block_k, tile.group, tile.run),
            dtypes=(z_RD.dtype,), num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
