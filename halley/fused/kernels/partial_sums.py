# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Compute partial sums of tokens on the ranks of their experts; add them on the source rank.

The ranks of the experts sum the rows of each token copy in float32 and store the sum in the combine
buffer of the token's source rank. The source rank adds the partial sums in the order of ranks.
``combine_kernel`` (``combine.py``) calls functions of both sides, one column chunk after another::

    rank of experts                                 source rank
    send_sums: store in combine buffer
    count_sent: sums_ready[r, c] = n (release)  --> sums_are_ready, wait_for_sums (acquire)
                                                    sum_task: load from combine buffer, store y_TD
"""

import triton
import triton.language as tl

from halley.fused.kernels.peer import SUMS, failure_code, peer_ptr, poll, signal, wait


@triton.jit
def _load_rows(first, plan, LAYOUT: tl.constexpr, ROWS: tl.constexpr):
    """Return origin (rank * max_tokens + token) and rows of combine-list entries; -1 if unused."""
    copy = first + tl.arange(0, ROWS)
    k = tl.arange(0, LAYOUT.padded_k)
    origin = tl.load(plan + LAYOUT.combine_origin + copy)
    line = copy[:, None] * LAYOUT.top_k + k[None, :]
    real = (origin >= 0)[:, None] & (k < LAYOUT.top_k)[None, :]
    return origin, tl.load(plan + LAYOUT.combine_rows + line, mask=real, other=-1)


@triton.jit
def _add_rows(
    acc, line, origin, z_RD, plan, column, inside,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Return ``acc`` plus one output row of each token copy; if ``WEIGHTED``, weight times row."""
    row = tl.load(plan + LAYOUT.combine_rows + line)
    real = (row >= 0) & (origin >= 0)
    at = (row.to(tl.int64) * HIDDEN_SIZE)[:, None] + column[None, :]
    value = tl.load(z_RD + at, mask=real[:, None] & inside, other=0.0)
    if WEIGHTED:
        weights = (plan + LAYOUT.combine_weight).to(tl.pointer_type(tl.float32))
        weight = tl.where(real, tl.load(weights + line), 0.0)
        return acc + weight[:, None] * value.to(tl.float32)
    else:
        return acc + value.to(tl.float32)


