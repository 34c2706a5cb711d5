"""Sort slots (choices of tokens), plan dispatch, and divide experts into tensor-parallel shards.

Nothing here communicates. With tensor parallelism, several ranks share an expert, each with a shard
of its weights: a slice of the intermediate size, which is itself an expert. Each token goes to all
shards of its experts with the same weight, and the sum of their outputs is the output of the
expert. So a layer of E experts, each shared by P ranks, runs as a layer of E * P experts with K * P
experts per token. Source: Megatron-LM (arXiv:1909.08053), section 3, for a network of two matrices.
"""

from dataclasses import dataclass

import numpy as np
import torch

from halley.core.types import DROPPED, MAX_EXPERTS, DispatchPlan, Routing, local_experts


_BYTE = 256  # number of values of a one-byte key


def count_tokens_per_expert(topk_idx_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the number of slots of each expert, ``(E,)`` int64, without the dropped slots."""
    idx_N = topk_idx_TK.flatten()
    counts_E = torch.zeros(num_experts + 1, dtype=torch.int64, device=idx_N.device)
    # DROPPED (-1) counts at index E. Inductor makes ``index_add_`` a serial sum that takes 0.5 ms.
    counts_E.scatter_add_(0, idx_N % (num_experts + 1), torch.ones_like(idx_N))
    return counts_E[:num_experts]


def chunk_sizes(num_local_experts: int, num_chunks: int) -> list[int]:
    """Return the sizes of ``num_chunks`` chunks of local experts; the sizes differ by at most 1."""
    if not 1 <= num_chunks <= num_local_experts:
        rule = f"between 1 and num_local_experts ({num_local_experts})"
        raise ValueError(f"num_chunks ({num_chunks}) must be {rule}")
    size, num_larger = divmod(num_local_experts, num_chunks)
    return [size + 1] * num_larger + [size] * (num_chunks - num_larger)


def sort_keys(topk_idx_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort slots by expert, then token, dropped slots last; return their expert ids and the slots.

    Both are ``(N,)``, the slots int64. A dropped slot gets an id larger than all expert ids.
    Example: idx [[0, 2], [2, 1]] gives the slots 0, 3, 1, 2.
    """
    if num_experts > MAX_EXPERTS:
        what = f"num_experts ({num_experts}), shards and replicas included,"
        raise ValueError(f"{what} must be at most {MAX_EXPERTS}")
    key_N = topk_idx_TK.flatten()
    # The radix sort of a GPU makes one pass per byte of the key, so the narrowest dtype is fastest.
    # As uint8, DROPPED (-1) becomes 255, the largest key.
    if num_experts < _BYTE:
        key_N = key_N.to(torch.uint8)
    else:
        key_N = torch.where(key_N == DROPPED, num_experts, key_N).to(torch.int16)
    keys_N, slots_N = key_N.sort(stable=True)
    return keys_N, slots_N


def order_by_chunk(
    slots_N: torch.Tensor, starts_E1: np.ndarray, *, ep_size: int, num_chunks: int
) -> torch.Tensor:
    """Return the slots of ``sort_keys`` in order of chunk, then destination rank, then expert.

    ``starts_E1`` are the ``expert_starts`` of the slots, on the host. Dropped slots stay last.
    Example: with 4 experts, 2 ranks and 2 chunks, experts 0 and 2 are the first chunk.
    """
    num_local = local_experts(len(starts_E1) - 1, ep_size=ep_size)
    starts = starts_E1.tolist()
    parts: list[torch.Tensor] = []
    first = 0
    for size in chunk_sizes(num_local, num_chunks):
        for expert in range(first, len(starts) - 1, num_local):
            parts.append(slots_N[starts[expert] : starts[expert + size]])
        first += size
    return torch.cat([*parts, slots_N[starts[-1] :]])


def expert_starts(keys_N: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return each expert's first index among sorted slots, then the end of the last expert's slots.

    The result is ``(E + 1,)`` int64: keys [0, 2, 2, 4] and 4 experts (4 is a dropped slot)
    give [0, 1, 1, 3, 3]. A binary search needs neither atomics nor a read by the host.
    """
    experts = torch.arange(num_experts + 1, dtype=keys_N.dtype, device=keys_N.device)
    return torch.searchsorted(keys_N, experts)


def plan_dispatch(starts_WE1: np.ndarray, rank: int, *, num_chunks: int = 1) -> list[DispatchPlan]:
    """Return a plan for each chunk of local experts: how many rows ``rank`` sends and receives.

    ``starts_WE1`` are the ``expert_starts`` of each source rank, ``(W, E + 1)``.
    """
    num_local = local_experts(starts_WE1.shape[1] - 1, ep_size=starts_WE1.shape[0])
    own = rank * num_local
    plans: list[DispatchPlan] = []
    start = 0
    for size in chunk_sizes(num_local, num_chunks):
        end = start + size
        sent_W = starts_WE1[rank, end::num_local] - starts_WE1[rank, start:-1:num_local]
        received_W = starts_WE1[:, own + end] - starts_WE1[:, own + start]
        plan = DispatchPlan(
            num_local=size,
            send_splits=sent_W.tolist(),
            recv_splits=received_W.tolist(),
            starts_WL1=starts_WE1[:, own + start : own + end + 1],
        )
        plans.append(plan)
        start = end
    return plans


def order_by_expert(
    plan: DispatchPlan, out: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of received rows by expert, its inverse, and the end of each expert's rows.

    The results are ``orders``, ``(2, R)`` int32, and ``ends_L``, ``(L,)`` int32. Row 0 of orders
    gives the arrival index of each row in order of expert; row 1 is the inverse. If ``out``,
    ``(L + 2 * R,)`` int32, is given, the results are views of it, ends first.

    Example: 2 sources, 2 experts, counts [[1, 2], [1, 0]]: rows arrive as s0e0 s0e1 s0e1 s1e0.
    Order of expert reads rows 0, 3, 1, 2, and the experts end at 2 and 4.
    """
    num_local, num_recv = plan.num_local, plan.num_recv
    if out is None:
        out = np.empty(num_local + 2 * num_recv, dtype=np.int32)
    ends_L, orders = out[:num_local], out[num_local:].reshape(2, num_recv)
    counts_WL = np.diff(plan.starts_WL1, axis=1)
    counts_LW = np.ascontiguousarray(counts_WL.T)
    arrival_end_WL = counts_WL.cumsum().reshape(counts_WL.shape)
    expert_end_LW = counts_LW.cumsum().reshape(counts_LW.shape)
    # For each (source, expert): end of its rows in order of expert, minus end in order of arrival.
    shift_WL = expert_end_LW.T - arrival_end_WL
    rows_R = np.arange(num_recv, dtype=np.int32)
    np.subtract(rows_R, np.repeat(shift_WL.T, counts_LW.ravel()), out=orders[0], casting="unsafe")
    np.add(rows_R, np.repeat(shift_WL, counts_WL.ravel()), out=orders[1], casting="unsafe")
    ends_L[:] = expert_end_LW[:, -1]
    return orders, ends_L


@dataclass(frozen=True, kw_only=True)
class ShardedDim:
    """The dimension, of size F or 2F, along which tensor-parallel ranks divide an expert weight."""

    dim: int  # negative, so counted from the end
    parts: int  # number of matrices stacked along ``dim`` (2 for gate and up); each is divided

    def shard(self, weight: torch.Tensor, *, tp_rank: int, tp_size: int) -> torch.Tensor:
        """Return the shard of a complete weight that rank ``tp_rank`` of ``tp_size`` ranks holds.

        Example: of gate rows 0 to 3 and up rows 4 to 7, shard 1 of 2 is rows 2, 3, 6, 7.
        """
        divided = torch.unflatten(weight, self.dim, (self.parts, tp_size, -1))
        return divided.select(self.dim - 1, tp_rank).flatten(self.dim - 1, self.dim)

    def unstack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a view with a new dimension for gate and up; return other weights unchanged.

        Example: (L, 2F, D) becomes (L, 2, F, D), and a shard is a slice of the dimension F.
        """
        return torch.unflatten(weight, self.dim, (self.parts, -1)) if self.parts > 1 else weight


def sharded_dims(*, parts: int) -> tuple[ShardedDim, ShardedDim]:
    """Return the sharded dimensions of the experts' weights ``up_LGD`` and ``down_LDF``."""
    return ShardedDim(dim=-2, parts=parts), ShardedDim(dim=-1, parts=1)


def shard_size(intermediate_size: int, *, tp_size: int) -> int:
    """Return the intermediate size of a shard; raise a ``ValueError`` if it is no integer."""
    if intermediate_size % tp_size:
        rule = f"divisible by tp_size ({tp_size})"
        raise ValueError(f"intermediate_size ({intermediate_size}) must be {rule}")
    return intermediate_size // tp_size


def route_to_shards(routing: Routing, *, num_local: int, tp_size: int) -> Routing:
    """Return a routing to all shards of each chosen expert, each with the choice's routing weight.

    Ranks ``[g * tp_size, (g + 1) * tp_size)`` share experts ``[g * L, (g + 1) * L)``. Shards are
    numbered by rank: rank r has shards ``[r * L, (r + 1) * L)``. The result is
    ``(T, K * tp_size)``, differentiable in the weights; the shards of one choice are adjacent.

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
    idx_TK, weights_TK = shards.flatten(1), routing.topk_weights_TK
    weights_TK = weights_TK.repeat_interleave(tp_size, dim=1)
    return Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK, capacity=routing.capacity)
