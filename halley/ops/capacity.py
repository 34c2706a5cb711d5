"""Expert capacity: operators that choose the slots which an expert of bounded capacity keeps.

Each is one node of a graph, because a compiler pass that splits a batch into microbatches must know
how a gate depends on the full batch. ``take_slots`` continues from the counts of earlier tokens, so
a batch can be split. ``take_slots_by_weight`` ranks all tokens of the batch, so it cannot.
"""

import torch

from halley.ops.library import define, takes_kernels


def take_slots(
    topk_idx_TK: torch.Tensor, used_E: torch.Tensor, *, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots that are among the first ``limit`` slots of their expert.

    First choices of all tokens come before second choices; within a choice, tokens are in order.

    Args:
        topk_idx_TK: expert ids in ``[0, E)``.
        used_E: number of slots that earlier tokens requested from each expert, int64.
        limit: largest number of slots of an expert.

    Returns:
        Whether each slot is kept, bool ``(T, K)``; and ``used_E`` plus these slots, int64.

    Source: GShard (arXiv:2006.16668), algorithm 1. Passing the counter from one microbatch to the
    next is from Lancet (arXiv:2404.19429), section 5.

    Example: idx [[0], [0], [1]] and limit 2 with used [1, 0] keep slots 0 and 2, and give [3, 1].
    Only with top-1 is the result of microbatches that of the full batch. With more choices, first
    choices of a later microbatch would come after second choices of an earlier one.
    """
    return _call_take_slots(topk_idx_TK, used_E, limit)


def take_slots_by_weight(
    topk_idx_TK: torch.Tensor, weights_TK: torch.Tensor, *, num_experts: int, limit: int
) -> torch.Tensor:
    """Return the slots that an expert keeps if tokens with larger weights come first.

    The priority of a token is its largest weight. First choices of all tokens come before second
    choices; within a choice, tokens are in order of priority, then of index.

    Args:
        topk_idx_TK: expert ids in ``[0, E)``.
        weights_TK: routing weights.
        num_experts: E.
        limit: largest number of slots of an expert.

    Returns:
        Whether each slot is kept, bool ``(T, K)``.

    Source: Batch prioritized routing (arXiv:2106.05974), section 4.

    Example: idx [[0], [0], [0]] with weights [[.5], [.9], [.7]] and limit 2 keeps slots 1 and 2.
    """
    return _call_take_slots_by_weight(topk_idx_TK, weights_TK, num_experts, limit)


def _take_slots(
    topk_idx: torch.Tensor, used: torch.Tensor, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if takes_kernels(topk_idx):
        from halley.ops.kernels import route

        return route.take_slots(topk_idx, used, limit)
    in_order = topk_idx.t().flatten()
    # cumsum along the inner dimension; along the outer one, a GPU uses one thread an expert.
    chosen = in_order == torch.arange(used.shape[0], device=used.device)[:, None]
    place = (chosen.cumsum(1) + used[:, None]).gather(0, in_order[None])[0]
    kept = (place <= limit).view(topk_idx.t().shape).t()
    # contiguous() would keep the strides of a single column.
    return kept.clone(memory_format=torch.contiguous_format), used + chosen.sum(1)


def _fake_take_slots(
    topk_idx: torch.Tensor, used: torch.Tensor, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return topk_idx.new_empty(topk_idx.shape, dtype=torch.bool), torch.empty_like(used)


def _take_slots_by_weight(
    topk_idx: torch.Tensor, weights: torch.Tensor, num_experts: int, limit: int
) -> torch.Tensor:
    order = weights.amax(dim=1).argsort(descending=True, stable=True)
    kept, _ = _take_slots(topk_idx[order], topk_idx.new_zeros(num_experts), limit)
    return torch.empty_like(kept).index_copy_(0, order, kept)


def _fake_take_slots_by_weight(
    topk_idx: torch.Tensor, weights: torch.Tensor, num_experts: int, limit: int
) -> torch.Tensor:
    return topk_idx.new_empty(topk_idx.shape, dtype=torch.bool)


_call_take_slots = define(
    "take_slots(Tensor topk_idx, Tensor used, int limit) -> (Tensor kept, Tensor used_after)",
    _take_slots,
    _fake_take_slots,
)
_call_take_slots_by_weight = define(
    "take_slots_by_weight(Tensor topk_idx, Tensor weights, int num_experts, int limit) -> Tensor",
    _take_slots_by_weight,
    _fake_take_slots_by_weight,
)
