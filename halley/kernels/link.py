# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""A slower link than there is, emulated, to see what the kernels would do on it."""

import triton
import triton.language as tl

from halley.kernels.peer import clock_ns


@triton.jit
def hold_link(busy_until, num_bytes, BYTES_PER_US: tl.constexpr):
    """Wait until a link of that rate would have let some bytes more through.

    Args:
        busy_until: int64, until when the link is busy with what came before, ns; all programs of a
            rank take their time of the link here, one after another.
    """
    took = num_bytes.to(tl.int64) * 1000 // BYTES_PER_US
    now = clock_ns()
    nothing = tl.full((), 0, tl.int64)
    seen = tl.atomic_add(busy_until, nothing, sem="relaxed", scope="gpu")
    end = tl.maximum(seen, now) + took
    before = tl.atomic_cas(busy_until, seen, end, sem="relaxed", scope="gpu")
    while before != seen:
        seen = before
        end = tl.maximum(seen, now) + took
        before = tl.atomic_cas(busy_until, seen, end, sem="relaxed", scope="gpu")
    while now < end:
        tl.atomic_add(busy_until, nothing, sem="relaxed", scope="gpu")
        now = clock_ns()
