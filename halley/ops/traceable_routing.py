"""Routing as torch.library operators: keep slots within a capacity, sort them, move their rows.

``torch.compile`` traces these operators into one graph. Each is one node, so that a compiler pass
can recognise it. ``take_slots`` continues from the counts of earlier tokens, so a batch can be
split into microbatches; ``take_slots_by_weight`` ranks all tokens of the batch.
"""

import torch

from halley.core.routing import expert_starts, sort_keys
from halley.ops.library import define, save_inputs, takes_kernels


def _sort_slots(topk_idx: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slots (token, choice) sorted by expert, then token, and each expert's number of slots.

    Dropped slots come last and are not counted. Returns slots ``t * K + k``, int64 ``(T * K,)``,
    and counts, int64 ``(E,)``. Example: idx [[0, 2], [2, -1]] and 4 experts give slots 0, 1, 2, 3
    and counts [1, 0, 2, 0].
    """
    if takes_kernels(topk_idx):
        from halley.ops.kernels import route

        return route.sort_slots(topk_idx, num_experts)
    keys, slots = sort_keys(topk_idx, num_experts)
    return slots, expert_starts(keys, num_experts).diff()


def _take_slots(
    topk_idx: torch.Tensor, used: torch.Tensor, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which slots each expert keeps, up to its ``limit``, and the updated counts ``used``.

    First choices of all tokens come before second choices; within a choice, tokens are in order.
    ``used`` is the number of slots that earlier tokens requested from each expert, int64 ``(E,)``;
    ``limit`` includes their slots. Microbatches that pass ``used`` on keep the same slots as the
    full batch only with top-1 routing: first choices of a later microbatch would come after second
    choices of an earlier one. Returns whether each slot is kept, bool ``(T, K)``; and ``used`` plus
    the numbers of requested slots, kept or not.

    Source: GShard (arXiv:2006.16668), algorithm 1. Passing the counter from one microbatch to the
    next is from Lancet (arXiv:2404.19429), section 5.
    Example: with limit 2 and used [1, 0], idx [[0], [0], [1]] gives kept [[True], [False], [True]]
    and used [3, 1].
    """
    if takes_kernels(topk_idx):
        from halley.ops.kernels import route

        return route.take_slots(topk_idx, used, limit)
    experts = topk_idx.t().flatten()  # all first choices, then all second choices, ...
    # cumsum is along the inner dimension: along the outer one, a GPU uses only 1 thread per expert.
    is_chosen = experts == torch.arange(used.shape[0], device=used.device)[:, None]
    position = (is_chosen.cumsum(1) + used[:, None]).gather(0, experts[None])[0]
    kept = (position <= limit).view(topk_idx.t().shape).t()
    # Use ``clone``: for top-1, ``contiguous`` would keep strides that the fake result lacks.
    return kept.clone(memory_format=torch.contiguous_format), used + is_chosen.sum(1)


def _take_slots_by_weight(
    topk_idx: torch.Tensor, weights: torch.Tensor, num_experts: int, limit: int
) -> torch.Tensor:
    """Return which slots experts keep: in order of choice, then of decreasing weight of the token.

    Tokens of equal weight are in order of index. Returns whether a slot is kept, bool ``(T, K)``.

    Source: Batch prioritized routing (arXiv:2106.05974), section 4.
    Example: idx [[0], [0], [0]] with weights [[.5], [.9], [.7]] and limit 2 keeps tokens 1 and 2.
    """
    order = weights.amax(dim=1).argsort(descending=True, stable=True)
    kept, _ = _take_slots(topk_idx[order], topk_idx.new_zeros(num_experts), limit)
    return torch.empty_like(kept).index_copy_(0, order, kept)


def _read_counts(sent: torch.Tensor, received: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of rows sent to and received from each rank, on the host, ``(W,)`` each.

    ``sent`` and ``received`` are ``(W, L)`` int64, for each rank and local expert. Both are in one
    copy, so the host waits for the device once.
    """
    both = torch.stack([sent.sum(1), received.sum(1)]).cpu()
    return both[0].clone(), both[1].clone()


def _gather_rows(x: torch.Tensor, slots: torch.Tensor, num_rows: int, top_k: int) -> torch.Tensor:
    """Return the token row of each of the first ``num_rows`` sorted slots; differentiable."""
    return x.index_select(0, _first(slots, num_rows) // top_k)


def _gather_setup(ctx, inputs, output):
    _, slots, _, ctx.top_k = inputs
    ctx.save_for_backward(slots)


def _gather_backward(ctx, grad):
    (slots,) = ctx.saved_tensors
    return torch.ops.halley.gather_rows_backward(grad, slots, ctx.top_k), None, None, None


def _gather_rows_backward(grad: torch.Tensor, slots: torch.Tensor, top_k: int) -> torch.Tensor:
    return _by_slot(grad, slots).view(-1, top_k, grad.shape[1]).sum(1)


def _combine_rows(rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return each token's weighted sum of its expert output rows, ``(T, D)``; differentiable.

    Row i belongs to slot ``slots[i]``, as from ``sort_slots``; slots without a row add nothing. The
    weight of each slot, ``(T, K)``, is rounded to the dtype of the rows.
    """
    by_slot = _by_slot(rows, slots).view(*weights.shape, rows.shape[1])
    return (by_slot * weights.to(rows.dtype).unsqueeze(2)).sum(1)


def _combine_backward(ctx, grad):
    grad_rows, grad_weights = torch.ops.halley.combine_rows_backward(grad, *ctx.saved_tensors)
    return grad_rows, None, grad_weights


def _combine_rows_backward(
    grad: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    sent = _first(slots, rows.shape[0])
    grad_of_row = grad.index_select(0, sent // weights.shape[1])
    weight_of_row = weights.to(grad.dtype).flatten().index_select(0, sent)
    grad_weights = _by_slot((grad_of_row * rows).sum(1, keepdim=True), slots)
    return grad_of_row * weight_of_row.unsqueeze(1), grad_weights.view_as(weights).to(weights.dtype)


def _by_slot(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    out = rows.new_zeros(slots.shape[0], rows.shape[1])
    return out.index_copy_(0, _first(slots, rows.shape[0]), rows)


def _first(values: torch.Tensor, number: int) -> torch.Tensor:
    """Return ``values[:number]``, where ``number`` may be a symbolic size.

    A symbolic number needs an index: torch gives a slice a new symbolic size and cannot prove that
    it equals ``number``.
    """
    if isinstance(number, int):
        return values[:number]
    return values.index_select(0, torch.arange(number, device=values.device))


def _group_rows(counts: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, ...]:
    """Return the order that sorts received rows by expert, its inverse, expert ends and counts.

    Rows arrive sorted by source rank, then expert: ``counts`` rows of each, int64 ``(W, L)``.
    The order and its inverse are int64 ``(R,)``, the ends int32 ``(L,)``, the counts ``(L, W)``.
    Example: counts [[1, 2], [1, 0]] describe the rows s0e0 s0e1 s0e1 s1e0 (source rank, expert).
    The order by expert is 0, 3, 1, 2, and the rows of the experts end at 2 and 4.
    """
    if takes_kernels(counts):
        from halley.ops.kernels import route

        return route.group_rows(counts, num_rows)
    # Use ``clone``: ``contiguous`` may return a view of the input, which operators must not return.
    by_expert = counts.t().clone(memory_format=torch.contiguous_format)
    ends_WL = counts.flatten().cumsum(0).view_as(counts)
    ends_LW = by_expert.flatten().cumsum(0).view_as(by_expert)
    shift_WL = ends_LW.t() - ends_WL  # a row's index in expert order minus its arrival index
    rows = torch.arange(num_rows, device=counts.device)
    order = rows - _of_segment(shift_WL.t(), ends_LW, rows)
    inverse = rows + _of_segment(shift_WL, ends_WL, rows)
    return order, inverse, ends_LW[:, -1].int(), by_expert


def _of_segment(values: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return ``values[s]`` for each row, where s is the segment of rows that contains it."""
    segments = torch.searchsorted(ends.flatten(), rows, right=True)
    return values.flatten().index_select(0, segments)


def _permute_rows(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return ``rows[order]``, ``(R, D)``; the gradient uses the inverse permutation."""
    return rows.index_select(0, order)


def _permute_backward(ctx, grad):
    order, inverse = ctx.saved_tensors
    return torch.ops.halley.permute_rows(grad, inverse, order), None, None


sort_slots = define(
    "sort_slots(Tensor topk_idx, int num_experts) -> (Tensor slots, Tensor counts)",
    _sort_slots,
    fake=lambda topk_idx, num_experts: (
        topk_idx.new_empty(topk_idx.numel()),
        topk_idx.new_empty(num_experts),
    ),
)
take_slots = define(
    "take_slots(Tensor topk_idx, Tensor used, int limit) -> (Tensor kept, Tensor used_after)",
    _take_slots,
    fake=lambda topk_idx, used, limit: (
        topk_idx.new_empty(topk_idx.shape, dtype=torch.bool),
        torch.empty_like(used),
    ),
)
take_slots_by_weight = define(
    "take_slots_by_weight(Tensor topk_idx, Tensor weights, int num_experts, int limit) -> Tensor",
    _take_slots_by_weight,
    fake=lambda topk_idx, *_: topk_idx.new_empty(topk_idx.shape, dtype=torch.bool),
)
read_counts = define(
    "read_counts(Tensor sent, Tensor received) -> (Tensor sent_splits, Tensor received_splits)",
    _read_counts,
    fake=lambda *counts: tuple(each.new_empty(each.shape[0], device="cpu") for each in counts),
    decomposable=True,
    host_reads=True,
)
gather_rows = define(
    "gather_rows(Tensor x, Tensor slots, SymInt num_rows, int top_k) -> Tensor",
    _gather_rows,
    fake=lambda x, slots, num_rows, top_k: x.new_empty(num_rows, x.shape[1]),
    setup_context=_gather_setup,
    backward=_gather_backward,
    decomposable=True,
)
define(
    "gather_rows_backward(Tensor grad, Tensor slots, int top_k) -> Tensor",
    _gather_rows_backward,
    fake=lambda grad, slots, top_k: grad.new_empty(slots.shape[0] // top_k, grad.shape[1]),
    decomposable=True,
)
combine_rows = define(
    "combine_rows(Tensor rows, Tensor slots, Tensor weights) -> Tensor",
    _combine_rows,
    fake=lambda rows, slots, weights: rows.new_empty(weights.shape[0], rows.shape[1]),
    setup_context=save_inputs,
    backward=_combine_backward,
    decomposable=True,
)
define(
    "combine_rows_backward(Tensor grad, Tensor rows, Tensor slots, Tensor weights)"
    " -> (Tensor grad_rows, Tensor grad_weights)",
    _combine_rows_backward,
    fake=lambda grad, rows, slots, weights: (torch.empty_like(rows), torch.empty_like(weights)),
    decomposable=True,
)
group_rows = define(
    "group_rows(Tensor counts, SymInt num_rows)"
    " -> (Tensor order, Tensor inverse, Tensor ends, Tensor counts_by_expert)",
    _group_rows,
    fake=lambda counts, num_rows: (
        counts.new_empty(num_rows),
        counts.new_empty(num_rows),
        counts.new_empty(counts.shape[1], dtype=torch.int32),
        counts.new_empty(counts.shape[1], counts.shape[0]),
    ),
)
permute_rows = define(
    "permute_rows(Tensor rows, Tensor order, Tensor inverse) -> Tensor",
    _permute_rows,
    fake=lambda rows, order, inverse: rows.new_empty(order.shape[0], rows.shape[1]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
    backward=_permute_backward,
    decomposable=True,
)


def capacity_rows(
    topk_idx: torch.Tensor, *, num_experts: int, capacity: int
) -> tuple[torch.Tensor, ...]:
    """Map rows to slots and slots to rows, with ``capacity`` rows (here C) for each expert.

    The slots of an expert are in its first rows. Returns the slot of each row ``(E * C,)``, whether
    it has one ``(E * C, 1)``, the row of each slot ``(T * K,)``, whether it has one ``(T * K, 1)``.
    """
    slots, counts = sort_slots(topk_idx, num_experts)
    starts, order = counts.cumsum(0) - counts, torch.arange(capacity, device=counts.device)
    at = (starts[:, None] + order).flatten().clamp_max(slots.shape[0] - 1)
    experts = topk_idx.flatten()
    kept, experts = experts >= 0, experts.clamp_min(0)
    numbers = torch.arange(slots.shape[0], device=counts.device)
    place = torch.empty_like(slots).index_copy_(0, slots, numbers)
    rows = experts * capacity + place - starts.index_select(0, experts)
    used = (order < counts[:, None]).view(-1, 1)
    return slots.index_select(0, at), used, rows.masked_fill(~kept, 0), kept[:, None]


class MoveRows(torch.autograd.Function):
    """Gather ``rows[index]``, with zeros where ``mask`` is False; its gradient uses ``index_back``.

    Row i of the input is row ``index_back[i]`` of the result where ``mask_back`` is True.
    """

    @staticmethod
    def forward(ctx, rows, index, mask, index_back, mask_back):
        ctx.save_for_backward(index_back, mask_back)
        return rows.index_select(0, index).masked_fill(~mask, 0.0)

    @staticmethod
    def backward(ctx, grad):
        index_back, mask_back = ctx.saved_tensors
        return grad.index_select(0, index_back).masked_fill(~mask_back, 0.0), *(None,) * 4
