"""Expert tensor parallelism: several ranks share an expert, each with a shard of its weights.

A shard is a slice of the intermediate size, and is itself an expert. Each token goes to all shards
of its experts with the same weight. The sum of the shards' outputs is the output of the expert. So
a layer of E experts, each shared by P ranks, runs as a layer of E * P experts with K * P experts
per token.

Source: Megatron-LM (arXiv:1909.08053), section 3, for a network of two matrices.
"""

from dataclasses import dataclass

import torch

from halley.core.field_types import check_type
from halley.core.types import Experts, Routing


def check_tp_size(tp_size: int, *, num_ranks: int) -> None:
    """Check that the group divides into tensor-parallel groups of ``tp_size`` ranks.

    Raises:
        ValueError: it does not.
    """
    check_type(tp_size, int, name="tp_size")
    if tp_size < 1 or num_ranks % tp_size:
        raise ValueError(
            f"tp_size ({tp_size}) must be at least 1 and divide the ranks of the group "
            f"({num_ranks})"
        )


def shard_experts(experts: Experts, *, tp_rank: int, tp_size: int) -> Experts:
    """Return one rank's shard of each expert, in contiguous tensors.

    Args:
        experts: complete experts, without biases.
        tp_rank: index of the shard.
        tp_size: number of shards.

    Raises:
        ValueError: ``tp_size`` does not divide the intermediate size, or there are biases.
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
    """The dimension of a weight that holds the intermediate size.

    Attributes:
        dim: index of the dimension, counted from the end, below 0.
        parts: number of matrices stacked in it (2 for gate and up). Each of them is divided.
    """

    dim: int
    parts: int

    def shard(self, weight: torch.Tensor, *, tp_rank: int, tp_size: int) -> torch.Tensor:
        """Return one shard of a complete weight.

        Example: of gate rows 0 to 3 and up rows 4 to 7, shard 1 of 2 is rows 2, 3, 6, 7.
        """
        divided = self._divide(weight, self.parts, tp_size)
        return divided.select(self.dim - 1, tp_rank).flatten(self.dim - 1, self.dim)

    def apart(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a view with an own dimension for the stacked matrices; shards are slices of it."""
        return self._divide(weight, self.parts) if self.parts > 1 else weight

    def _divide(self, weight: torch.Tensor, *sizes: int) -> torch.Tensor:
        before, at = weight.shape[: self.dim], weight.ndim + self.dim
        return weight.view(*before, *sizes, -1, *weight.shape[at + 1 :])


def sharded_dims(*, parts: int) -> tuple[ShardedDim, ShardedDim]:
    """Return the sharded dimensions of the two stacked weights of experts.

    Args:
        parts: 2 if the first weight is gate and up, else 1.
    """
    return ShardedDim(dim=-2, parts=parts), ShardedDim(dim=-1, parts=1)


def shard_size(intermediate_size: int, *, tp_size: int) -> int:
    """Return the intermediate size of a shard.

    Raises:
        ValueError: ``tp_size`` does not divide the intermediate size.
    """
    if intermediate_size % tp_size:
        raise ValueError(
            f"intermediate_size ({intermediate_size}) must be divisible by tp_size ({tp_size})"
        )
    return intermediate_size // tp_size


def route_to_shards(routing: Routing, *, num_local: int, tp_size: int) -> Routing:
    """Return the routing to the shards of the experts, differentiable in the weights.

    Shards are numbered by rank: rank r has shards ``[r * L, (r + 1) * L)``.

    Args:
        routing: routing to experts. Ranks ``[g * tp_size, (g + 1) * tp_size)`` share experts
            ``[g * L, (g + 1) * L)``.
        num_local: L.
        tp_size: shards of an expert.

    Returns:
        ``(T, K * tp_size)``; the shards of one choice are adjacent.

    Example: with 2 experts per rank and 2 shards, expert 3 is the second expert of ranks 2 and 3.
    So its shards are 2 * 2 + 1 and 3 * 2 + 1.
    """
    if tp_size == 1:
        return routing
    idx_TK = routing.topk_idx_TK
    first = idx_TK // num_local * tp_size * num_local + idx_TK % num_local
    shard = torch.arange(tp_size, device=idx_TK.device) * num_local
    # DROPPED, the only negative id, stays as it is.
    shards = torch.where(idx_TK[:, :, None] < 0, idx_TK[:, :, None], first[:, :, None] + shard)
    return Routing(
        topk_idx_TK=shards.flatten(1),
        topk_weights_TK=routing.topk_weights_TK.repeat_interleave(tp_size, dim=1),
    )
