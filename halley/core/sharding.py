"""Experts that neighbouring ranks share, each a slice of the intermediate size.

The shards of an expert are experts themselves: a token that goes to all of them, with the same
weight, gets the sum of their outputs, which is the output of the whole. So a layer of E experts
that P ranks share runs as one of E * P experts, of which a token has K * P.

Source: Megatron-LM (arXiv:1909.08053), section 3, for a network of two matrices.
"""

from dataclasses import dataclass

import torch

from halley.core.field_types import check_type
from halley.core.types import Experts, Routing


def check_tp_size(tp_size: int, *, num_ranks: int) -> None:
    """Check that sets of that many ranks make up the group.

    Raises:
        ValueError: they do not.
    """
    check_type(tp_size, int, name="tp_size")
    if tp_size < 1 or num_ranks % tp_size:
        raise ValueError(
            f"tp_size ({tp_size}) must be at least 1 and divide the ranks of the group "
            f"({num_ranks})"
        )


def shard_experts(experts: Experts, *, tp_rank: int, tp_size: int) -> Experts:
    """Return what one of the ranks that share experts holds of them, contiguous.

    Args:
        experts: whole ones, without biases.
        tp_rank: which shard.
        tp_size: how many there are.

    Raises:
        ValueError: the intermediate size is not divisible, or there are biases.
    """
    intermediate_size = experts.down_LDF.shape[2]
    shard_size(intermediate_size, tp_size=tp_size)
    if experts.up_bias_LG is not None or experts.down_bias_LD is not None:
        raise ValueError("expert_bias (true) must be false where ranks share experts")
    up, down = sharded_dims(parts=experts.up_LGD.shape[1] // intermediate_size)
    place = {"tp_rank": tp_rank, "tp_size": tp_size}
    return Experts(
        up_LGD=up.shard(experts.up_LGD, **place).contiguous(),
        down_LDF=down.shard(experts.down_LDF, **place).contiguous(),
        activation=experts.activation,
    )


@dataclass(frozen=True, kw_only=True)
class ShardedDim:
    """Where a weight has the intermediate size.

    Attributes:
        dim: that dimension, from the end, below 0.
        parts: matrices that stand one after another in it, each of which is divided.
    """

    dim: int
    parts: int

    def shard(self, weight: torch.Tensor, *, tp_rank: int, tp_size: int) -> torch.Tensor:
        """Return one shard of a weight given whole.

        Example: of gate rows 0 to 3 and up rows 4 to 7, shard 1 of 2 is rows 2, 3, 6, 7.
        """
        divided = self._divide(weight, self.parts, tp_size)
        return divided.select(self.dim - 1, tp_rank).flatten(self.dim - 1, self.dim)

    def apart(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a view in which shards are ranges: the parts have a dimension of their own."""
        return self._divide(weight, self.parts) if self.parts > 1 else weight

    def _divide(self, weight: torch.Tensor, *sizes: int) -> torch.Tensor:
        before, at = weight.shape[: self.dim], weight.ndim + self.dim
        return weight.view(*before, *sizes, -1, *weight.shape[at + 1 :])


def sharded_dims(*, parts: int) -> tuple[ShardedDim, ShardedDim]:
    """Return where the two projections of stacked experts have the intermediate size.

    Args:
        parts: 2 if the first is gate and up, else 1.
    """
    return ShardedDim(dim=-2, parts=parts), ShardedDim(dim=-1, parts=1)


def shard_size(intermediate_size: int, *, tp_size: int) -> int:
    """Return the intermediate size of a shard.

    Raises:
        ValueError: the intermediate size is not divisible.
    """
    if intermediate_size % tp_size:
        raise ValueError(
            f"intermediate_size ({intermediate_size}) must be divisible by tp_size ({tp_size})"
        )
    return intermediate_size // tp_size


def route_to_shards(routing: Routing, *, num_local: int, tp_size: int) -> Routing:
    """Return the routing to the shards of the experts, differentiable in the weights.

    Shards are numbered as their ranks hold them: rank r has ``[r * L, (r + 1) * L)``.

    Args:
        routing: to experts, of which ranks ``[g * tp_size, (g + 1) * tp_size)`` share
            ``[g * L, (g + 1) * L)``.
        num_local: L.
        tp_size: shards of an expert.

    Returns:
        ``(T, K * tp_size)``, the shards of a choice side by side.

    Example: 2 experts a rank, 2 shards: expert 3 is 1 of the second set, ranks 2 and 3, and so its
    shards are 2 * 2 + 1 and 3 * 2 + 1.
    """
    if tp_size == 1:
        return routing
    idx_TK = routing.topk_idx_TK
    first = idx_TK // num_local * tp_size * num_local + idx_TK % num_local
    shard = torch.arange(tp_size, device=idx_TK.device) * num_local
    shards = torch.where(idx_TK[:, :, None] < 0, idx_TK[:, :, None], first[:, :, None] + shard)
    return Routing(
        topk_idx_TK=shards.flatten(1),
        topk_weights_TK=routing.topk_weights_TK.repeat_interleave(tp_size, dim=1),
    )
