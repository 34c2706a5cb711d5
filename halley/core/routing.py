"""Index arithmetic of routing: counts, sort orders and the dispatch plan. No communication."""

import torch

from halley.core.types import DROPPED, DispatchPlan, Routing


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
) -> torch.Tensor:
    """Return the slots in the order in which they are sent, ``(N,)`` int64.

    Sorted by chunk, then destination rank, then expert, then token; dropped slots come last. A
    chunk is a range of local experts, the same on each rank (``chunk_sizes``).

    Example: with idx [[0, 2], [2, 1]], 4 experts, 2 ranks and 2 chunks, experts 0 and 2 make the
    first chunk, so slots 0 (expert 0), 1, 2 (expert 2) come before slot 3 (expert 1).
    """
    key_N = topk_idx_TK.flatten()
    # Fewer key bytes are fewer passes of the radix sort; DROPPED is the largest byte.
    if num_chunks == 1 and num_experts < 256:
        return key_N.to(torch.uint8).argsort(stable=True)
    if num_chunks > 1:
        num_local = local_experts(num_experts, ep_size=ep_size)
        expert_of_place = torch.cat(
            [
                ids.flatten()
                for ids in torch.arange(num_experts)
                .view(ep_size, num_local)
                .split(chunk_sizes(num_local, num_chunks), dim=1)
            ]
        )
        place_E = torch.empty_like(expert_of_place)
        place_E[expert_of_place] = torch.arange(num_experts)
        # One entry more, for DROPPED, which indexes from the end.
        place_E = torch.cat([place_E, torch.tensor([num_experts])]).to(key_N.device)
        key_N = place_E[key_N]
    else:
        key_N = torch.where(key_N == DROPPED, num_experts, key_N)
    return key_N.to(torch.int16).argsort(stable=True)


def plan_dispatch(
    counts_WE: torch.Tensor, rank: int, *, table_WE: torch.Tensor, num_chunks: int = 1
) -> list[DispatchPlan]:
    """Plan the exchange of routed rows from the routing table of all ranks, summed to counts.

    Every rank holds the same table and derives its own plan alone. What the host must know comes
    from ``counts_WE``; what only the device needs stays there, in ``table_WE``.

    Args:
        counts_WE: routed rows of each expert on each source rank, int64, on the CPU.
        rank: this rank's index in the expert-parallel group.
        table_WE: the same values on the device of the tokens.
        num_chunks: ranges into which each rank's local experts are divided.

    Returns:
        One plan a chunk.

    Raises:
        ValueError: the experts do not divide over the ranks, or the chunks over the experts.
    """
    num_ranks, num_experts = counts_WE.shape
    num_local = local_experts(num_experts, ep_size=num_ranks)
    sizes = chunk_sizes(num_local, num_chunks)
    sent_WL = counts_WE[rank].view(num_ranks, num_local).numpy()
    received_WL = counts_WE[:, rank * num_local : (rank + 1) * num_local].numpy()
    table_WL = table_WE[:, rank * num_local : (rank + 1) * num_local]
    plans: list[DispatchPlan] = []
    start = 0
    for size in sizes:
        chunk = slice(start, start + size)
        start += size
        plan = DispatchPlan(
            num_local=size,
            send_splits=sent_WL[:, chunk].sum(1).tolist(),
            recv_splits=received_WL[:, chunk].sum(1).tolist(),
            received_WL=table_WL[:, chunk],
        )
        plans.append(plan)
    return plans


def expert_major(received_WL: torch.Tensor, *, num_recv: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order received rows by expert; they arrive by source rank, then expert, then token.

    Args:
        received_WL: rows received from each rank for each expert, int64.
        num_recv: their sum, R.

    Returns:
        The arrival place of each row in expert-major order, ``(R,)`` int64, and the end of each
        expert's rows, ``(L,)`` int32, both on the device of ``received_WL``.

    Example: 2 sources, 2 experts, counts [[1, 2], [1, 0]]: rows arrive as s0e0 s0e1 s0e1 s1e0, so
    expert-major order reads places 0, 3, 1, 2, and the experts end at 2 and 4.
    """
    arrival_end_WL = received_WL.flatten().cumsum(0).view_as(received_WL)
    counts_LW = received_WL.t().flatten()
    end_LW = counts_LW.cumsum(0)
    shift_LW = arrival_end_WL.t().flatten() - end_LW  # starts differ as ends do
    arrival_R = torch.repeat_interleave(shift_LW, counts_LW, output_size=num_recv)
    arrival_R += torch.arange(num_recv, device=received_WL.device)
    return arrival_R, end_LW[received_WL.shape[0] - 1 :: received_WL.shape[0]].to(torch.int32)
