"""Index arithmetic of routing: counts, sort orders and the dispatch plan. No communication."""

from dataclasses import dataclass

import numpy as np
import torch

from halley.core.types import DROPPED, DispatchPlan, Routing


_BYTE = 256  # one-byte keys


def check_routing(routing: Routing, *, num_tokens: int, num_experts: int) -> None:
    """Check what can be checked without reading the device.

    Raises:
        ValueError: shapes or dtypes do not fit, or top_k is larger than num_experts.
    """
    idx, weights = routing.topk_idx_TK, routing.topk_weights_TK
    if idx.ndim != 2 or idx.shape[0] != num_tokens:
        raise ValueError(
            f"topk_idx {tuple(idx.shape)} must be (num_tokens, top_k) with num_tokens {num_tokens}"
        )
    if weights.shape != idx.shape:
        raise ValueError(
            f"topk_weights {tuple(weights.shape)} must have topk_idx's shape {tuple(idx.shape)}"
        )
    if idx.dtype != torch.int64:
        raise ValueError(f"topk_idx dtype ({idx.dtype}) must be torch.int64")
    if not weights.dtype.is_floating_point:
        raise ValueError(f"topk_weights dtype ({weights.dtype}) must be a floating dtype")
    if idx.shape[1] > num_experts:
        raise ValueError(f"top_k ({idx.shape[1]}) must be at most num_experts ({num_experts})")


def local_experts(num_experts: int, *, ep_size: int) -> int:
    """Return the number of experts of each rank, L.

    Raises:
        ValueError: the experts do not divide evenly over the ranks.
    """
    if num_experts % ep_size != 0:
        raise ValueError(f"num_experts ({num_experts}) must be divisible by ep_size ({ep_size})")
    return num_experts // ep_size


