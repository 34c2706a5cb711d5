# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Words of a plan's summary, and marks of how far the launch that makes a plan has come."""

import triton
import triton.language as tl

from halley.fused.kernels.peer import failure, report
from halley.fused.kernels.status import EPOCHS


_EPOCHS = tl.constexpr(EPOCHS)
_LAST_EPOCH = tl.constexpr(2**31 - 2)

# The summary.
USABLE = tl.constexpr(0)  # 1 when all tables came whole; else nothing else of the plan may be read
NUM_TILES = tl.constexpr(1)
NUM_SENDS = tl.constexpr(2)  # end of the list of sends, in whole tasks
NUM_OWN_SENDS = tl.constexpr(3)  # end of this rank's own, in whole tasks
CALL = tl.constexpr(4)  # epoch of the call that the plan was made for

# The marks. All but LAID_OUT and EPOCH are zero between launches.
NUM_MARKS = 16
TICKET = tl.constexpr(0)
PUBLISHED = tl.constexpr(1)  # blocks of routing; STAGED: pieces of rows
COUNTED = tl.constexpr(2)
LAID_OUT = tl.constexpr(3)  # epoch of the last plan whose tables were counted
EXITED = tl.constexpr(4)
STAGED = tl.constexpr(6)
EPOCH = tl.constexpr(5)  # number of the last pass that was begun; the device counts, not the host


@triton.jit
def next_epoch(marks, status, host_words):
    """Return the number of the pass that this launch begins; ``count_pass`` must follow."""
    epoch = tl.load(marks + EPOCH) + 1
    if epoch == _LAST_EPOCH:
        report(status, host_words, failure(_EPOCHS, 0, epoch))
    return epoch


@triton.jit
def count_pass(marks, epoch):
    """Count a pass as begun, for the launches that follow; when all programs know its number."""
    tl.store(marks + EPOCH, epoch)


@triton.jit
def usable_here(plan, capacity, send_capacity, LAYOUT: tl.constexpr):
    """Return 1 if a plan is usable and there is room for its rows and its sends, else 0."""
    summary = plan + LAYOUT.summary
    rows_fit = tl.load(summary + NUM_TILES) * LAYOUT.block_m <= capacity
    return tl.load(summary + USABLE) * (rows_fit & (tl.load(summary + NUM_SENDS) <= send_capacity))


@triton.jit
def base_of(plan, i, column, LAYOUT: tl.constexpr):
    """Return where the bases of a column's blocks stand, of the ring's i-th source."""
    return plan + LAYOUT.base + (i * LAYOUT.num_columns + column) * LAYOUT.max_blocks
