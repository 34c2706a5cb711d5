# Triton kernels: pyright reads them as plain Python and reports errors that are none.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Second GEMM with combine: combine finished columns while the GEMM computes the next ones.

In forward, the GEMM multiplies activations by the second projection, and a token's rows are summed
with its routing weights. In backward, it multiplies gradients by the transposed first projection,
and the sum has no weights; the gradients of the routing weights are sent as well. Both run the same
two kernels side by side: ``chunked_gemm_kernel`` (``combine_gemm.py``) and ``combine_kernel``.

Source: COMET (arXiv:2502.19811), sections 3.1 (columns first) and 3.2.
"""

import torch
import triton
import triton.language as tl

from halley.fused.kernels.combine_gemm import chunked_gemm_kernel, end_combine
from halley.fused.kernels.dispatch_plan import usable_here
from halley.fused.kernels.layout import (
    ANY_COPIES,
    COMBINE_TICKET,
    NUM_COPIES,
    PASS,
    SUM_TICKET,
    KernelContext,
)
from halley.fused.kernels.partial_sums import (
    count_sent,
    send_sums,
    send_weight_gradients,
    sum_task,
    sums_are_ready,
    wait_for_sums,
)
from halley.fused.kernels.peer import COMBINE, failure_code, poll, wait
from halley.fused.launch_pair import (
    end_with_first,
    let_second_begin,
    shape_launches,
    side_by_side,
)
from halley.ops.kernels.launch import Launcher, aligned
from halley.ops.kernels.tiles import GemmTile, describe_rows, describe_weights


_COMBINE_REGISTERS = 160  # per thread; divided among the combining CTAs of an SM


@triton.jit
def _task_at(index, num_tasks, plan, LAYOUT: tl.constexpr):
    """Return the combine task at an index of a chunk.

    Own tasks are spread evenly among those for other ranks, so that the link is always busy.
    Example: tasks 0 to 3 for other ranks, own tasks 4 and 5: the order is 0, 1, 4, 2, 3, 5.
    """
    num_others = tl.load(plan + LAYOUT.own_begin + LAYOUT.num_local) // LAYOUT.task_rows
    num_own = num_tasks - num_others
    own = index.to(tl.int64) * num_own // num_tasks
    is_own = (index + 1).to(tl.int64) * num_own // num_tasks > own
    own = own.to(tl.int32)
    return tl.where(is_own, num_others + own, index - own)


@triton.jit
def _groups_of_task(task, plan, LAYOUT: tl.constexpr):
    """Return how many groups of experts, from the first, must be done before a combine task."""
    group = tl.arange(0, LAYOUT.num_groups)
    first = task * LAYOUT.task_rows
    is_own = first >= tl.load(plan + LAYOUT.own_begin + LAYOUT.num_local)
    begins = tl.where(is_own, LAYOUT.own_begin, LAYOUT.other_begin)
    counts = tl.where(is_own, LAYOUT.own_copies, LAYOUT.other_copies)
    begin = tl.load(plan + begins + LAYOUT.num_local + group)
    count = tl.load(plan + counts + LAYOUT.num_local + group)
    has = (count > 0) & (begin < first + LAYOUT.task_rows)
    return tl.max(tl.where(has, group + 1, 0), axis=0)


@triton.jit
def _next_counter(num_done, num_columns, plan, LAYOUT: tl.constexpr):
    """Return the counter of the group after the first ``num_done``, and its final value."""
    need = tl.load(plan + LAYOUT.group_tiles + num_done % LAYOUT.num_groups) * num_columns
    return plan + LAYOUT.chunk_done + num_done, need


@triton.jit
def _count_done(num_done, chunk, num_wanted, num_columns, plan, LAYOUT: tl.constexpr):
    """Return how many groups are done, counted over all chunks; at most ``num_wanted``.

    ``num_done`` groups are known to be done, and so are all groups of earlier chunks.
    """
    num_done = tl.maximum(num_done, chunk * LAYOUT.num_groups)
    more = num_done < num_wanted
    while more:
        counter, need = _next_counter(num_done, num_columns, plan, LAYOUT)
        more = poll(counter, "gpu") >= need
        num_done += more.to(tl.int32)
        more &= num_done < num_wanted
    return num_done


@triton.jit(do_not_specialize=[
    "num_tokens", "combine_tokens", "capacity", "copy_capacity", "rank", "num_exits", "timeout_ns",
])  # fmt: skip
def combine_kernel(
    y_TD, z_RD, plan, combine_buffer_WTD, combine_ptrs_W, routing, routing_ptrs_W,
    dweight_RJ, idx_TK, dweights_TK, dweight_ptrs_W,
    num_tokens, combine_tokens, capacity, copy_capacity, rank, num_exits,
    status, host_status, timeout_ns: tl.int64,
    LAYOUT: tl.constexpr, NUM_SUMMANDS: tl.constexpr, HIDDEN_SIZE: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, SUM_ROWS: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Send the partial sums of finished tiles, and add the partial sums that arrive here.

    CTAs take two kinds of tasks, each by tickets of its own counter. Pass n of rank r::

        combine task   wait for chunk_done[c, g] of this rank's GEMM, for all groups g of its tokens
                       store partial sums in the source ranks' combine buffers
                       last task of chunk c: sums_ready[r, c] = n on every rank
        sum task       wait for sums_ready[s, c] >= n of all ranks s that contribute to this rank
                       add the sums of the ranks in order, store y_TD

    If the tiles of a combine task are not finished, the CTA does a sum task instead, provided that
    its sums have arrived. It waits for partial sums only when no combine task is left.

    There is no deadlock. Combine tasks wait for the GEMM, which waits for nothing and is launched
    first. This kernel begins only when all CTAs of the GEMM run. Sum tasks wait for combine tasks
    of ranks that follow the same rule.

    Example: 100 tokens, ``SUM_ROWS`` 8, hidden size 1024, chunks of 512 columns: 13 sum tasks for
    chunk 0, then 13 for chunk 1. A combine list of 192 entries has 3 combine tasks for each chunk
    (64 entries each).

    ``NUM_SUMMANDS`` is the number of columns of ``dweight_RJ`` in backward, and 0 in forward.
    ``COLUMNS`` is the width of a tile of the GEMM.
    """
    # No effect: the launch after a pair is no programmatic dependent launch (``shape_launches``).
    # It begins when this one has ended. Kept because all timings were measured with it.
    let_second_begin()
    BACKWARD: tl.constexpr = NUM_SUMMANDS > 0
    all_columns: tl.constexpr = (HIDDEN_SIZE + COLUMNS - 1) // COLUMNS
    num_chunks: tl.constexpr = (HIDDEN_SIZE + CHUNK - 1) // CHUNK
    chunk_columns: tl.constexpr = CHUNK // COLUMNS
    epoch = tl.load(plan + LAYOUT.summary + PASS)
    usable = usable_here(plan, capacity, copy_capacity, LAYOUT)
    chunk_tasks = tl.load(plan + LAYOUT.summary + NUM_COPIES) // LAYOUT.task_rows * usable
    num_tasks = chunk_tasks * num_chunks
    chunk_sum_tasks = tl.cdiv(num_tokens, SUM_ROWS)
    num_sum_tasks = chunk_sum_tasks * num_chunks * usable
    tickets = plan + LAYOUT.tickets
    combine_ticket = tl.atomic_add(tickets + COMBINE_TICKET, 1, sem="relaxed", scope="gpu")
    sum_ticket = tl.atomic_add(tickets + SUM_TICKET, 1, sem="relaxed", scope="gpu")
    arrived_chunk = -1  # the last chunk of which this CTA has seen all partial sums arrive
    num_done = 0  # groups of experts, counted over all chunks, that this CTA has seen finished
    while combine_ticket < num_tasks:
        chunk = combine_ticket // chunk_tasks
        num_columns = tl.minimum(all_columns - chunk * chunk_columns, chunk_columns)
        task = _task_at(combine_ticket - chunk * chunk_tasks, chunk_tasks, plan, LAYOUT)
        num_wanted = chunk * LAYOUT.num_groups + _groups_of_task(task, plan, LAYOUT)
        num_done = _count_done(num_done, chunk, num_wanted, num_columns, plan, LAYOUT)
        can_sum = False
        if num_done < num_wanted:
            can_sum = sums_are_ready(
                sum_ticket, num_sum_tasks, chunk_sum_tasks, arrived_chunk, plan, routing, epoch,
                LAYOUT,
            )  # fmt: skip
        if num_done >= num_wanted:
            send_sums(
                task, chunk, z_RD, plan, combine_ptrs_W, combine_tokens, rank,
                LAYOUT, HIDDEN_SIZE, ROWS, CHUNK, STAGES, not BACKWARD,
            )  # fmt: skip
            if BACKWARD:
                if chunk == 0:
                    send_weight_gradients(
                        task, dweight_RJ, plan, dweight_ptrs_W, combine_tokens, rank,
                        LAYOUT, NUM_SUMMANDS, ROWS,
                    )  # fmt: skip
            count_sent(chunk, chunk_tasks, plan, routing, routing_ptrs_W, rank, epoch, LAYOUT)
            combine_ticket = tl.atomic_add(tickets + COMBINE_TICKET, 1, sem="relaxed", scope="gpu")
        elif can_sum:
            arrived_chunk = sum_ticket // chunk_sum_tasks
            sum_task(
                sum_ticket % chunk_sum_tasks, arrived_chunk, y_TD, combine_buffer_WTD,
                combine_tokens, plan, num_tokens, idx_TK, dweights_TK, dweight_ptrs_W, rank,
                LAYOUT, BACKWARD, HIDDEN_SIZE, SUM_ROWS, CHUNK,
            )  # fmt: skip
            sum_ticket = tl.atomic_add(tickets + SUM_TICKET, 1, sem="relaxed", scope="gpu")
        else:
            code = failure_code(COMBINE, 0, chunk)
            counter, need = _next_counter(num_done, num_columns, plan, LAYOUT)
            if not wait(counter, need, timeout_ns, status, host_status, code, "gpu"):
                combine_ticket = num_tasks  # a wait failed, so this CTA sends no more sums
    if sum_ticket >= num_sum_tasks:
        sum_ticket = tl.atomic_add(tickets + SUM_TICKET, 1, sem="relaxed", scope="gpu")
    while sum_ticket < num_sum_tasks:
        chunk = sum_ticket // chunk_sum_tasks
        if chunk != arrived_chunk:
            arrived_chunk = chunk
            if not wait_for_sums(
                chunk, plan, routing, epoch, rank, status, host_status, timeout_ns, LAYOUT
            ):
                num_sum_tasks = 0  # a wait failed, so this CTA ends
        if num_sum_tasks > 0:
            sum_task(
                sum_ticket % chunk_sum_tasks, chunk, y_TD, combine_buffer_WTD, combine_tokens,
                plan, num_tokens, idx_TK, dweights_TK, dweight_ptrs_W, rank,
                LAYOUT, BACKWARD, HIDDEN_SIZE, SUM_ROWS, CHUNK,
            )  # fmt: skip
        sum_ticket = tl.atomic_add(tickets + SUM_TICKET, 1, sem="relaxed", scope="gpu")
    end_combine(num_exits, plan, routing, status, host_status, LAYOUT)
    end_with_first()


