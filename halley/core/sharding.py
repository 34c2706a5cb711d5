"""Experts that neighbouring ranks share, each a slice of the intermediate size.

The shards of an expert are experts themselves: a token that goes to all of them, with the same
weight, gets the sum of their outputs, which is the output of the whole. So a layer of E experts
that P ranks share runs as one of E * P experts, of which a token has K * P.

Source: Megatron-LM (arXiv:1909.08053), section 3, for a network of two matrices.
"""

import torch

from halley.core.types import Experts, Routing


def check_tp_size(tp_size: int, *, num_ranks: int) -> None:
    """Check that sets of that many ranks make up the group.

    Raises:
        ValueError: they do not.
    """
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
    size = shard_size(experts.down_LDF.shape[2], tp_size=tp_size)
    if experts.up_bias_LG is not None or experts.down_bias_LD is not None:
        raise ValueError("expert_bias (true) must be false where ranks share experts")
    own = slice(tp_rank * size, (tp_rank + 1) * size)
    num_local, _, hidden_size = experts.up_LGD.shape
    parts = experts.up_LGD.view(num_local, -1, size * tp_size, hidden_size)
    return Experts(
        up_LGD=parts[:, :, own].flatten(1, 2).contiguous(),
        down_LDF=experts.down_LDF[:, :, own].contiguous(),
        activation=experts.activation,
    )


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
