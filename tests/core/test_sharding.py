"""Experts in shards: the sum of the shards' outputs is the output of the complete experts."""

import re

import pytest
import torch

from halley.core.reference import moe_reference
from halley.core.routing import local_experts
from halley.core.sharding import (
    ShardedDim,
    check_tp_size,
    route_to_shards,
    shard_experts,
    sharded_dims,
)
from halley.core.types import DROPPED, Experts, Routing


def _experts(*, parts: int, bias: bool = False) -> Experts:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    return Experts(
        up_LGD=draw(3, parts * 8, 5),
        down_LDF=draw(3, 5, 8),
        up_bias_LG=draw(3, parts * 8) if bias else None,
        activation="swiglu" if parts == 2 else "gelu",
    )


def test_rows_of_both_matrices_are_divided() -> None:
    rows_GD = torch.arange(8)[:, None]
    up, down = sharded_dims(parts=2)
    assert up.shard(rows_GD, tp_rank=1, tp_size=2).flatten().tolist() == [2, 3, 6, 7]
    assert down.shard(rows_GD.t(), tp_rank=1, tp_size=4).tolist() == [[2, 3]]
    apart = up.apart(rows_GD)
    assert apart.shape == (2, 4, 1)
    assert apart.data_ptr() == rows_GD.data_ptr()
    assert ShardedDim(dim=-2, parts=1).apart(rows_GD) is rows_GD


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


@pytest.mark.parametrize(("parts", "tp_size"), [(1, 4), (2, 2), (2, 4)])
def test_outputs_of_shards_add_up(parts: int, tp_size: int) -> None:
    experts = _experts(parts=parts)
    x_TD = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    routing = Routing(
        topk_idx_TK=torch.tensor([[0, 1], [2, 0], [1, 2], [2, DROPPED], [0, 2], [1, 0]]),
        topk_weights_TK=torch.linspace(0.1, 0.9, 12, dtype=torch.float64).view(6, 2),
    )
    want_TD = moe_reference(x_TD, routing, experts)
    shards = [shard_experts(experts, tp_rank=r, tp_size=tp_size) for r in range(tp_size)]
    together = Experts(
        up_LGD=torch.cat([shard.up_LGD for shard in shards]),
        down_LDF=torch.cat([shard.down_LDF for shard in shards]),
        activation=experts.activation,
    )
    routed = route_to_shards(routing, num_local=3, tp_size=tp_size)
    torch.testing.assert_close(moe_reference(x_TD, routed, together), want_TD)


def test_experts_that_cannot_be_sharded_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("intermediate_size (8) must be divisible by")):
        shard_experts(_experts(parts=2), tp_rank=0, tp_size=3)
    with pytest.raises(ValueError, match=re.escape("expert_bias (true) must be false")):
        shard_experts(_experts(parts=2, bias=True), tp_rank=0, tp_size=2)
    for tp_size in (0, 3):
        with pytest.raises(ValueError, match=re.escape(f"tp_size ({tp_size}) must be at least 1")):
            check_tp_size(tp_size, num_ranks=4)
    with pytest.raises(ValueError, match=re.escape("tp_size (3) must divide ep_size (4)")):
        local_experts(8, ep_size=4, tp_size=3)
    wanted = "num_experts (3) must be divisible by ep_size (4) / tp_size (2)"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        local_experts(3, ep_size=4, tp_size=2)
    assert local_experts(6, ep_size=4, tp_size=2) == 3