_launch_second_gemm = Launcher(chunked_gemm_kernel)
_launch_combine = Launcher(combine_kernel)


def gemm_combine(
    context: KernelContext,
    plan: torch.Tensor,
    *,
    y_TD: torch.Tensor,
    z_RD: torch.Tensor,
    h_RF: torch.Tensor,
    down_LDF: torch.Tensor,
    fused: bool = True,
    copy_capacity: int = ANY_COPIES,
) -> None:
    """Multiply by the second projection, and send each token's weighted sum to its source rank.

    Args:
        context: buffers of this rank, with the layout of the plan.
        plan: made by ``make_plan`` for this call.
        y_TD: written: the layer's output for this rank's tokens.
        z_RD: scratch, written: output rows of the second projection.
        h_RF: activations from ``dispatch_gemm``.
        down_LDF: stacked weights, ``(L, D, F)``.
        fused: False runs the whole GEMM before the kernel that combines.
        copy_capacity: capacity in token copies of ``dispatch_gemm``, if it saved them.

    As in ``dispatch_gemm``, the kernels do nothing if the plan has more rows than ``h_RF`` or
    ``z_RD``, or more token copies than ``copy_capacity``.
    """
    unused = context.status
    _launch_gemm_and_combine(
        context,
        plan,
        tile=context.config.down,
        rows=h_RF,
        weights=down_LDF,
        y_TD=y_TD,
        z_RD=z_RD,
        weight_gradients=(unused, unused, unused, unused),
        num_summands=0,
        capacities=(min(len(z_RD), len(h_RF)), copy_capacity),
        dtypes=(z_RD.dtype,),
        fused=fused,
    )


