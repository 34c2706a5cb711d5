# Kernels are Triton, which only looks like Python to a type checker.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Where routed rows stand, one launch for each question; no counter is shared, so no order is left.

A program looks through all that it depends on: some thousand slots, or a count for each rank and
expert.
"""

import torch
import triton
import triton.language as tl

from halley.ops.kernels.launch import Launcher, aligned


_SLOTS = 4096  # that a program looks at in one step
_SEGMENTS = 256
_ROWS = 1024
_WARPS = 8


@triton.jit(do_not_specialize=["num_slots", "num_experts"])
def _sort_slots_kernel(idx, slots, counts, num_slots, num_experts, BLOCK: tl.constexpr):
    """Give one expert's slots their places, in order; the program behind the last, dropped slots.

    Example: with idx [2, 0, 2, -1, 1, 2] and 3 experts, program 2 counts 2 slots of experts before
    it, so its slots 0, 2, 5 come to places 2, 3, 4; program 3 puts slot 3 behind them.
    """
    expert = tl.program_id(0)
    num_before = 0
    num_own = 0
    for start in range(0, num_slots, BLOCK):
        key = _load_keys(idx, start, num_slots, num_experts, BLOCK)
        num_before += tl.sum((key < expert).to(tl.int32), axis=0)
        num_own += tl.sum((key == expert).to(tl.int32), axis=0)
    if expert < num_experts:
        tl.store(counts + expert, num_own.to(tl.int64))
    for start in range(0, num_slots, BLOCK):
        key = _load_keys(idx, start, num_slots, num_experts, BLOCK)
        own = (key == expert).to(tl.int32)
        place = num_before + tl.cumsum(own, axis=0) - own
        slot = start + tl.arange(0, BLOCK)
        tl.store(slots + place, slot.to(tl.int64), mask=key == expert)
        num_before += tl.sum(own, axis=0)


@triton.jit
def _load_keys(idx, start, num_slots, num_experts, BLOCK: tl.constexpr):
    """Return experts of a range of slots: E for dropped ones, E + 1 where there is no slot."""
    slot = start + tl.arange(0, BLOCK)
    real = slot < num_slots
    key = tl.load(idx + slot, mask=real, other=0).to(tl.int32)
    key = tl.where(key < 0, num_experts, key)
    return tl.where(real, key, num_experts + 1)


@triton.jit(do_not_specialize=["num_tokens", "top_k", "limit"])
def _take_slots_kernel(idx, used, kept, used_after, num_tokens, top_k, limit, BLOCK: tl.constexpr):
    """Say of one expert's slots which are among its first, all first choices before second ones.

    Example: with idx [[0], [1], [0], [0]], used 1 of expert 0 and a limit of 3, program 0 keeps
    slots 0 and 2, drops slot 3, and writes 4.
    """
    expert = tl.program_id(0)
    num_taken = tl.load(used + expert).to(tl.int32)
    for start in range(0, num_tokens * top_k, BLOCK):
        at = start + tl.arange(0, BLOCK)
        real = at < num_tokens * top_k
        slot = at % num_tokens * top_k + at // num_tokens
        own = real & (tl.load(idx + slot, mask=real, other=-1).to(tl.int32) == expert)
        place = num_taken + tl.cumsum(own.to(tl.int32), axis=0)
        tl.store(kept + slot, (place <= limit).to(tl.uint8), mask=own)
        num_taken += tl.sum(own.to(tl.int32), axis=0)
    tl.store(used_after + expert, num_taken.to(tl.int64))


@triton.jit
def _starts(counts, rank, local, num_ranks, num_local, SEGMENTS: tl.constexpr):
    """Return where a segment's rows begin: in order of expert, of arrival, and among its rank's.

    ``counts`` has those of one rank after another, of each the rows for each expert.
    """
    in_order = tl.zeros((), tl.int64)
    arrived = tl.zeros((), tl.int64)
    of_rank = tl.zeros((), tl.int64)
    for start in range(0, num_ranks * num_local, SEGMENTS):
        at = start + tl.arange(0, SEGMENTS)
        count = tl.load(counts + at, mask=at < num_ranks * num_local, other=0)
        r, e = at // num_local, at % num_local
        same_rank = (r == rank) & (e < local)
        in_order += tl.sum(tl.where((e < local) | ((e == local) & (r < rank)), count, 0), axis=0)
        arrived += tl.sum(tl.where((r < rank) | same_rank, count, 0), axis=0)
        of_rank += tl.sum(tl.where(same_rank, count, 0), axis=0)
    return in_order, arrived, of_rank


@triton.jit(do_not_specialize=["num_ranks", "num_local"])
def _group_rows_kernel(
    counts,
    order,
    inverse,
    ends,
    by_expert,
    num_ranks,
    num_local,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write where the rows of one source for one expert come from and where they go.

    Example: counts [[1, 2], [1, 0]]: program 2, of source 1 and expert 0, has one row, the fourth
    to arrive and the second in order of expert: order[1] = 3 and inverse[3] = 1.
    """
    rank, local = tl.program_id(0) // num_local, tl.program_id(0) % num_local
    in_order, arrived, _ = _starts(counts, rank, local, num_ranks, num_local, SEGMENTS)
    count = tl.load(counts + tl.program_id(0))
    tl.store(by_expert + local * num_ranks + rank, count)
    if rank == num_ranks - 1:
        tl.store(ends + local, (in_order + count).to(tl.int32))
    for start in range(0, count.to(tl.int32), ROWS):
        row = start + tl.arange(0, ROWS)
        tl.store(order + in_order + row, arrived + row, mask=row < count)
        tl.store(inverse + arrived + row, in_order + row, mask=row < count)


