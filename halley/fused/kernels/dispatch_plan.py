# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Make the plan of this rank from the routing tables of all ranks, on the device, in one launch.

Four kinds of work are taken by tickets, one kind after the other. ``route``: write this rank's
routing to every rank's mailbox. ``count``: wait for all tables and turn the counts of blocks into
first rows. ``stage``: lay out this rank's rows for its peers, while tables are on their way.
``place``: give each slot its row, each send its place in the list.
"""

import torch
import triton
import triton.language as tl

from halley.fused.kernels.count import count_task
from halley.fused.kernels.layout import Layout
from halley.fused.kernels.peer import failure, wait
from halley.fused.kernels.place import place_task
from halley.fused.kernels.plan_words import (
    COUNTED,
    EXITED,
    LAID_OUT,
    PUBLISHED,
    STAGED,
    TICKET,
    USABLE,
    count_pass,
    next_epoch,
)
from halley.fused.kernels.publish import raise_flags, route_task, stage_rows
from halley.fused.kernels.status import PLAN, STAGE
from halley.ops.kernels.launch import Launcher, aligned


_STAGE_ROWS = 16
_PROGRAMS = 2  # on a multiprocessor: tasks are short and mostly wait for memory
_PLAN = tl.constexpr(PLAN)
_STAGE = tl.constexpr(STAGE)
_NEVER = tl.constexpr(2**62)  # ns


@triton.jit
def _wait_for_rows(words, plan, epoch, status, host_words, timeout_ns, LAYOUT: tl.constexpr):
    """Wait until all ranks have staged; the plan is of no use if one did not."""
    for peer in range(LAYOUT.num_ranks):
        code = failure(_STAGE, peer, 0)
        flag = words + LAYOUT.staged + peer
        if not wait(flag, epoch, timeout_ns, status, host_words, code, "sys"):
            tl.store(plan + LAYOUT.summary + USABLE, 0)


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "wanted_tokens",
        "rank",
        "num_tasks",
        "stage_tokens",
        "max_rows",
        "timeout_ns",
    ]
)
def plan_kernel(
    x_TD, idx_TK, weights_TK, num_tokens, wanted_tokens, rank, num_tasks, stage_HTD, stage_tokens,
    words, words_ptrs_W, plan, max_rows, marks, status, host_words, timeout_ns: tl.int64,
    LAYOUT: tl.constexpr, LOCAL_PADDED: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Route, count, stage and place, by tickets in this order: a task waits for earlier ones only.

    The last program waits for the rows of all ranks.
    """
    first_count = num_tasks
    first_stage = first_count + LAYOUT.num_columns
    first_place = first_stage + num_tasks
    end = first_place + LAYOUT.num_ranks * LAYOUT.max_blocks + LAYOUT.num_local
    healthy = True
    epoch = next_epoch(marks, status, host_words)
    stage_TD = stage_HTD + (epoch % 2).to(tl.int64) * stage_tokens * HIDDEN_SIZE
    task = tl.atomic_add(marks + TICKET, 1, sem="relaxed", scope="gpu")
    while task < end:
        if task < first_count:
            route_task(
                task, idx_TK, weights_TK, num_tokens, wanted_tokens, epoch, rank,
                words, words_ptrs_W, LAYOUT,
            )  # fmt: skip
            tl.debug_barrier()
            before = tl.atomic_add(marks + PUBLISHED, 1, sem="acq_rel", scope="sys")
            if before == num_tasks - 1:
                raise_flags(LAYOUT.arrived, epoch, rank, words, words_ptrs_W, LAYOUT)
        elif task < first_stage:
            count_task(
                task - first_count, words, words_ptrs_W, plan, epoch, rank, max_rows,
                marks, status, host_words, timeout_ns, LAYOUT, LOCAL_PADDED,
            )  # fmt: skip
        elif task < first_place:
            row = (task - first_stage) * ROWS
            stage_rows(row, x_TD, stage_TD, num_tokens, HIDDEN_SIZE, ROWS, COLUMNS)
            tl.debug_barrier()
            before = tl.atomic_add(marks + STAGED, 1, sem="acq_rel", scope="sys")
            if before == num_tasks - 1:
                raise_flags(LAYOUT.staged, epoch, rank, words, words_ptrs_W, LAYOUT)
        elif healthy:
            # No limit of its own, lest it blame this rank before a count task blames the one that
            # does not come: count tasks are under way, and end because their waits are bounded.
            code = failure(_PLAN, rank, 0)
            laid_out = marks + LAID_OUT
            healthy = wait(laid_out, epoch, _NEVER, status, host_words, code, "gpu")
            if healthy:
                place_task(task - first_place, words, plan, epoch, rank, LAYOUT)
        task = tl.atomic_add(marks + TICKET, 1, sem="relaxed", scope="gpu")
    exited = tl.atomic_add(marks + EXITED, 1, sem="acq_rel", scope="gpu")
    if exited == tl.num_programs(0) - 1:
        tl.store(marks + TICKET, 0)
        tl.store(marks + PUBLISHED, 0)
        tl.store(marks + COUNTED, 0)
        tl.store(marks + STAGED, 0)
        tl.store(marks + EXITED, 0)
        count_pass(marks, epoch)
        _wait_for_rows(words, plan, epoch, status, host_words, timeout_ns, LAYOUT)