def dgrad_combine(
    context: KernelContext,
    plan: torch.Tensor,
    *,
    dx_TD: torch.Tensor,
    dweights_TK: torch.Tensor,
    z_RD: torch.Tensor,
    dpre_RG: torch.Tensor,
    dweight_RJ: torch.Tensor,
    up_LGD: torch.Tensor,
    topk_idx_TK: torch.Tensor,
    fused: bool = True,
) -> None:
    """Multiply gradients by the first projection, and send their sums to the source ranks.

    Args:
        context: buffers of this rank, with the layout of the plan.
        plan: made by ``make_plan`` in forward.
        dx_TD: written: gradient of this rank's tokens.
        dweights_TK: written: gradient of their routing weights, float32; 0 in dropped slots.
        z_RD: scratch, written: gradient of each row.
        dpre_RG, dweight_RJ: from ``dispatch_dgrad``.
        up_LGD: stacked weights, as in forward.
        topk_idx_TK: expert ids of the call.
        fused: False runs the whole GEMM before the kernel that combines.
    """
    idx_TK = aligned(topk_idx_TK)
    _launch_gemm_and_combine(
        context,
        plan,
        tile=context.config.up_grad,
        rows=dpre_RG,
        weights=up_LGD,
        y_TD=dx_TD,
        z_RD=z_RD,
        weight_gradients=(dweight_RJ, idx_TK, dweights_TK, context.dweight_buffer.ptrs_W),
        num_summands=dweight_RJ.shape[1],
        capacities=(len(dpre_RG), ANY_COPIES),
        dtypes=(z_RD.dtype, idx_TK.dtype),
        fused=fused,
    )