@triton.jit(do_not_specialize=["part", "num_parts", "num_segments"])
def _places_kernel(
    counts, places, part, num_parts, num_segments, SEGMENTS: tl.constexpr, ROWS: tl.constexpr
):
    """Write where one segment of a part's rows stands in the whole.

    Example: counts [1, 1] of the first part and [2, 0] of the second: in the whole the first
    segment has three rows, so program 1 puts the first part's second row at place 3.
    """
    segment = tl.program_id(0)
    in_order, _, of_part = _starts(counts, part, segment, num_parts, num_segments, SEGMENTS)
    count = tl.load(counts + part * num_segments + segment)
    for start in range(0, count.to(tl.int32), ROWS):
        row = start + tl.arange(0, ROWS)
        tl.store(places + of_part + row, in_order + row, mask=row < count)


_launch_sort_slots = Launcher(_sort_slots_kernel)
_launch_take_slots = Launcher(_take_slots_kernel)
_launch_group_rows = Launcher(_group_rows_kernel)
_launch_places = Launcher(_places_kernel)


def sort_slots(topk_idx_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots sorted by expert and each expert's number; as ``ops.routed_rows`` says."""
    num_slots = topk_idx_TK.numel()
    slots_N = topk_idx_TK.new_empty(num_slots, dtype=torch.int64)
    counts_E = topk_idx_TK.new_empty(num_experts, dtype=torch.int64)
    _launch_sort_slots(
        num_experts + 1,
        (aligned(topk_idx_TK), slots_N, counts_E, num_slots, num_experts),
        (_SLOTS,),
        dtypes=(topk_idx_TK.dtype,),
        num_warps=_WARPS,
    )
    return slots_N, counts_E


def take_slots(
    topk_idx_TK: torch.Tensor, used_E: torch.Tensor, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which slots an expert of bounded capacity takes; as ``ops.capacity`` says."""
    num_tokens, top_k = topk_idx_TK.shape
    kept_TK = topk_idx_TK.new_empty(num_tokens, top_k, dtype=torch.bool)
    used_after_E = torch.empty_like(used_E)
    _launch_take_slots(
        used_E.numel(),
        (
            aligned(topk_idx_TK),
            aligned(used_E),
            kept_TK.view(torch.uint8),
            used_after_E,
            num_tokens,
            top_k,
            limit,
        ),
        (_SLOTS,),
        dtypes=(topk_idx_TK.dtype,),
        num_warps=_WARPS,
    )
    return kept_TK, used_after_E


def group_rows(
    counts_WL: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return how rows that arrived come in order of expert; as ``ops.routed_rows`` says."""
    num_ranks, num_local = counts_WL.shape
    order_R, inverse_R = counts_WL.new_empty(num_rows), counts_WL.new_empty(num_rows)
    ends_L = counts_WL.new_empty(num_local, dtype=torch.int32)
    counts_LW = counts_WL.new_empty(num_local, num_ranks)
    _launch_group_rows(
        num_ranks * num_local,
        (aligned(counts_WL), order_R, inverse_R, ends_L, counts_LW, num_ranks, num_local),
        (_SEGMENTS, _ROWS),
        num_warps=_WARPS,
    )
    return order_R, inverse_R, ends_L, counts_LW


def places_of_part(counts: torch.Tensor, num_parts: int, part: int, num_rows: int) -> torch.Tensor:
    """Return the places in the whole of the rows of one part; as ``ops.fills`` says."""
    places_R = counts.new_empty(num_rows)
    num_segments = counts.numel() // num_parts
    _launch_places(
        num_segments,
        (aligned(counts), places_R, part, num_parts, num_segments),
        (_SEGMENTS, _ROWS),
        num_warps=_WARPS,
    )
    return places_R
