# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Show rows to the peers under a plan that stands: how a pass begins that is not the first.

Backward goes the ways of its forward, so that nothing is routed again: each rank stages its rows,
tells all others, and waits until all have told. What ranks show each other is which call's plan
they are about to use, since that is all they could differ in.
"""

import torch
import triton
import triton.language as tl

from halley.fused.kernels.layout import TASK_ROWS, Layout
from halley.fused.kernels.peer import failure, peer_ptr, report, wait
from halley.fused.kernels.plan_words import (
    CALL,
    NUM_SENDS,
    PUBLISHED,
    USABLE,
    count_pass,
    next_epoch,
)
from halley.fused.kernels.publish import call_of, raise_flags, stage_rows
from halley.fused.kernels.status import ORDER, STAGE
from halley.ops.kernels.launch import Launcher, aligned


_STAGE_ROWS = 16
_TASK_ROWS = tl.constexpr(TASK_ROWS)
_STAGE = tl.constexpr(STAGE)
_ORDER = tl.constexpr(ORDER)


@triton.jit
def _spread_weights(plan, weight_R, LAYOUT: tl.constexpr):
    """Write the routing weights of the plan's sends to the rows that they belong to."""
    num_sends = tl.load(plan + LAYOUT.summary + NUM_SENDS)
    num_sends *= tl.load(plan + LAYOUT.summary + USABLE)
    weights = (plan + LAYOUT.sum_weight).to(tl.pointer_type(tl.float32))
    k = tl.arange(0, LAYOUT.padded_k)
    step = tl.num_programs(0) * _TASK_ROWS
    for first in range(tl.program_id(0) * _TASK_ROWS, num_sends, step):
        send = first + tl.arange(0, _TASK_ROWS)
        real = tl.load(plan + LAYOUT.sum_origin + send) >= 0
        line = send[:, None] * LAYOUT.top_k + k[None, :]
        listed = real[:, None] & (k < LAYOUT.top_k)[None, :]
        row = tl.load(plan + LAYOUT.sum_slot + line, mask=listed, other=-1)
        weight = tl.load(weights + line, mask=row >= 0, other=0.0)
        tl.store(weight_R + row, weight, mask=row >= 0)


@triton.jit
def _wait_for_all(words, plan, call, epoch, status, host_words, timeout_ns, LAYOUT: tl.constexpr):
    """Wait until all ranks have staged; the plan is of no use if one did not, or for another."""
    came = True
    for peer in range(LAYOUT.num_ranks):
        code = failure(_STAGE, peer, call)
        flag = words + LAYOUT.arrived + peer
        if wait(flag, epoch, timeout_ns, status, host_words, code, "sys"):
            theirs = tl.load(call_of(words, peer, epoch, LAYOUT))
            if theirs != call:
                report(status, host_words, failure(_ORDER, peer, theirs))
                came = False
        else:
            came = False
    if not came:
        tl.store(plan + LAYOUT.summary + USABLE, 0)


@triton.jit(do_not_specialize=["num_tokens", "rank", "stage_tokens", "timeout_ns"])
def stage_kernel(
    x_TD, num_tokens, rank, stage_HTD, stage_tokens, words, words_ptrs_W, plan, weight_R,
    marks, status, host_words, timeout_ns: tl.int64,
    LAYOUT: tl.constexpr, SPREAD: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stage and spread the weights; the last to have staged tells the peers and waits for them."""
    call = tl.load(plan + LAYOUT.summary + CALL)
    epoch = next_epoch(marks, status, host_words)
    stage_TD = stage_HTD + (epoch % 2).to(tl.int64) * stage_tokens * HIDDEN_SIZE
    for first in range(tl.program_id(0) * ROWS, num_tokens, tl.num_programs(0) * ROWS):
        stage_rows(first, x_TD, stage_TD, num_tokens, HIDDEN_SIZE, ROWS, COLUMNS)
    if tl.program_id(0) == 0:
        for peer in range(LAYOUT.num_ranks):
            tl.store(call_of(peer_ptr(words_ptrs_W, peer, words), rank, epoch, LAYOUT), call)
    tl.debug_barrier()
    before = tl.atomic_add(marks + PUBLISHED, 1, sem="acq_rel", scope="sys")
    is_last = before == tl.num_programs(0) - 1
    if is_last:
        tl.store(marks + PUBLISHED, 0)
        count_pass(marks, epoch)
        raise_flags(LAYOUT.arrived, epoch, rank, words, words_ptrs_W, LAYOUT)
    if SPREAD:
        _spread_weights(plan, weight_R, LAYOUT)
    if is_last:
        _wait_for_all(words, plan, call, epoch, status, host_words, timeout_ns, LAYOUT)


_launch = Launcher(stage_kernel)


def stage_again(
    x_TD: torch.Tensor,
    weight_R: torch.Tensor | None,
    *,
    plan: torch.Tensor,
    rank: int,
    layout: Layout,
    stage_HTD: torch.Tensor,
    words: torch.Tensor,
    words_ptrs_W: torch.Tensor,
    marks: torch.Tensor,
    num_programs: int,
    status: torch.Tensor,
    host_words: torch.Tensor,
    timeout_ns: int,
) -> None:
    """Stage rows of this rank's tokens for the peers to fetch by a plan that stands.

    When it is done, the rows of all ranks stand in their stages.

    Args:
        x_TD: a row for each token of the plan's call: the tokens again, or gradients.
        weight_R: written if given: the routing weight of each row of the plan, float32; what pads
            the rows of an expert is left as it is.
        plan: made by ``make_plan`` for the call. If a peer does not come, or comes for another
            call's plan, it is not usable any more.
        rank: this rank's index in the group.
        layout: of the plan.
        stage_HTD, words, words_ptrs_W, marks: as for ``make_plan``.
        num_programs: programs of the launch.
        status, host_words: see ``kernels.status``.
        timeout_ns: how long to wait for a peer.
    """
    x_TD = aligned(x_TD)
    num_tokens, hidden_size = x_TD.shape
    _launch(
        num_programs,
        (x_TD, num_tokens, rank, stage_HTD, stage_HTD.shape[1], words, words_ptrs_W, plan,
         status if weight_R is None else weight_R, marks, status, host_words, timeout_ns),
        (layout, weight_R is not None, hidden_size, _STAGE_ROWS,
         min(1024, triton.next_power_of_2(hidden_size))),
        dtypes=(x_TD.dtype,), num_warps=8,
    )  # fmt: skip