@triton.jit
def _store_sums(
    acc, origin, z_RD, combine_ptrs_W, combine_tokens, rank, column, inside,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    NUM_RANKS: tl.constexpr = LAYOUT.num_ranks
    token = (origin % LAYOUT.max_tokens).to(tl.int64)
    # Load the addresses of all ranks' buffers and select one. A load indexed by the source rank
    # would begin only after the load of ``origin``, and would delay the store.
    target = tl.zeros((ROWS,), tl.int64)
    for peer in tl.static_range(NUM_RANKS):
        address = tl.load(combine_ptrs_W + peer)
        target = tl.where(origin // LAYOUT.max_tokens == peer, address, target)
    target = tl.multiple_of(target.to(z_RD.dtype), 16)[:, None]
    to = ((rank * combine_tokens + token) * HIDDEN_SIZE)[:, None] + column[None, :]
    mask = (origin >= 0)[:, None] & inside
    tl.store(target + to, acc.to(z_RD.dtype.element_ty), mask=mask)


@triton.jit
def send_sums(
    task, chunk, z_RD, plan, combine_ptrs_W, combine_tokens, rank,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Sum each token copy's output rows in one column chunk; send the sums to the source ranks.

    Example: on rank 0, token copy 5 is token 9 of rank 1 with rows (3, 130) and weights (0.6, 0.4).
    The sum ``0.6 z[3] + 0.4 z[130]`` is stored at [0, 9] of the combine buffer of rank 1.
    """
    TOP_K: tl.constexpr = LAYOUT.top_k
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = (column < HIDDEN_SIZE)[None, :] if HIDDEN_SIZE % CHUNK else True
    first = task * LAYOUT.task_rows
    _, row_RK = _load_rows(first, plan, LAYOUT, LAYOUT.task_rows)
    most_rows = tl.max(tl.sum((row_RK >= 0).to(tl.int32), axis=1), axis=0)
    if STAGES == 1:
        # Each copy has K loads, masked if it has fewer rows: a fixed number of loads can be
        # unrolled and be in flight together.
        for start in range(0, LAYOUT.task_rows, ROWS):
            copy = first + start + tl.arange(0, ROWS)
            origin = tl.load(plan + LAYOUT.combine_origin + copy)
            acc = tl.zeros((ROWS, CHUNK), tl.float32)
            for slot in tl.static_range(TOP_K):
                acc = _add_rows(
                    acc, copy * TOP_K + slot, origin, z_RD, plan, column, inside,
                    LAYOUT, HIDDEN_SIZE, WEIGHTED,
                )  # fmt: skip
            _store_sums(
                acc, origin, z_RD, combine_ptrs_W, combine_tokens, rank, column, inside,
                LAYOUT, HIDDEN_SIZE, ROWS,
            )  # fmt: skip
    else:
        acc = tl.zeros((ROWS, CHUNK), tl.float32)
        # One loop over copies and slots lets loads of the next copies overlap the current sums.
        for step in tl.range(0, most_rows * (LAYOUT.task_rows // ROWS), num_stages=STAGES):
            slot = step % most_rows
            copy = first + step // most_rows * ROWS + tl.arange(0, ROWS)
            origin = tl.load(plan + LAYOUT.combine_origin + copy)
            acc = _add_rows(
                acc, copy * TOP_K + slot, origin, z_RD, plan, column, inside,
                LAYOUT, HIDDEN_SIZE, WEIGHTED,
            )  # fmt: skip
            if slot == most_rows - 1:
                _store_sums(
                    acc, origin, z_RD, combine_ptrs_W, combine_tokens, rank, column, inside,
                    LAYOUT, HIDDEN_SIZE, ROWS,
                )  # fmt: skip
                acc = tl.zeros((ROWS, CHUNK), tl.float32)


@triton.jit
def send_weight_gradients(
    task, dweight_RJ, plan, dweight_ptrs_W, combine_tokens, rank,
    LAYOUT: tl.constexpr, NUM_SUMMANDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum each row of ``dweight_RJ`` to a routing weight's gradient; send it to the source rank.

    A token's gradients are stored in the order in which it chose the experts of this rank.
    """
    PADDED_K: tl.constexpr = LAYOUT.padded_k
    k = tl.arange(0, PADDED_K)
    first = task * LAYOUT.task_rows
    for start in range(0, LAYOUT.task_rows, ROWS):
        origin, row_RK = _load_rows(first + start, plan, LAYOUT, ROWS)
        at = row_RK.to(tl.int64) * NUM_SUMMANDS
        acc = tl.zeros((ROWS, PADDED_K), tl.float32)
        for index in range(0, NUM_SUMMANDS):
            acc += tl.load(dweight_RJ + at + index, mask=row_RK >= 0, other=0.0)
        token = (origin % LAYOUT.max_tokens).to(tl.int64)
        source = origin // LAYOUT.max_tokens
        target = tl.load(dweight_ptrs_W + source, mask=origin >= 0, other=0)
        target = target.to(dweight_RJ.dtype)[:, None]
        to = ((rank * combine_tokens + token) * LAYOUT.top_k)[:, None] + k[None, :]
        tl.store(target + to, acc, mask=row_RK >= 0)


@triton.jit
def count_sent(
    chunk, num_tasks, plan, routing, routing_ptrs_W, rank, epoch, LAYOUT: tl.constexpr
):  # fmt: skip
    """Count a combine task of a chunk as sent; the last one sets ``sums_ready`` on every rank."""
    tl.debug_barrier()  # the sums of all threads are stored before one thread releases
    sent = plan + LAYOUT.chunk_sent + chunk
    if tl.atomic_add(sent, 1, sem="acq_rel", scope="sys") == num_tasks - 1:
        for peer in range(LAYOUT.num_ranks):
            flag = peer_ptr(routing_ptrs_W, peer, routing) + LAYOUT.sums_ready
            signal(flag + rank * LAYOUT.max_chunks + chunk, epoch)


@triton.jit
def sums_are_ready(
    sum_ticket, num_sum_tasks, chunk_sum_tasks, arrived_chunk, plan, routing, epoch,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """Return whether a sum task is left and all contributing ranks have sent its column chunk."""
    ready = sum_ticket < num_sum_tasks
    if ready:
        chunk = sum_ticket // chunk_sum_tasks
        if chunk != arrived_chunk:
            ranks = tl.load(plan + LAYOUT.contributors)
            for peer in range(LAYOUT.num_ranks):
                if (((ranks >> peer) & 1) != 0) & ready:
                    flag = routing + LAYOUT.sums_ready + peer * LAYOUT.max_chunks + chunk
                    ready = poll(flag, "sys") >= epoch
    return ready


@triton.jit
def wait_for_sums(
    chunk, plan, routing, epoch, rank, status, host_status, timeout_ns, LAYOUT: tl.constexpr
):
    """Wait for a chunk's partial sums from all contributing ranks; return False if a wait failed.

    The time limit for this rank's own sums is twice as long. If a tile is missing, the CTA that
    sends these sums must time out first, because its failure names the tile.
    """
    ranks = tl.load(plan + LAYOUT.contributors)
    complete = True
    for peer in range(LAYOUT.num_ranks):
        if (((ranks >> peer) & 1) != 0) & complete:
            code = failure_code(SUMS, peer, chunk)
            flag = routing + LAYOUT.sums_ready + peer * LAYOUT.max_chunks + chunk
            limit_ns = tl.where(peer == rank, 2 * timeout_ns, timeout_ns)
            complete = wait(flag, epoch, limit_ns, status, host_status, code, "sys")
    return complete


@triton.jit
def _add_partial_sums(
    task, chunk, y_TD, combine_buffer_WTD, combine_tokens, plan, num_tokens,
    LAYOUT: tl.constexpr, HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    NUM_RANKS: tl.constexpr = LAYOUT.num_ranks
    token = task * ROWS + tl.arange(0, ROWS)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = (column < HIDDEN_SIZE)[None, :] if HIDDEN_SIZE % CHUNK else True
    real = token < num_tokens
    ranks = tl.load(plan + LAYOUT.token_contributors + token, mask=real, other=0)
    acc = tl.zeros((ROWS, CHUNK), tl.float32)
    for source in tl.static_range(NUM_RANKS):
        has = ((ranks >> source) & 1) != 0
        row = source * combine_tokens + token.to(tl.int64)
        at = (row * HIDDEN_SIZE)[:, None] + column[None, :]
        value = tl.load(combine_buffer_WTD + at, mask=has[:, None] & inside, other=0.0)
        acc += value.to(tl.float32)
    to = (token.to(tl.int64) * HIDDEN_SIZE)[:, None] + column[None, :]
    mask = real[:, None] & inside
    tl.store(y_TD + to, acc.to(y_TD.dtype.element_ty), mask=mask)


@triton.jit
def _collect_weight_gradients(
    task, idx_TK, dweights_TK, dweight_ptrs_W, combine_tokens, num_tokens, rank,
    LAYOUT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store in ``dweights_TK`` a task's routing-weight gradients, received from the expert ranks.

    The receive buffer orders a token's gradients by rank; ``dweights_TK`` orders them by choice.
    The ranks of a tensor-parallel group share an expert, so their gradients are added.

    Example: a token chose experts (5, 0, 4), and each rank has four experts. The gradients of the
    first and the last choice are entries 0 and 1 from rank 1, the second is entry 0 from rank 0.
    """
    TOP_K: tl.constexpr = LAYOUT.top_k
    PADDED_K: tl.constexpr = LAYOUT.padded_k
    TP_SIZE: tl.constexpr = LAYOUT.tp_size
    dweight_buffer_WTK = peer_ptr(dweight_ptrs_W, rank, dweights_TK)
    k = tl.arange(0, PADDED_K)
    token = task * ROWS + tl.arange(0, ROWS)
    at = (token * LAYOUT.top_k)[:, None] + k[None, :]
    real = (token < num_tokens)[:, None] & (k < LAYOUT.top_k)[None, :]
    expert = tl.load(idx_TK + at, mask=real, other=-1).to(tl.int32)
    owner = tl.where(expert >= 0, expert // LAYOUT.num_local, -1)
    slot = tl.zeros((ROWS, PADDED_K), tl.int32)
    for other in tl.static_range(TOP_K):
        others = tl.max(tl.where(k[None, :] == other, owner, -1), axis=1)
        slot += ((others[:, None] == owner) & (k > other)[None, :]).to(tl.int32)
    value = tl.zeros((ROWS, PADDED_K), tl.float32)
    for shard in tl.static_range(TP_SIZE):
        source = owner.to(tl.int64) * TP_SIZE + shard
        row = source * combine_tokens + token.to(tl.int64)[:, None]
        summand = dweight_buffer_WTK + row * LAYOUT.top_k + slot
        value += tl.load(summand, mask=real & (owner >= 0), other=0.0)
    tl.store(dweights_TK + at, value, mask=real)


@triton.jit
def sum_task(
    task, chunk, y_TD, combine_buffer_WTD, combine_tokens, plan, num_tokens,
    idx_TK, dweights_TK, dweight_ptrs_W, rank,
    LAYOUT: tl.constexpr, BACKWARD: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store a chunk of ``y_TD`` for some own tokens; for chunk 0 of backward also ``dweights_TK``.

    Routing-weight gradients have no column chunks, so the tasks of chunk 0 copy them.
    """
    _add_partial_sums(
        task, chunk, y_TD, combine_buffer_WTD, combine_tokens, plan, num_tokens,
        LAYOUT, HIDDEN_SIZE, ROWS, CHUNK,
    )  # fmt: skip
    if BACKWARD:
        if chunk == 0:
            _collect_weight_gradients(
                task, idx_TK, dweights_TK, dweight_ptrs_W, combine_tokens, num_tokens, rank,
                LAYOUT, ROWS,
            )  # fmt: skip
