# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Flags, waits and failure codes for memory that other ranks and other CTAs write.

Flags and counters are int32 words that only grow while a CTA waits for them. A rank signals another
rank with a store-release at system scope; the other rank polls with acquire loads. Each wait has a
time limit. A wait that times out stores a failure code in ``status``, for the other CTAs, and in
``host_status``, for the host. Then all waits of the rank fail at once, and its kernels end.

Words of ``host_status``: 0 is the failure code, 1 the last plan's number of rows, 2 the largest
number of tokens of a rank if the buffers are too small (else 0), 3 the length of the fetch list.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halley.fused.kernels.layout import EPOCH, IS_USABLE, NUM_COPIES, NUM_TILES
from halley.interpreter import INTERPRETED


HOST_STATUS_WORDS = 4
# Kinds of failures, the high bits of a failure code. PLAN to ROWS are waits that timed out.
PLAN = tl.constexpr(1)
DISPATCH = tl.constexpr(2)
COMBINE = tl.constexpr(3)
SUMS = tl.constexpr(4)
ROWS = tl.constexpr(5)
ORDER = tl.constexpr(6)  # ranks run different passes
EPOCHS = tl.constexpr(7)
MAX_ROWS = tl.constexpr(8)
MAX_TOKENS = tl.constexpr(9)
_WAITS = {
    PLAN.value: "rank {peer} did not publish its routing (plan)",
    DISPATCH.value: "the rows of tile {index} did not arrive (dispatch_gemm, tile {index})",
    COMBINE.value: "column chunk {index} was not multiplied (gemm_combine, chunk {index})",
    SUMS.value: "rank {peer} did not send its partial sums (gemm_combine, chunk {index})",
    ROWS.value: "rank {peer} did not publish its rows for another pass of call {index}",
}
_LIMITS = {
    EPOCHS.value: "the int32 pass counter is exhausted: make new workspaces",
    MAX_ROWS.value: "the experts of rank {peer} got {index} rows, more than max_load allows",
    MAX_TOKENS.value: (
        "a rank has {index} tokens, more than max_tokens; with max_load buffers do not grow"
    ),
}


def is_overflow(host_status: torch.Tensor) -> bool:
    """Return whether the failure is that a rank has more rows or tokens than buffers hold."""
    return int(host_status[0]) >> 48 in (MAX_ROWS.value, MAX_TOKENS.value)


def overflow_rows(host_status: torch.Tensor) -> int:
    """Return how many rows a rank got if they are more than its buffers hold, else 0."""
    code = int(host_status[0])
    return code & 0xFFFFFFFF if code >> 48 == MAX_ROWS.value else 0


def check(host_status: torch.Tensor, *, rank: int, timeout_s: float) -> None:
    """Raise a RuntimeError, naming this rank and the cause, if ``host_status`` has a failure code.

    The failure code is ``kind << 48 | peer << 32 | index``. Depending on the kind, ``index`` is a
    tile, a column chunk, a call (0 for a new call), a number of rows or a number of tokens.
    """
    code = int(host_status[0])
    if not code:
        return
    kind, peer, index = code >> 48, (code >> 32) & 0xFFFF, code & 0xFFFFFFFF
    if kind == ORDER.value:
        running = f"another pass of call {index}" if index else "a new call"
        text = (
            f"rank {peer} runs {running}, and this rank does not: all ranks must run their "
            "layers, forward and backward, in the same order"
        )
    elif kind in _LIMITS:
        text = _LIMITS[kind].format(peer=peer, index=index)
    else:
        is_plan = kind == ROWS.value and index == 0
        wait = "rank {peer} did not publish its rows (plan)" if is_plan else _WAITS[kind]
        text = f"{wait.format(peer=peer, index=index)} within {timeout_s:g} s"
    raise RuntimeError(f"rank {rank}: {text}")


CLOCK_LANES = tl.constexpr(512)  # at least the number of threads of a CTA, for clock_ns
POLLS_PER_CLOCK = tl.constexpr(256)  # polls between two reads of the clock, which is slow
_LAST_EPOCH = tl.constexpr(2**31 - 2)  # the largest epoch whose successor is an int32


@triton.jit
def peer_ptr(ptrs_W, peer, like):
    """Return a pointer, of the type of ``like``, to rank ``peer``'s copy of a symmetric buffer."""
    # The hint must follow the cast: Triton knows no alignment of a pointer cast from an integer.
    return tl.multiple_of(tl.load(ptrs_W + peer).to(like.dtype), 16)


