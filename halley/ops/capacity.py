"""Which slots an expert of bounded capacity takes, as operators that a compiler sees as one node.

Compilers that divide a batch of tokens must know how a gate depends on the whole of it. The first
operator counts on from what earlier tokens have used, so the tokens of a batch may come to it in
parts; the second ranks all tokens of the batch, which no part of it can.
"""

import torch

from halley.ops.library import define, takes_kernels


def take_slots(
    topk_idx_TK: torch.Tensor, used_E: torch.Tensor, *, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which slots are among the first ``limit`` of their expert.

    First choices of all tokens come before second choices, and among equals the earlier token.

    Args:
        topk_idx_TK: expert ids in ``[0, E)``.
        used_E: slots of each expert that were wanted before these, int64.
        limit: what an expert takes.

    Returns:
        Whether each slot is kept, bool ``(T, K)``; and ``used_E`` with these slots, int64.

    Source: GShard (arXiv:2006.16668), algorithm 1; the counter that goes from part to part is
    Lancet's (arXiv:2404.19429), section 5.

    Example: idx [[0], [0], [1]] and limit 2 with used [1, 0] keep slots 0 and 2, and give [3, 1].
    Top-1 tokens may come in parts. Others may not: first choices of later parts would come behind
    second choices of earlier ones.
    """
    return _call_take_slots(topk_idx_TK, used_E, limit)


def take_slots_by_weight(
    topk_idx_TK: torch.Tensor, weights_TK: torch.Tensor, *, num_experts: int, limit: int
) -> torch.Tensor:
    """Return which slots are among the ``limit`` of their expert with the most important tokens.

    A token is as important as its largest weight. First choices of all tokens come before second
    choices, among equals the more important token, then the earlier one.

    Args:
        topk_idx_TK: expert ids in ``[0, E)``.
        weights_TK: of the combine.
        num_experts: E.
        limit: what an expert takes.

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
    # Counts along the inner dimension: along the outer one a GPU has a thread for each expert.
    chosen = in_order == torch.arange(used.shape[0], device=used.device)[:, None]
    place = (chosen.cumsum(1) + used[:, None]).gather(0, in_order[None])[0]
    kept = (place <= limit).view(topk_idx.t().shape).t()
    # Not contiguous(), which would leave the strides of a single column as they are.
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
