"""Counts, sort orders and shards by hand, and the errors of a routing that does not fit."""

import re

import pytest
import torch

from halley.core.routing import (
    ShardedDim,
    chunk_sizes,
    count_tokens_per_expert,
    expert_starts,
    route_to_shards,
    shard_size,
    sharded_dims,
    sort_keys,
)
from halley.core.types import DROPPED, Routing, check_routing, local_experts


def test_counts_of_experts_and_sizes_of_chunks_by_hand() -> None:
    idx_TK = torch.tensor([[0, 2], [2, DROPPED], [DROPPED, DROPPED], [3, 2]])
    assert count_tokens_per_expert(idx_TK, 5).tolist() == [1, 0, 3, 1, 0]
    assert count_tokens_per_expert(idx_TK[:0], 3).tolist() == [0, 0, 0]
    assert chunk_sizes(4, 1) == [4]
    assert chunk_sizes(8, 3) == [3, 3, 2]
    assert chunk_sizes(3, 3) == [1, 1, 1]


# Keys have one byte up to 255 experts, and two bytes from 256 experts.
@pytest.mark.parametrize("num_experts", [8, 255, 256, 1000])
@pytest.mark.parametrize("num_tokens", [0, 300])
def test_slots_have_the_order_of_a_sort_in_python(num_experts: int, num_tokens: int) -> None:
    """A fifth of the slots is dropped."""
    generator = torch.Generator().manual_seed(0)
    idx_TK = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :4]
    idx_TK[torch.rand(num_tokens, 4, generator=generator) < 0.2] = DROPPED
    chosen = list(enumerate(idx_TK.flatten().tolist()))
    kept = sorted((expert, slot) for slot, expert in chosen if expert != DROPPED)
    dropped = [slot for slot, expert in chosen if expert == DROPPED]
    keys_N, slots_N = sort_keys(idx_TK, num_experts)
    assert slots_N.tolist() == [slot for _, slot in kept] + dropped
    assert keys_N[: len(kept)].tolist() == [expert for expert, _ in kept]
    assert all(key >= num_experts for key in keys_N[len(kept) :].tolist())
    before = [sum(expert < e for expert, _ in kept) for e in range(num_experts + 1)]
    assert expert_starts(keys_N, num_experts).tolist() == before


@pytest.mark.parametrize(
    ("idx", "weights", "message"),
    [
        (torch.zeros(3, 2).long(), torch.zeros(3, 2), r"topk_idx \(3, 2\) must be .*num_tokens 4"),
        (torch.zeros(4).long(), torch.zeros(4), r"topk_idx \(4,\) must be \(num_tokens, top_k\)"),
        (torch.zeros(4, 2).long(), torch.zeros(4, 1), r"\(4, 1\) must have .* shape \(4, 2\)"),
        (torch.zeros(4, 2).int(), torch.zeros(4, 2), r"topk_idx dtype \(torch.int32\) must be"),
        (torch.zeros(4, 2).long(), torch.zeros(4, 2).long(), r"weights dtype \(torch.int64\) must"),
        (torch.zeros(4, 9).long(), torch.zeros(4, 9), r"top_k \(9\) must be at most num_experts"),
        (torch.full((4, 2), 8), torch.zeros(4, 2), r"topk_idx \(8\) must be .* num_experts \(8\)"),
        (torch.full((4, 2), -2), torch.zeros(4, 2), r"topk_idx \(-2\) must be .* or -1 where"),
    ],
)
def test_routing_that_does_not_fit_is_an_error(idx, weights, message) -> None:
    routing = Routing(topk_idx_TK=idx, topk_weights_TK=weights)
    with pytest.raises(ValueError, match=message):
        check_routing(routing, num_tokens=4, num_experts=8)


def test_routing_that_fits_passes() -> None:
    for num_tokens, dtype in ((0, torch.float32), (4, torch.bfloat16)):
        idx_TK = torch.zeros(num_tokens, 8, dtype=torch.int64)
        routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=idx_TK.to(dtype))
        check_routing(routing, num_tokens=num_tokens, num_experts=8)


def test_rows_of_both_matrices_are_divided() -> None:
    rows_GD = torch.arange(8)[:, None]
    up, down = sharded_dims(parts=2)
    assert up.shard(rows_GD, tp_rank=1, tp_size=2).flatten().tolist() == [2, 3, 6, 7]
    assert down.shard(rows_GD.t(), tp_rank=1, tp_size=4).tolist() == [[2, 3]]
    unstacked = up.unstack(rows_GD)
    assert unstacked.shape == (2, 4, 1)
    assert unstacked.data_ptr() == rows_GD.data_ptr()
    assert ShardedDim(dim=-2, parts=1).unstack(rows_GD) is rows_GD


def test_shards_are_numbered_by_the_ranks_that_hold_them() -> None:
    """Ranks 0 and 1 share experts 0 and 1; ranks 2 and 3 share experts 2 and 3."""
    routing = Routing(
        topk_idx_TK=torch.tensor([[3, 0], [DROPPED, 1]]),
        topk_weights_TK=torch.tensor([[0.25, 0.75], [0.0, 0.5]]),
    )
    shards = route_to_shards(routing, num_local=2, tp_size=2)
    assert shards.topk_idx_TK.tolist() == [[5, 7, 0, 2], [DROPPED, DROPPED, 1, 3]]
    assert shards.topk_weights_TK.tolist() == [[0.25, 0.25, 0.75, 0.75], [0.0, 0.0, 0.5, 0.5]]
    assert route_to_shards(routing, num_local=2, tp_size=1) is routing


def test_sizes_that_cannot_be_sharded_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("intermediate_size (8) must be divisible by")):
        shard_size(8, tp_size=3)
    wanted = "num_experts (3) must be divisible by ep_size (4) / tp_size (2)"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        local_experts(3, ep_size=4, tp_size=2)
    assert local_experts(6, ep_size=4, tp_size=2) == 3