def count_tokens_per_expert(topk_idx_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the routed rows of each expert, ``(E,)`` int64; dropped slots are not counted.

    Example: with idx [[0, 2], [2, -1]] and 4 experts the counts are [1, 0, 2, 0].
    """
    idx_N = topk_idx_TK.flatten()
    counts_E = torch.zeros(num_experts + 1, dtype=torch.int64, device=idx_N.device)
    counts_E.index_add_(0, idx_N % (num_experts + 1), torch.ones_like(idx_N))  # DROPPED -> E
    return counts_E[:num_experts]


def chunk_sizes(num_local_experts: int, num_chunks: int) -> list[int]:
    """Return how many local experts each chunk holds, as even as can be, larger ones first.

    Raises:
        ValueError: there are more chunks than local experts, or none.
    """
    if not 1 <= num_chunks <= num_local_experts:
        raise ValueError(
            f"num_chunks ({num_chunks}) must be between 1 and num_local_experts "
            f"({num_local_experts})"
        )
    quotient, remainder = divmod(num_local_experts, num_chunks)
    return [quotient + 1] * remainder + [quotient] * (num_chunks - remainder)


def sort_slots(
    topk_idx_TK: torch.Tensor, *, num_experts: int, ep_size: int, num_chunks: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the slots in the order in which they are sent.

    By chunk, then destination rank, then expert, then token; dropped slots come last. A chunk is a
    range of local experts, the same on each rank (``chunk_sizes``).

    Returns:
        The sorted keys, which are expert ids where there is one chunk, and the slots in that
        order, int64, both ``(N,)``.

    Example: with idx [[0, 2], [2, 1]], 4 experts, 2 ranks and 2 chunks, experts 0 and 2 make the
    first chunk, so slots 0 (expert 0), 1, 2 (expert 2) come before slot 3 (expert 1).
    """
    key_N = topk_idx_TK.flatten()
    if num_chunks > 1:
        place_E = _places(num_experts, ep_size=ep_size, num_chunks=num_chunks)
        key_N = place_E.to(key_N.device)[key_N]
    elif num_experts >= _BYTE:
        key_N = torch.where(key_N == DROPPED, num_experts, key_N)
    # Fewer key bytes are fewer passes of the radix sort; as a byte, DROPPED is the largest.
    dtype = torch.uint8 if num_experts < _BYTE else torch.int16
    keys_N, slots_N = key_N.to(dtype).sort(stable=True)
    return keys_N, slots_N


def _places(num_experts: int, *, ep_size: int, num_chunks: int) -> torch.Tensor:
    """Return the place of each expert in order of (chunk, rank, expert), then that of DROPPED."""
    num_local = local_experts(num_experts, ep_size=ep_size)
    experts_WL = torch.arange(num_experts).view(ep_size, num_local)
    chunks = experts_WL.split(chunk_sizes(num_local, num_chunks), dim=1)
    places = torch.empty(num_experts + 1, dtype=torch.int64)
    places[torch.cat([chunk.flatten() for chunk in chunks])] = torch.arange(num_experts)
    places[DROPPED] = num_experts  # the last entry
    return places


def plan_dispatch(counts_WE: np.ndarray, rank: int, *, num_chunks: int = 1) -> list[DispatchPlan]:
    """Plan the exchange of routed rows from the routing table of all ranks, summed to counts.

    Every rank holds the same table and derives its own plan alone.

    Args:
        counts_WE: routed rows of each expert on each source rank, int64.
        rank: this rank's index in the expert-parallel group.
        num_chunks: ranges into which each rank's local experts are divided.

    Returns:
        One plan a chunk.

    Raises:
        ValueError: the experts do not divide over the ranks, or the chunks over the experts.
    """
    num_ranks, num_experts = counts_WE.shape
    num_local = local_experts(num_experts, ep_size=num_ranks)
    sizes = chunk_sizes(num_local, num_chunks)
    sent_WL = counts_WE[rank].reshape(num_ranks, num_local)
    received_WL = counts_WE[:, rank * num_local : (rank + 1) * num_local]
    plans: list[DispatchPlan] = []
    start = 0
    for size in sizes:
        chunk = slice(start, start + size)
        start += size
        plan = DispatchPlan(
            num_local=size,
            send_splits=sent_WL[:, chunk].sum(1).tolist(),
            recv_splits=received_WL[:, chunk].sum(1).tolist(),
            received_WL=received_WL[:, chunk],
        )
        plans.append(plan)
    return plans


@dataclass(frozen=True, kw_only=True)
class ExpertOrder:
    """How received rows are sorted by expert; they arrive by source rank, then expert, then token.

    Attributes:
        arrival_R: the arrival place of each row in expert-major order.
        place_R: the expert-major place of each row in order of arrival, its inverse.
        ends_L: end of each expert's rows in expert-major order.
    """

    arrival_R: torch.Tensor
    place_R: torch.Tensor
    ends_L: torch.Tensor


def order_by_expert(plan: DispatchPlan, *, device: torch.device) -> ExpertOrder:
    """Return the order of a plan's received rows, as int32 tensors on ``device``.

    The segments of (source, expert) are few, and laid out on the host; the rows are many, and
    laid out on the device.

    Example: 2 sources, 2 experts, counts [[1, 2], [1, 0]]: rows arrive as s0e0 s0e1 s0e1 s1e0, so
    expert-major order reads places 0, 3, 1, 2, and the experts end at 2 and 4.
    """
    counts_WL = plan.received_WL
    counts_LW = counts_WL.T
    arrival_end_WL = counts_WL.reshape(-1).cumsum().reshape(counts_WL.shape)
    expert_end_LW = counts_LW.reshape(-1).cumsum().reshape(counts_LW.shape)
    shift_WL = expert_end_LW.T - arrival_end_WL  # of starts too, as both have the same counts
    parts = (-shift_WL.T, counts_LW, shift_WL, counts_WL, expert_end_LW[:, -1])
    table = np.concatenate([part.reshape(-1) for part in parts]).astype(np.int32)
    size = counts_WL.size
    back, counts_back, there, counts_there, ends_L = (
        torch.from_numpy(table).to(device, non_blocking=True).split([size] * 4 + [plan.num_local])
    )
    num_recv = plan.num_recv
    rows_R = torch.arange(num_recv, dtype=torch.int32, device=device)
    arrival_R = torch.repeat_interleave(back, counts_back, output_size=num_recv).add_(rows_R)
    place_R = torch.repeat_interleave(there, counts_there, output_size=num_recv).add_(rows_R)
    return ExpertOrder(arrival_R=arrival_R, place_R=place_R, ends_L=ends_L)
