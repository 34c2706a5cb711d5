# Triton kernels: pyright reads them as plain Python and reports errors that are none.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Publish rows under an existing plan: the first launch of a backward pass and of a recompute.

Backward uses the plan of its forward, so it exchanges no routing. Ranks exchange only the number of
the call whose plan they use. Different numbers mean that they run layers in different orders.
"""

import torch
import triton
import triton.language as tl

from halley.fused.kernels.dispatch_plan import COPY_ROWS, copy_rows
from halley.fused.kernels.layout import (
    CALL,
    IS_USABLE,
    NUM_COPIES,
    PASS,
    PUBLISHED,
    KernelContext,
)
from halley.fused.kernels.peer import (
    ORDER,
    ROWS,
    count_pass,
    failure_code,
    next_epoch,
    peer_ptr,
    report_failure,
    signal_all,
    wait,
)
from halley.fused.kernels.routing_exchange import call_in_use
from halley.ops.kernels.launch import Launcher, aligned


@triton.jit
def _spread_weights(plan, weight_R, LAYOUT: tl.constexpr):
    """Store the routing weight of each row of the plan; the CTAs share the combine list."""
    num_copies = tl.load(plan + LAYOUT.summary + NUM_COPIES)
    num_copies *= tl.load(plan + LAYOUT.summary + IS_USABLE)
    weights = (plan + LAYOUT.combine_weight).to(tl.pointer_type(tl.float32))
    k = tl.arange(0, LAYOUT.padded_k)
    step = tl.num_programs(0) * LAYOUT.task_rows
    for first in range(tl.program_id(0) * LAYOUT.task_rows, num_copies, step):
        copy = first + tl.arange(0, LAYOUT.task_rows)
        real = tl.load(plan + LAYOUT.combine_origin + copy) >= 0
        line = copy[:, None] * LAYOUT.top_k + k[None, :]
        listed = real[:, None] & (k < LAYOUT.top_k)[None, :]
        row = tl.load(plan + LAYOUT.combine_rows + line, mask=listed, other=-1)
        weight = tl.load(weights + line, mask=row >= 0, other=0.0)
        tl.store(weight_R + row, weight, mask=row >= 0)


@triton.jit
def _wait_for_all(
    routing, plan, call, epoch, status, host_status, timeout_ns, LAYOUT: tl.constexpr
):
    """Wait until all ranks have published rows for this call; else make the plan unusable."""
    complete = True
    for peer in range(LAYOUT.num_ranks):
        code = failure_code(ROWS, peer, call)
        flag = routing + LAYOUT.published + peer
        if wait(flag, epoch, timeout_ns, status, host_status, code, "sys"):
            theirs = tl.load(call_in_use(routing, peer, epoch, LAYOUT))
            if theirs != call:
                report_failure(status, host_status, failure_code(ORDER, peer, theirs))
                complete = False
        else:
            complete = False
    if not complete:
        tl.store(plan + LAYOUT.summary + IS_USABLE, 0)


@triton.jit(do_not_specialize=["num_tokens", "rank", "send_tokens", "timeout_ns"])
def publish_rows_kernel(
    x_TD, num_tokens, rank, send_buffer_HTD, send_tokens, routing, routing_ptrs_W, plan, weight_R,
    counters, status, host_status, timeout_ns: tl.int64,
    LAYOUT: tl.constexpr, SPREAD_WEIGHTS: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy this rank's rows to its send buffer and wait until all ranks have done so.

    Pass n of rank r with the plan of call c::

        all CTAs        x_TD -> send buffer n % 2
        CTA 0           call_in_use[n % 2, r] = c on every rank
        last CTA        published[r] = n on every rank
        last CTA        wait for published[s] >= n of all ranks s, compare call_in_use[n % 2, s]

    There is no deadlock: each CTA copies its rows before it counts itself, and only the last CTA
    waits, after it has set the flags.

    Example: 100 rows, ``ROWS`` 16, 4 CTAs. CTA 0 copies rows 0-15 and 64-79, CTA 2 copies rows
    32-47 and 96-99.
    """
    call = tl.load(plan + LAYOUT.summary + CALL)
    epoch = next_epoch(counters, status, host_status)
    send_buffer_TD = send_buffer_HTD + (epoch % 2).to(tl.int64) * send_tokens * HIDDEN_SIZE
    for first in range(tl.program_id(0) * ROWS, num_tokens, tl.num_programs(0) * ROWS):
        copy_rows(first, x_TD, send_buffer_TD, num_tokens, HIDDEN_SIZE, ROWS, COLUMNS)
    if tl.program_id(0) == 0:
        for peer in range(LAYOUT.num_ranks):
            theirs = peer_ptr(routing_ptrs_W, peer, routing)
            tl.store(call_in_use(theirs, rank, epoch, LAYOUT), call)
    tl.debug_barrier()  # the rows of all threads are stored before one thread releases
    before = tl.atomic_add(counters + PUBLISHED, 1, sem="acq_rel", scope="sys")
    is_last = before == tl.num_programs(0) - 1
    if is_last:
        tl.store(counters + PUBLISHED, 0)
        tl.store(plan + LAYOUT.summary + PASS, epoch)
        count_pass(counters, epoch)
        signal_all(LAYOUT.published, epoch, rank, routing, routing_ptrs_W, LAYOUT)
    if SPREAD_WEIGHTS:
        _spread_weights(plan, weight_R, LAYOUT)
    if is_last:
        _wait_for_all(routing, plan, call, epoch, status, host_status, timeout_ns, LAYOUT)


_launch = Launcher(publish_rows_kernel)


def publish_rows(
    context: KernelContext,
    plan: torch.Tensor,
    *,
    x_TD: torch.Tensor,
    weight_R: torch.Tensor | None = None,
) -> None:
    """Begin another pass with an existing plan: fill the send buffer, and wait for all ranks.

    When the launch has ended, the rows of all ranks can be fetched.

    Args:
        context: buffers of this rank, with the layout of the plan.
        plan: made by ``make_plan``. It becomes unusable if a rank does not publish in time, or
            publishes for the plan of another call.
        x_TD: one row for each token of that call: the token, or the gradient of its output.
        weight_R: written if given: the routing weight of each row of the plan, float32. Rows that
            are padding keep their content.
    """
    routing, send = context.routing_buffer, context.send_buffer.local
    x_TD = aligned(x_TD)
    num_tokens, hidden_size = x_TD.shape
    _launch(
        context.num_sms,
        (x_TD, num_tokens, context.rank, send, send.shape[1], routing.local, routing.ptrs_W, plan,
         context.status if weight_R is None else weight_R, context.counters,
         context.status, context.host_status, context.timeout_ns),
        (context.layout, weight_R is not None, hidden_size, COPY_ROWS,
         min(1024, triton.next_power_of_2(hidden_size))),
        dtypes=(x_TD.dtype,), num_warps=8,
    )  # fmt: skip
