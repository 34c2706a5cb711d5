# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Sum the rows of each token over the experts of this rank, and send the sums home."""

import triton
import triton.language as tl

from halley.fused.kernels.layout import MAX_CHUNKS, TASK_ROWS
from halley.fused.kernels.peer import peer_ptr, signal


_TASK_ROWS = tl.constexpr(TASK_ROWS)
_MAX_CHUNKS = tl.constexpr(MAX_CHUNKS)


@triton.jit
def _load_sends(first, plan, LAYOUT: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr):
    """Return origin, rows and weights of some sends; what is not there is -1, -1 and 0."""
    send = first + tl.arange(0, ROWS)
    k = tl.arange(0, LAYOUT.padded_k)
    origin = tl.load(plan + LAYOUT.sum_origin + send)
    line = send[:, None] * LAYOUT.top_k + k[None, :]
    weights = (plan + LAYOUT.sum_weight).to(tl.pointer_type(tl.float32))
    real = (origin >= 0)[:, None] & (k < LAYOUT.top_k)[None, :]
    row_RK = tl.load(plan + LAYOUT.sum_slot + line, mask=real, other=-1)
    if WEIGHTED:
        weight_RK = tl.load(weights + line, mask=real, other=0.0)
    else:
        weight_RK = (row_RK >= 0).to(tl.float32)
    return origin, row_RK, weight_RK


