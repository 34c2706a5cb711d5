# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportInvalidTypeForm=false, reportArgumentType=false
"""Kernels for routing: sort slots by expert, apply expert capacity, sort received rows by expert.

CTAs share no counter, signal nothing and wait for nothing, so the results are deterministic. Each
CTA reads all inputs on which its results depend: some thousand slots, or one count for each rank
and expert.
"""

import torch
import triton
import triton.language as tl

from halley.ops.kernels.launch import Launcher, aligned


# Elements in one step of a CTA's loop: slots, (rank, expert) row counts, and rows.
_SLOTS = 4096
_SEGMENTS = 256
_ROWS = 1024
_WARPS = 8


@triton.jit(do_not_specialize=["num_slots", "num_experts"])
def _sort_slots_kernel(idx, slots, counts, num_slots, num_experts, BLOCK: tl.constexpr):
    """Sort slots by expert: one CTA per expert stores its slots after those of lower expert ids.

    There is one CTA for each expert, and one for the dropped slots, which come last.
    Example: idx is [2, 0, 2, -1, 1, 2] with 3 experts. CTA 2 counts 2 slots of experts 0 and 1, and
    stores its slots 0, 2 and 5 at indices 2, 3 and 4. CTA 3 stores slot 3 at index 5.
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
    """Return expert ids of ``BLOCK`` slots from ``start``: E if dropped, E + 1 past the end."""
    slot = start + tl.arange(0, BLOCK)
    real = slot < num_slots
    key = tl.load(idx + slot, mask=real, other=0).to(tl.int32)
    key = tl.where(key < 0, num_experts, key)
    return tl.where(real, key, num_experts + 1)


@triton.jit(do_not_specialize=["num_tokens", "top_k", "limit"])
def _take_slots_kernel(idx, used, kept, used_after, num_tokens, top_k, limit, BLOCK: tl.constexpr):
    """Store which (token, choice) slots each expert keeps up to ``limit``, first choices first.

    Example: idx is [[0], [1], [0], [0]], and expert 0 has 1 slot of at most 3 already. CTA 0 keeps
    slots 0 and 2, drops slot 3, and stores 4 as the number of slots that chose expert 0.
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
    """Return the index of a (rank, expert) pair's first row in expert order and in arrival order.

    Rows arrive sorted by source rank. ``counts`` is (ranks, experts).
    """
    in_order = tl.zeros((), tl.int64)
    arrived = tl.zeros((), tl.int64)
    for start in range(0, num_ranks * num_local, SEGMENTS):
        at = start + tl.arange(0, SEGMENTS)
        count = tl.load(counts + at, mask=at < num_ranks * num_local, other=0)
        r, e = at // num_local, at % num_local
        same_rank = (r == rank) & (e < local)
        in_order += tl.sum(tl.where((e < local) | ((e == local) & (r < rank)), count, 0), axis=0)
        arrived += tl.sum(tl.where((r < rank) | same_rank, count, 0), axis=0)
    return in_order, arrived


@triton.jit(do_not_specialize=["num_ranks", "num_local"])
def _group_rows_kernel(
    counts, order, inverse, ends, by_expert, num_ranks, num_local,
    SEGMENTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store the order that sorts received rows by expert, its inverse, expert ends and counts.

    Each CTA handles one (source rank, expert). Example: counts is [[1, 2], [1, 0]]. CTA 2 (rank 1,
    expert 0) has one row. It is the fourth row in arrival order and the second in expert order:
    order[1] = 3 and inverse[3] = 1.
    """
    rank, local = tl.program_id(0) // num_local, tl.program_id(0) % num_local
    in_order, arrived = _starts(counts, rank, local, num_ranks, num_local, SEGMENTS)
    count = tl.load(counts + tl.program_id(0))
    tl.store(by_expert + local * num_ranks + rank, count)
    if rank == num_ranks - 1:
        tl.store(ends + local, (in_order + count).to(tl.int32))
    for start in range(0, count.to(tl.int32), ROWS):
        row = start + tl.arange(0, ROWS)
        tl.store(order + in_order + row, arrived + row, mask=row < count)
        tl.store(inverse + arrived + row, in_order + row, mask=row < count)


_launch_sort_slots = Launcher(_sort_slots_kernel)
_launch_take_slots = Launcher(_take_slots_kernel)
_launch_group_rows = Launcher(_group_rows_kernel)


def sort_slots(topk_idx_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort slots by expert on a GPU; return the slots, and the number of slots of each expert."""
    num_slots = topk_idx_TK.numel()
    slots_N = topk_idx_TK.new_empty(num_slots, dtype=torch.int64)
    counts_E = topk_idx_TK.new_empty(num_experts, dtype=torch.int64)
    _launch_sort_slots(
        num_experts + 1,
        (aligned(topk_idx_TK), slots_N, counts_E, num_slots, num_experts),
        (_SLOTS,), dtypes=(topk_idx_TK.dtype,), num_warps=_WARPS,
    )  # fmt: skip
    return slots_N, counts_E


def take_slots(
    topk_idx_TK: torch.Tensor, used_E: torch.Tensor, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which slots experts keep up to ``limit``, and updated counts ``used_E``; on a GPU."""
    num_tokens, top_k = topk_idx_TK.shape
    kept_TK = topk_idx_TK.new_empty(num_tokens, top_k, dtype=torch.bool)
    used_after_E = torch.empty_like(used_E)
    _launch_take_slots(
        used_E.numel(),
        (aligned(topk_idx_TK), aligned(used_E), kept_TK.view(torch.uint8), used_after_E,
         num_tokens, top_k, limit),
        (_SLOTS,), dtypes=(topk_idx_TK.dtype,), num_warps=_WARPS,
    )  # fmt: skip
    return kept_TK, used_after_E


def group_rows(
    counts_WL: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order received rows by expert on a GPU; return order, inverse, experts' ends and counts."""
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
