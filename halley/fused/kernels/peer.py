"""Device functions on memory that other ranks and other programs write.

Words that programs wait for are int32 counters or epochs that only grow. A wait is bounded: a peer
that does not come within the time limit is written down in ``status`` and for the host, see
``halley.fused.kernels.status``; then all waits of the rank fail, and the kernel ends.
"""

import triton
import triton.language as tl


CLOCK_LANES = tl.constexpr(512)  # at least the threads of a program: see clock_ns
SPINS_PER_LOOK = tl.constexpr(256)  # polls between two looks at the clock


@triton.jit
def peer_ptr(ptrs_W, peer, like):
    """Return the base address of ``peer``'s copy, typed as the pointer ``like``."""
    # The hint must follow the cast: an address made from an integer has lost its alignment.
    return tl.multiple_of(tl.load(ptrs_W + peer).to(like.dtype), 16)


@triton.jit
def fence_async():
    """Order what this program acquired before the tensor-memory reads that follow."""
    tl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [tl.full((), 0, tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait_bulk_stores():
    """Wait until the tensor-memory stores of this thread stand in memory for all to see."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, $1;", "=r,r",
        [tl.full((), 0, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def clock_ns():
    """Return the device's clock, the same for all threads of the program, in ns."""
    # Every thread reads its own clock. The maximum over a tensor that spans all warps goes through
    # shared memory, which makes it one value: a condition that loops depend on must not differ.
    lanes = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,r", [tl.zeros((CLOCK_LANES,), tl.int32)],
        dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip
    return tl.max(lanes, axis=0)


@triton.jit
def poll(word, scope: tl.constexpr):
    """Return the word; later loads see all that was stored before it was written."""
    return tl.atomic_add(word, 0, sem="acquire", scope=scope)


@triton.jit
def failure(op: tl.constexpr, peer, index):
    """Return the code of a failed wait: which kernel's, for which rank, for which tile or chunk."""
    return tl.full((), op << 48, tl.int64) + tl.full((), 1 << 32, tl.int64) * peer + index


@triton.jit
def report(status, host_status, code):
    """Write down the first failure, where the kernels and where the host look for it."""
    if tl.atomic_cas(status, tl.full((), 0, tl.int64), code, sem="relaxed", scope="gpu") == 0:
        tl.store(host_status, code)


@triton.jit
def wait(word, target, timeout_ns, status, host_status, code, scope: tl.constexpr):
    """Spin until ``word >= target``; return False if that took too long or another wait failed."""
    value = poll(word, scope)
    spins = 0
    start = tl.full((), 0, tl.int64)
    healthy = True
    while (value < target) & healthy:
        spins += 1
        if spins % SPINS_PER_LOOK == 0:
            now = clock_ns()
            if spins == SPINS_PER_LOOK:
                start = now
            if now - start > timeout_ns:
                report(status, host_status, code)
            healthy = tl.atomic_add(status, 0, sem="relaxed", scope="gpu") == 0
        value = poll(word, scope)
    return value >= target


@triton.jit
def signal(word, value):
    """Set a word of another rank, after all earlier stores of this program.

    By a store: not every link carries atomic operations, and the word has one writer.
    """
    tl.debug_barrier()
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
