"""Slots within an expert's capacity against a loop, in one batch and in microbatches."""

import torch

from halley.ops.capacity import take_slots, take_slots_by_weight


NUM_EXPERTS = 6


def _choices(num_tokens: int, top_k: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :top_k]


def _loop(idx_TK: torch.Tensor, tokens: list[int], limit: int) -> list[list[bool]]:
    """Return the slots kept for tokens in that order, first choices before second choices."""
    taken = [0] * NUM_EXPERTS
    kept = [[False] * idx_TK.shape[1] for _ in tokens]
    for choice in range(idx_TK.shape[1]):
        for token in tokens:
            expert = int(idx_TK[token, choice])
            taken[expert] += 1
            kept[token][choice] = taken[expert] <= limit
    return kept


def _no_slots() -> torch.Tensor:
    return torch.zeros(NUM_EXPERTS, dtype=torch.int64)


def test_take_slots_against_a_loop() -> None:
    idx_TK = _choices(60, 3)
    for limit in (1, 7, 60):
        kept_TK, used_E = take_slots(idx_TK, _no_slots(), limit=limit)
        assert kept_TK.tolist() == _loop(idx_TK, list(range(60)), limit)
        assert used_E.tolist() == idx_TK.flatten().bincount(minlength=NUM_EXPERTS).tolist()
    assert take_slots(idx_TK[:0], _no_slots(), limit=1)[0].tolist() == []


def test_microbatches_that_share_a_counter_keep_the_same_slots() -> None:
    idx_T1 = _choices(48, 1)
    want, _ = take_slots(idx_T1, _no_slots(), limit=8)
    used, kept = _no_slots(), []
    for microbatch in idx_T1.chunk(4):
        kept_in_it, used = take_slots(microbatch, used, limit=8)
        kept.append(kept_in_it)
    assert torch.equal(torch.cat(kept), want)
    # A quarter of the capacity for each quarter of the tokens drops more slots.
    alone = [take_slots(each, _no_slots(), limit=2)[0] for each in idx_T1.chunk(4)]
    assert int(torch.cat(alone).sum()) < int(want.sum()) < 48


def test_take_slots_by_weight_against_a_loop() -> None:
    idx_TK = _choices(60, 2, seed=1)
    weights_TK = torch.randn(60, 2, generator=torch.Generator().manual_seed(2))
    weights_TK[10] = weights_TK[20]  # a tie: the earlier token comes first
    tokens = sorted(range(60), key=lambda token: -float(weights_TK[token].max()))
    for limit in (1, 8, 60):
        kept_TK = take_slots_by_weight(idx_TK, weights_TK, num_experts=NUM_EXPERTS, limit=limit)
        assert kept_TK.tolist() == _loop(idx_TK, tokens, limit)