@triton.jit
def fence_async():
    """Order earlier acquire loads of this CTA before its later TMA loads.

    TMA accesses memory through the async proxy, which an acquire alone does not order.
    """
    tl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [tl.full((), 0, tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait_bulk_stores():
    """Wait until this thread's TMA stores are complete, so that a later release covers them."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, $1;", "=r,r",
        [tl.full((), 0, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def clock_ns():
    """Return the device clock in ns, the same value in all threads of the CTA."""
    # Threads read the clock at different times, but a loop's condition must be equal in all. The
    # maximum over a tensor that spans all warps goes through shared memory, so all threads get it.
    lanes = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,r", [tl.zeros((CLOCK_LANES,), tl.int32)],
        dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip
    return tl.max(lanes, axis=0)


@triton.jit
def poll(word, scope: tl.constexpr):
    """Load a word with acquire semantics: later loads see all stores before the word's release."""
    return tl.atomic_add(word, 0, sem="acquire", scope=scope)


@triton.jit
def failure_code(kind: tl.constexpr, peer, index):
    """Return the int64 code of a failure, which ``check`` decodes."""
    return tl.full((), kind << 48, tl.int64) + tl.full((), 1 << 32, tl.int64) * peer + index


@triton.jit
def report_failure(status, host_status, code):
    """Store a failure code in ``status`` and ``host_status``, unless ``status`` has one already."""
    if tl.atomic_cas(status, tl.full((), 0, tl.int64), code, sem="relaxed", scope="gpu") == 0:
        tl.store(host_status, code)


@triton.jit
def wait(word, target, timeout_ns, status, host_status, code, scope: tl.constexpr):
    """Wait until ``word >= target``; on timeout report ``code``. Return whether the wait succeeded.

    Example: the flag ``published[1]`` is 6 and pass 7 waits for it. The CTA polls until rank 1
    stores 7. A failure that any CTA of this rank has reported also ends the wait.
    """
    value = poll(word, scope)
    num_polls = 0
    start = tl.full((), 0, tl.int64)
    healthy = True
    while (value < target) & healthy:
        num_polls += 1
        if num_polls % POLLS_PER_CLOCK == 0:
            now = clock_ns()
            if num_polls == POLLS_PER_CLOCK:
                start = now
            if now - start > timeout_ns:
                report_failure(status, host_status, code)
            healthy = tl.atomic_add(status, 0, sem="relaxed", scope="gpu") == 0
        value = poll(word, scope)
    return value >= target


@triton.jit
def signal(word, value):
    """Store a flag in the memory of any rank, ordered after all earlier stores of this CTA.

    This is a store-release and not an atomic: each flag has one writer, and some links between GPUs
    carry no atomics. The reader's ``wait`` acquires.
    """
    tl.debug_barrier()  # thread 0 releases for all threads, so their stores must come before
    tl.inline_asm_elementwise(
        """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.u32 [$1], $0;
        }""",
        "=r,l,0", [word.to(tl.int64), value], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def signal_all(flags, epoch, rank, routing, routing_ptrs_W, LAYOUT: tl.constexpr):
    """Set a flag of this rank, such as ``published``, to ``epoch`` in every rank's memory."""
    for peer in range(LAYOUT.num_ranks):
        signal(peer_ptr(routing_ptrs_W, peer, routing) + flags + rank, epoch)


@triton.jit
def next_epoch(counters, status, host_status):
    """Return this pass's epoch, the last epoch plus 1; report a failure at ``_LAST_EPOCH``."""
    epoch = tl.load(counters + EPOCH) + 1
    if epoch == _LAST_EPOCH:
        report_failure(status, host_status, failure_code(EPOCHS, 0, epoch))
    return epoch


@triton.jit
def count_pass(counters, epoch):
    """Store this pass's epoch for later launches; call it when all CTAs have read the old epoch."""
    tl.store(counters + EPOCH, epoch)


@triton.jit
def exits_last(num_exited, num_exits):
    """Count the calling CTA in ``num_exited``; return whether it is the last one to end."""
    return tl.atomic_add(num_exited, 1, sem="acq_rel", scope="gpu") == num_exits - 1


# The interpreter has no programmatic dependent launches: there, the next two functions do nothing.
# ``side_by_side`` in ``ops/kernels/launch.py`` runs the two launches concurrently instead.
_COMPILED = tl.constexpr(not INTERPRETED)


@triton.jit
def let_second_begin():
    """Let the dependent launch begin once every CTA of this launch has called this or ended."""
    if _COMPILED:
        gdc_launch_dependents()


@triton.jit
def end_with_first():
    """Wait, at the end of a CTA of a dependent launch, until the launch before it has ended.

    Otherwise the launch after both could begin too early: it waits for the dependent one only.
    """
    if _COMPILED:
        gdc_wait()


@triton.jit
def usable_here(plan, capacity, copy_capacity, LAYOUT: tl.constexpr):
    """Return 1 if a plan is usable and its rows and token copies fit into the buffers, else 0."""
    summary = plan + LAYOUT.summary
    rows_fit = tl.load(summary + NUM_TILES) * LAYOUT.block_m <= capacity
    copies_fit = tl.load(summary + NUM_COPIES) <= copy_capacity
    return tl.load(summary + IS_USABLE) * (rows_fit & copies_fit)


@triton.jit
def copy_rows(
    first, x_TD, send_buffer_TD, num_tokens,
    HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy up to ``ROWS`` rows of ``x_TD``, from ``first`` on, to the same send buffer rows."""
    row = first + tl.arange(0, ROWS)
    for start in range(0, HIDDEN_SIZE, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        at = row.to(tl.int64)[:, None] * HIDDEN_SIZE + column[None, :]
        mask = (row < num_tokens)[:, None] & (column < HIDDEN_SIZE)[None, :]
        tl.store(send_buffer_TD + at, tl.load(x_TD + at, mask=mask), mask=mask)