def _launch_gemm_and_combine(
    context: KernelContext,
    plan: torch.Tensor,
    *,
    tile: GemmTile,
    rows: torch.Tensor,
    weights: torch.Tensor,
    y_TD: torch.Tensor,
    z_RD: torch.Tensor,
    weight_gradients: tuple[torch.Tensor, ...],
    num_summands: int,
    capacities: tuple[int, int],
    dtypes: tuple[torch.dtype, ...],
    fused: bool,
) -> None:
    """Launch the GEMM that computes ``z_RD``, and the kernel that sums its rows to ``y_TD``."""
    layout, config, backward = context.layout, context.config, num_summands > 0
    routing, combine = context.routing_buffer, context.combine_buffer
    pair = shape_launches(
        tile=tile,
        num_sms=context.num_sms,
        fused=fused,
        move_first=False,
        move_registers=_COMBINE_REGISTERS // config.combiners_beside,
        ctas_beside=config.combiners_beside,
        ctas_after=config.combiners_after,
    )
    hidden_size, depth = z_RD.shape[1], rows.shape[1]
    a_desc = describe_rows(rows, block_rows=layout.block_m, block_columns=tile.block_k)
    b_desc = describe_weights(weights, num_projections=1, tile=tile, transposed=backward)
    z_desc = describe_rows(z_RD, block_rows=layout.block_m, block_columns=tile.block_n)
    with side_by_side(fused):
        _launch_second_gemm(
            pair.num_gemm_ctas,
            (z_desc, plan, a_desc, b_desc, routing.local, *capacities,
             pair.num_exits, context.status, context.host_status),
            (layout, backward, hidden_size, depth, config.chunk_columns,
             tile.block_n, tile.block_k, tile.group, tile.run),
            dtypes=(z_RD.dtype,), **pair.gemm_options,
        )  # fmt: skip
        _launch_combine(
            pair.num_move_ctas,
            (y_TD, z_RD, plan, combine.local, combine.ptrs_W, routing.local, routing.ptrs_W,
             *weight_gradients, y_TD.shape[0], combine.local.shape[1], *capacities,
             context.rank, pair.num_exits,
             context.status, context.host_status, context.timeout_ns),
            (layout, num_summands, hidden_size, config.combine_rows, config.combine_stages,
             config.sum_rows, config.chunk_columns, tile.block_n),
            dtypes=dtypes, **pair.move_options,
        )  # fmt: skip
