"""Expert capacity: decide which slots an expert keeps if it accepts a limited number of them.

Each function is one operator, so one node of a graph. A compiler pass that splits a batch into
microbatches must know whether the decision needs the full batch. ``take_slots`` continues from the
counts of earlier tokens, so the batch can be split. ``take_slots_by_weight`` ranks all tokens of
the batch, so the batch cannot be split.
"""

import torch

from halley.ops.library import define, takes_kernels


def take_slots(
    topk_idx_TK: torch.Tensor, used_E: torch.Tensor, *, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the first ``limit`` slots of each expert, and drop its later slots.

    First choices of all tokens come before second choices; within a choice, tokens are in order.

    Microbatches that pass ``used_E`` on keep the same slots as the full batch only with top-1
    routing. With more choices, first choices of a later microbatch would come after second choices
    of an earlier one.

    Args:
        topk_idx_TK: expert ids in ``[0, E)``.
        used_E: number of slots that earlier tokens requested from each expert, int64.
        limit: largest number of slots that an expert keeps, earlier tokens included.

    Returns:
        Whether each slot is kept, bool ``(T, K)``; and ``used_E`` plus the numbers of requested
        slots, kept or not, int64 ``(E,)``.

    Source: GShard (arXiv:2006.16668), algorithm 1. Passing the counter from one microbatch to the
    next is from Lancet (arXiv:2404.19429), section 5.

    Example: with limit 2 and used [1, 0], idx [[0], [0], [1]] gives kept [[True], [False], [True]]
    and used [3, 1].
    """
    return _call_take_slots(topk_idx_TK, used_E, limit)


def take_slots_by_weight(
    topk_idx_TK: torch.Tensor, weights_TK: torch.Tensor, *, num_experts: int, limit: int
) -> torch.Tensor:
    """Keep ``limit`` slots of each expert, those of tokens with larger weights first.

    The priority of a token is its largest weight. First choices of all tokens come before second
    choices; within a choice, tokens are in order of decreasing priority, then of index.

    Args:
        topk_idx_TK: expert ids in ``[0, E)``.
        weights_TK: routing weights.
        num_experts: E.
        limit: largest number of slots that an expert keeps.

    Returns:
        Whether each slot is kept, bool ``(T, K)``.

    Source: Batch prioritized routing (arXiv:2106.05974), section 4.

    Example: idx [[0], [0], [0]] with weights [[.5], [.9], [.7]] and limit 2 keeps tokens 1 and 2.
    """
    return _call_take_slots_by_weight(topk_idx_TK, weights_TK, num_experts, limit)


def _take_slots(
    topk_idx: torch.Tensor, used: torch.Tensor, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if takes_kernels(topk_idx):
        from halley.ops.kernels import route

        return route.take_slots(topk_idx, used, limit)
    experts = topk_idx.t().flatten()  # all first choices, then all second choices, ...
    # cumsum along the inner dimension: along the outer one, a GPU uses one thread for each expert.
    is_chosen = experts == torch.arange(used.shape[0], device=used.device)[:, None]
    position = (is_chosen.cumsum(1) + used[:, None]).gather(0, experts[None])[0]
    kept = (position <= limit).view(topk_idx.t().shape).t()
    # contiguous() would keep the strides of a single column, which differ from the fake result's.
    return kept.clone(memory_format=torch.contiguous_format), used + is_chosen.sum(1)


def _take_slots_by_weight(
    topk_idx: torch.Tensor, weights: torch.Tensor, num_experts: int, limit: int
) -> torch.Tensor:
    order = weights.amax(dim=1).argsort(descending=True, stable=True)
    kept, _ = _take_slots(topk_idx[order], topk_idx.new_zeros(num_experts), limit)
    return torch.empty_like(kept).index_copy_(0, order, kept)


_call_take_slots = define(
    "take_slots(Tensor topk_idx, Tensor used, int limit) -> (Tensor kept, Tensor used_after)",
    _take_slots,
    fake=lambda topk_idx, used, limit: (
        topk_idx.new_empty(topk_idx.shape, dtype=torch.bool),
        torch.empty_like(used),
    ),
)
_call_take_slots_by_weight = define(
    "take_slots_by_weight(Tensor topk_idx, Tensor weights, int num_experts, int limit) -> Tensor",
    _take_slots_by_weight,
    fake=lambda topk_idx, *_: topk_idx.new_empty(topk_idx.shape, dtype=torch.bool),
)
