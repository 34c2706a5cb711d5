# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""At home: wait for what the ranks sent for this rank's tokens, and add it up."""

import triton
import triton.language as tl

from halley.fused.kernels.layout import MAX_CHUNKS
from halley.fused.kernels.peer import failure, poll, report, wait
from halley.fused.kernels.status import HOME, ROWS


_HOME = tl.constexpr(HOME)
_ROWS = tl.constexpr(ROWS)
_MAX_CHUNKS = tl.constexpr(MAX_CHUNKS)


@triton.jit
def chunk_came(home, num_homes, homes_a_chunk, arrived, plan, words, epoch, LAYOUT: tl.constexpr):
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
def wait_for_chunk(
    chunk, plan, words, epoch, rank, status, host_words, timeout_ns, LAYOUT: tl.constexpr
):
    """Wait until all ranks that have sums for this one have sent those of a chunk.

    For this rank's own twice as long: whoever sends them waits for tiles, and says first which.
    """
    sources = tl.load(plan + LAYOUT.home_sources)
    came = True
    for peer in range(LAYOUT.num_ranks):
        if (((sources >> peer) & 1) != 0) & came:
            code = failure(_HOME, peer, chunk)
            flag = words + LAYOUT.home + peer * _MAX_CHUNKS + chunk
            limit_ns = tl.where(peer == rank, 2 * timeout_ns, timeout_ns)
            came = wait(flag, epoch, limit_ns, status, host_words, code, "sys")
    return came


@triton.jit
def look_for_overflow(words, status, host_words, LAYOUT: tl.constexpr):
    """Write down if a rank sent flags but no sums, as it had no room for its rows."""
    for peer in range(LAYOUT.num_ranks):
        num_rows = tl.load(words + LAYOUT.overflow + peer)
        if num_rows > 0:
            report(status, host_words, failure(_ROWS, peer, num_rows))


@triton.jit
def _sum_at_home(
    task, chunk, y_TD, home_WTD, home_tokens, plan, num_tokens,
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
        row = source * home_tokens + token.to(tl.int64)
        at = (row * HIDDEN_SIZE)[:, None] + column[None, :]
        value = tl.load(home_WTD + at, mask=has[:, None] & inside, other=0.0)
        acc += value.to(tl.float32)
    to = (token.to(tl.int64) * HIDDEN_SIZE)[:, None] + column[None, :]
    mask = (token < num_tokens)[:, None] & inside
    tl.store(y_TD + to, acc.to(y_TD.dtype.element_ty), mask=mask)


@triton.jit
def _take_weight_gradients(
    task, idx_TK, dweights_TK, weights_home_WTK, home_tokens, num_tokens,
    LAYOUT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Put the gradients that the ranks sent for some tokens in the order of the tokens' choices.

    Those of the ranks that share an expert are added up.

    Example: experts (5, 0, 4) with four on a rank: the first and the last gradient came from rank
    1, as its slots 0 and 1, the second from rank 0, as its slot 0.
    """
    TOP_K: tl.constexpr = LAYOUT.top_k
    PADDED_K: tl.constexpr = LAYOUT.padded_k
    TP_SIZE: tl.constexpr = LAYOUT.tp_size
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
        row = source * home_tokens + token.to(tl.int64)[:, None]
        at_home = weights_home_WTK + row * LAYOUT.top_k + slot
        value += tl.load(at_home, mask=real & (owner >= 0), other=0.0)
    tl.store(dweights_TK + at, value, mask=real)


@triton.jit
def take_home(
    task, chunk, y_TD, home_WTD, home_tokens, plan, num_tokens,
    idx_TK, dweights_TK, weights_home_WTK,
    LAYOUT: tl.constexpr, BACKWARD: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Add up what came for some tokens; what is sent with the first chunk is taken with it."""
    _sum_at_home(
        task, chunk, y_TD, home_WTD, home_tokens, plan, num_tokens, LAYOUT, HIDDEN_SIZE, ROWS, CHUNK
    )
    if BACKWARD:
        if chunk == 0:
            _take_weight_gradients(
                task, idx_TK, dweights_TK, weights_home_WTK, home_tokens, num_tokens, LAYOUT, ROWS
            )


@triton.jit
def take_the_rest_home(
    home, num_homes, homes_a_chunk, arrived, ticket, y_TD, home_WTD, home_tokens, plan,
    num_tokens, idx_TK, dweights_TK, weights_home_WTK, words, epoch,
    rank, status, host_words, timeout_ns, LAYOUT: tl.constexpr, BACKWARD: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Take what came home, task by task, and wait for what has not come, until nothing is left.

    ``home`` is the task that the program has already, if it has one.
    """
    if home >= num_homes:
        home = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
    while home < num_homes:
        chunk = home // homes_a_chunk
        if chunk != arrived:
            arrived = chunk
            if not wait_for_chunk(
                chunk, plan, words, epoch, rank, status, host_words, timeout_ns, LAYOUT
            ):
                num_homes = 0
        if num_homes > 0:
            take_home(
                home % homes_a_chunk, chunk, y_TD, home_WTD, home_tokens, plan, num_tokens,
                idx_TK, dweights_TK, weights_home_WTK, LAYOUT, BACKWARD, HIDDEN_SIZE, ROWS, CHUNK,
            )  # fmt: skip
        home = tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu")
