"""Sort orders and dispatch plans, compared with plain Python that moves named rows; shards."""

import re
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halley.core.reference import moe_reference
from halley.core.routing import (
    ShardedDim,
    check_routing,
    check_tp_size,
    chunk_sizes,
    count_tokens_per_expert,
    expert_starts,
    local_experts,
    order_by_chunk,
    order_by_expert,
    plan_dispatch,
    route_to_shards,
    shard_size,
    sharded_dims,
    sort_keys,
)
from halley.core.types import DROPPED, Experts, Routing


Table = list[list[int]]
Row = tuple[int, int, int]  # source rank, slot, expert
T = TypeVar("T")


def _tensor(table: Table, top_k: int) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.int64).view(-1, top_k)


def _random_table(num_tokens: int, num_experts: int, top_k: int) -> Table:
    """Return routing with a fifth of the slots dropped."""
    generator = torch.Generator().manual_seed(0)
    idx_TK = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k]
    dropped_TK = torch.rand(num_tokens, top_k, generator=generator) < 0.2
    return idx_TK.masked_fill(dropped_TK, DROPPED).tolist()


def test_counts_of_experts_and_sizes_of_chunks_by_hand() -> None:
    idx_TK = torch.tensor([[0, 2], [2, DROPPED], [DROPPED, DROPPED], [3, 2]])
    assert count_tokens_per_expert(idx_TK, 5).tolist() == [1, 0, 3, 1, 0]
    assert count_tokens_per_expert(idx_TK[:0], 3).tolist() == [0, 0, 0]
    assert chunk_sizes(4, 1) == [4]
    assert chunk_sizes(8, 3) == [3, 3, 2]
    assert chunk_sizes(3, 3) == [1, 1, 1]


# Keys have one byte up to 255 experts, and two bytes from 256 experts.
@pytest.mark.parametrize("num_experts", [8, 255, 256, 1000])
@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("num_tokens", [0, 300])
def test_slots_have_the_order_of_a_sort_in_python(
    num_experts: int, num_chunks: int, num_tokens: int
) -> None:
    ep_size = 4 if num_experts % 4 == 0 else 5
    table = _random_table(num_tokens, num_experts, 4)
    chosen = _flat(table)
    num_local = num_experts // ep_size
    sizes = chunk_sizes(num_local, num_chunks)

    def place(slot: int) -> tuple[int, ...]:
        expert = chosen[slot]
        if expert == DROPPED:
            return num_chunks, 0, 0, slot
        chunk = int(expert % num_local >= sizes[0])
        return chunk, expert // num_local, expert, slot

    want = sorted(range(4 * num_tokens), key=place)
    keys_N, slots_N = sort_keys(_tensor(table, 4), num_experts)
    starts_E1 = expert_starts(keys_N, num_experts).numpy()
    ordered_N = order_by_chunk(slots_N, starts_E1, ep_size=ep_size, num_chunks=num_chunks)
    assert ordered_N.tolist() == want
    if num_chunks == 1:
        assert slots_N.tolist() == want
        kept = [chosen[slot] for slot in want if chosen[slot] != DROPPED]
        assert keys_N[: len(kept)].tolist() == kept
        assert all(key >= num_experts for key in keys_N[len(kept) :].tolist())
        before = [sum(expert < e for expert in kept) for e in range(num_experts + 1)]
        assert expert_starts(keys_N, num_experts).tolist() == before


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[Table], int, int, int]:
    """Draw the routing of each rank, the local experts, top-k and number of chunks."""
    num_ranks = draw(st.integers(1, 5))
    num_local = draw(st.integers(1, 6))
    top_k = draw(st.integers(1, min(4, num_ranks * num_local)))
    experts = st.permutations(range(num_ranks * num_local))
    kept = st.lists(st.integers(0, 9), min_size=top_k, max_size=top_k)
    token = st.tuples(experts, kept).map(
        lambda drawn: [e if keep else DROPPED for e, keep in zip(*drawn, strict=False)]
    )
    tables = draw(st.lists(st.lists(token, max_size=6), min_size=num_ranks, max_size=num_ranks))
    return tables, num_local, top_k, draw(st.integers(1, num_local))