@triton.jit
def combine_task(
    task, chunk, z_RD, plan, home_ptrs_W, home_tokens, rank,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Sum the rows of some sends over one chunk of columns and store the sums at their home.

    Example: send 5 is token 9 of rank 1 with slots (3, 130) and weights (0.6, 0.4); on rank 0 its
    sum ``0.6 z[3] + 0.4 z[130]`` becomes row 9 of rank 0's part of rank 1's home buffer.
    """
    TOP_K: tl.constexpr = LAYOUT.top_k
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = (column < HIDDEN_SIZE)[None, :] if HIDDEN_SIZE % CHUNK else True
    first = task * _TASK_ROWS
    _, row_RK, _ = _load_sends(first, plan, LAYOUT, False, _TASK_ROWS)
    most = tl.max(tl.sum((row_RK >= 0).to(tl.int32), axis=1), axis=0)
    if STAGES == 1:
        # All rows of some sends at once, whether there are so many or not: no load waits for one
        # before it.
        for start in range(0, _TASK_ROWS, ROWS):
            send = first + start + tl.arange(0, ROWS)
            origin = tl.load(plan + LAYOUT.sum_origin + send)
            acc = tl.zeros((ROWS, CHUNK), tl.float32)
            for slot in tl.static_range(TOP_K):
                acc = _add_rows(
                    acc, send * TOP_K + slot, origin, z_RD, plan, column, inside,
                    LAYOUT, HIDDEN_SIZE, WEIGHTED,
                )  # fmt: skip
            _store_sums(
                acc,
                origin,
                z_RD,
                home_ptrs_W,
                home_tokens,
                rank,
                column,
                inside,
                LAYOUT,
                HIDDEN_SIZE,
                ROWS,
            )
    else:
        acc = tl.zeros((ROWS, CHUNK), tl.float32)
        # One loop over sends and slots, so that rows of the next sends are on their way meanwhile.
        for step in tl.range(0, most * (_TASK_ROWS // ROWS), num_stages=STAGES):
            slot = step % most
            send = first + step // most * ROWS + tl.arange(0, ROWS)
            origin = tl.load(plan + LAYOUT.sum_origin + send)
            acc = _add_rows(
                acc, send * TOP_K + slot, origin, z_RD, plan, column, inside,
                LAYOUT, HIDDEN_SIZE, WEIGHTED,
            )  # fmt: skip
            if slot == most - 1:
                _store_sums(
                    acc,
                    origin,
                    z_RD,
                    home_ptrs_W,
                    home_tokens,
                    rank,
                    column,
                    inside,
                    LAYOUT,
                    HIDDEN_SIZE,
                    ROWS,
                )
                acc = tl.zeros((ROWS, CHUNK), tl.float32)


@triton.jit
def _add_rows(
    acc, line, origin, z_RD, plan, column, inside,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Add one row of each send, weighted, where the send has a row in that line of the plan."""
    row = tl.load(plan + LAYOUT.sum_slot + line)
    real = (row >= 0) & (origin >= 0)
    at = (row.to(tl.int64) * HIDDEN_SIZE)[:, None] + column[None, :]
    value = tl.load(z_RD + at, mask=real[:, None] & inside, other=0.0)
    if WEIGHTED:
        weights = (plan + LAYOUT.sum_weight).to(tl.pointer_type(tl.float32))
        weight = tl.where(real, tl.load(weights + line), 0.0)
        return acc + weight[:, None] * value.to(tl.float32)
    else:
        return acc + value.to(tl.float32)


@triton.jit
def _store_sums(
    acc, origin, z_RD, home_ptrs_W, home_tokens, rank, column, inside,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store the sums of some sends at the homes of their tokens."""
    NUM_RANKS: tl.constexpr = LAYOUT.num_ranks
    token = (origin % LAYOUT.max_tokens).to(tl.int64)
    # Chosen among addresses that are here already: a load of it would be a wait.
    home = tl.zeros((ROWS,), tl.int64)
    for peer in tl.static_range(NUM_RANKS):
        address = tl.load(home_ptrs_W + peer)
        home = tl.where(origin // LAYOUT.max_tokens == peer, address, home)
    home = tl.multiple_of(home.to(z_RD.dtype), 16)[:, None]
    to = ((rank * home_tokens + token) * HIDDEN_SIZE)[:, None] + column[None, :]
    mask = (origin >= 0)[:, None] & inside
    tl.store(home + to, acc.to(z_RD.dtype.element_ty), mask=mask)


@triton.jit
def send_weight_gradients(
    task, dweight_RC, plan, weights_home_ptrs_W, home_tokens, rank,
    LAYOUT: tl.constexpr, NUM_PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add up the parts of the gradients of some sends' routing weights and store them at home.

    They stand there in the order of the plan's slots: those of a token on one rank, by k.
    """
    PADDED_K: tl.constexpr = LAYOUT.padded_k
    k = tl.arange(0, PADDED_K)
    first = task * _TASK_ROWS
    for start in range(0, _TASK_ROWS, ROWS):
        origin, row_RK, _ = _load_sends(first + start, plan, LAYOUT, False, ROWS)
        at = row_RK.to(tl.int64) * NUM_PARTS
        acc = tl.zeros((ROWS, PADDED_K), tl.float32)
        for part in range(0, NUM_PARTS):
            acc += tl.load(dweight_RC + at + part, mask=row_RK >= 0, other=0.0)
        token = (origin % LAYOUT.max_tokens).to(tl.int64)
        home = tl.load(weights_home_ptrs_W + origin // LAYOUT.max_tokens, mask=origin >= 0, other=0)
        home = home.to(dweight_RC.dtype)[:, None]
        to = ((rank * home_tokens + token) * LAYOUT.top_k)[:, None] + k[None, :]
        tl.store(home + to, acc, mask=row_RK >= 0)


@triton.jit
def count_sent(chunk, num_tasks, plan, words, words_ptrs_W, rank, epoch, LAYOUT: tl.constexpr):
    """Count a task of a chunk as sent; the last one tells all ranks."""
    tl.debug_barrier()
    sent = plan + LAYOUT.chunk_sent + chunk
    if tl.atomic_add(sent, 1, sem="acq_rel", scope="sys") == num_tasks - 1:
        for peer in range(LAYOUT.num_ranks):
            flag = peer_ptr(words_ptrs_W, peer, words) + LAYOUT.home
            signal(flag + rank * _MAX_CHUNKS + chunk, epoch)