_launch = Launcher(plan_kernel)


def make_plan(
    plan: torch.Tensor,
    x_TD: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    *,
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
    max_rows: int = 0,
) -> None:
    """Exchange rows and routing with all ranks and write the plan of this rank.

    When it is done, the rows of all ranks stand in their stages for peers to read.

    Args:
        plan: written: ``(layout.plan_words,)`` int32, any content before.
        x_TD: tokens of this rank. If they are more than a stage has room for, none is published
            but their number.
        topk_idx_TK: expert ids in ``[0, E)`` or ``DROPPED``, an int dtype.
        topk_weights_TK: weights, a float dtype.
        rank: this rank's index in the group.
        layout: sizes of the group.
        stage_HTD: this rank's copy of the two symmetric stages, ``(2, tokens, D)``; passes use
            them in turn, as peers may still read the one of the last.
        words: this rank's mailbox, int32, zero before the first call.
        words_ptrs_W: addresses of all ranks' mailboxes, int64.
        marks: ``(NUM_MARKS,)`` int32, zero before the first call: how far the launch has come, and
            how many passes there were.
        num_programs: programs of the launch.
        status, host_words: see ``kernels.status``.
        timeout_ns: how long to wait for a peer.
        max_rows: rows that there is room for, if the host does not ask; 0 if it does.

    If a rank has more tokens than there is room for, the plan is not usable on any rank, and
    ``host_words[2]`` is that number on all of them; it is 0 otherwise. With ``max_rows`` this is a
    failure, and so are more rows, of which the others learn when they wait for this rank's sums.
    """
    x_TD, idx_TK, weights_TK = aligned(x_TD), aligned(topk_idx_TK), aligned(topk_weights_TK)
    num_tokens, hidden_size = x_TD.shape
    wanted_tokens = 0
    if num_tokens > stage_HTD.shape[1]:
        num_tokens, wanted_tokens = 0, num_tokens
    tokens_a_task = min(_STAGE_ROWS, layout.block_tokens)
    num_tasks = max(1, -(-num_tokens // tokens_a_task))
    _launch(
        _PROGRAMS * num_programs,
        (x_TD, idx_TK, weights_TK, num_tokens, wanted_tokens, rank, num_tasks, stage_HTD,
         stage_HTD.shape[1], words, words_ptrs_W, plan, max_rows, marks, status, host_words,
         timeout_ns),
        (layout, triton.next_power_of_2(layout.num_local), hidden_size, _STAGE_ROWS,
         min(1024, triton.next_power_of_2(hidden_size))),
        dtypes=(x_TD.dtype, idx_TK.dtype, weights_TK.dtype), num_warps=8, max_registers=128,
    )  # fmt: skip