@given(_cases())
@settings(max_examples=60, deadline=None)
def test_rows_reach_their_experts_and_return(case: tuple[list[Table], int, int, int]) -> None:
    tables, num_local, top_k, num_chunks = case
    num_ranks = len(tables)
    num_experts = num_ranks * num_local
    by_expert = [sort_keys(_tensor(table, top_k), num_experts) for table in tables]
    starts_WE1 = torch.stack([expert_starts(keys, num_experts) for keys, _ in by_expert]).numpy()
    plans = [plan_dispatch(starts_WE1, r, num_chunks=num_chunks) for r in range(num_ranks)]
    queues: list[list[Row]] = []
    chunks = {"ep_size": num_ranks, "num_chunks": num_chunks}
    for rank, ((_, slots_N), table) in enumerate(zip(by_expert, tables, strict=True)):
        slots = order_by_chunk(slots_N, starts_WE1[rank], **chunks).tolist()
        queues.append([(rank, slot, _flat(table)[slot]) for slot in slots])

    returned_rows: list[list[Row]] = [[] for _ in range(num_ranks)]
    first_local = 0
    for c in range(num_chunks):
        outboxes = [_split(queues[r], plans[r][c].send_splits) for r in range(num_ranks)]
        inboxes = [[outboxes[s][r] for s in range(num_ranks)] for r in range(num_ranks)]
        back: list[list[list[Row]]] = []
        for rank, inbox in enumerate(inboxes):
            plan = plans[rank][c]
            assert [len(rows) for rows in inbox] == plan.recv_splits
            arrived = _flat(inbox)
            orders, ends_L = order_by_expert(plan)
            assert (orders.dtype, ends_L.dtype) == (np.int32, np.int32)
            sorted_rows = [arrived[place] for place in orders[0]]
            chunk = range(first_local, first_local + plan.num_local)
            wanted = [_routed_to(rank * num_local + local, tables) for local in chunk]
            assert sorted_rows == _flat(wanted)
            assert ends_L.tolist() == np.cumsum([len(rows) for rows in wanted]).tolist()
            returned = [sorted_rows[place] for place in orders[1]]
            assert returned == arrived
            back.append(_split(returned, plan.recv_splits))
        for rank in range(num_ranks):
            returned_rows[rank] += [row for r in range(num_ranks) for row in back[r][rank]]
        first_local += plans[0][c].num_local

    assert first_local == num_local
    for rank, table in enumerate(tables):
        # The dropped slots are not sent, so they stay in the queue, in order.
        dropped = [slot for slot, e in enumerate(_flat(table)) if e == DROPPED]
        assert queues[rank] == [(rank, slot, DROPPED) for slot in dropped]
        assert len(returned_rows[rank]) + len(dropped) == top_k * len(table)
        assert all(_flat(table)[slot] == e for _, slot, e in returned_rows[rank])


def _split(rows: list[Row], sizes: list[int]) -> list[list[Row]]:
    """Remove consecutive parts from the front of ``rows`` and return them."""
    return [[rows.pop(0) for _ in range(size)] for size in sizes]


def _flat(lists: list[list[T]]) -> list[T]:
    return [item for items in lists for item in items]


def _routed_to(expert: int, tables: list[Table]) -> list[Row]:
    """Return the rows of an expert by source rank, then slot."""
    return [
        (rank, slot, expert)
        for rank, table in enumerate(tables)
        for slot, e in enumerate(_flat(table))
        if e == expert
    ]


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
def test_routing_that_does_not_fit_is_an_error(
    idx: torch.Tensor, weights: torch.Tensor, message: str
) -> None:
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
    generator = torch.Generator().manual_seed(0)
    up_LGD, down_LDF, x_TD = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((3, parts * 8, 5), (3, 5, 8), (6, 5))
    )
    routing = Routing(
        topk_idx_TK=torch.tensor([[0, 1], [2, 0], [1, 2], [2, DROPPED], [0, 2], [1, 0]]),
        topk_weights_TK=torch.linspace(0.1, 0.9, 12, dtype=torch.float64).view(6, 2),
    )
    experts = Experts(
        up_LGD=up_LGD, down_LDF=down_LDF, activation="swiglu" if parts == 2 else "gelu"
    )
    up, down = sharded_dims(parts=parts)
    places = [{"tp_rank": tp_rank, "tp_size": tp_size} for tp_rank in range(tp_size)]
    shards = experts.with_tensors(
        {
            "up_LGD": torch.cat([up.shard(up_LGD, **place) for place in places]),
            "down_LDF": torch.cat([down.shard(down_LDF, **place) for place in places]),
        }
    )
    routed = route_to_shards(routing, num_local=3, tp_size=tp_size)
    want_TD = moe_reference(x_TD, routing, experts)
    torch.testing.assert_close(moe_reference(x_TD, routed, shards), want_TD)


def test_sizes_that_cannot_be_sharded_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("intermediate_size (8) must be divisible by")):
        shard_size(8, tp_size=3)
    with pytest.raises(ValueError, match=re.escape("tp_size (3) must be at least 1 and divide")):
        check_tp_size(3, num_ranks=4)
    wanted = "num_experts (3) must be divisible by ep_size (4) / tp_size (2)"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        local_experts(3, ep_size=4, tp_size=2)
    assert local_experts(6, ep_size=4, tp_size=2) == 3
