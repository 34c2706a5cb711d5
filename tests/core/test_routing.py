"""Sort orders and dispatch plans, compared with plain Python that moves named rows."""

from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halley.core.routing import (
    check_routing,
    chunk_sizes,
    count_tokens_per_expert,
    expert_starts,
    local_experts,
    order_by_chunk,
    order_by_expert,
    plan_dispatch,
    sort_keys,
)
from halley.core.types import DROPPED, DispatchPlan, Routing


Table = list[list[int]]
Row = tuple[int, int, int]  # source rank, slot, expert
T = TypeVar("T")


def _tensor(table: Table, top_k: int) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.int64).view(-1, top_k)


def _random_table(num_tokens: int, num_experts: int, top_k: int, *, seed: int = 0) -> Table:
    """Return routing with a fifth of the slots dropped."""
    generator = torch.Generator().manual_seed(seed)
    idx_TK = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k]
    dropped_TK = torch.rand(num_tokens, top_k, generator=generator) < 0.2
    return idx_TK.masked_fill(dropped_TK, DROPPED).tolist()


def test_count_tokens_per_expert() -> None:
    idx_TK = torch.tensor([[0, 2], [2, DROPPED], [DROPPED, DROPPED], [3, 2]])
    assert count_tokens_per_expert(idx_TK, 5).tolist() == [1, 0, 3, 1, 0]
    assert count_tokens_per_expert(idx_TK[:0], 3).tolist() == [0, 0, 0]


def test_chunk_sizes_are_as_even_as_possible() -> None:
    assert chunk_sizes(4, 1) == [4]
    assert chunk_sizes(8, 3) == [3, 3, 2]
    assert chunk_sizes(3, 3) == [1, 1, 1]


@pytest.mark.parametrize("num_chunks", [0, 5])
def test_number_of_chunks_out_of_range_is_an_error(num_chunks: int) -> None:
    rule = rf"num_chunks \({num_chunks}\) must be between 1 and num_local_experts \(4\)"
    with pytest.raises(ValueError, match=rule):
        chunk_sizes(4, num_chunks)
    with pytest.raises(ValueError, match=rule):
        plan_dispatch(np.zeros((2, 9), dtype=np.int64), 0, num_chunks=num_chunks)


def test_experts_must_divide_over_the_ranks() -> None:
    assert local_experts(64, ep_size=8) == 8
    rule = r"num_experts \(63\) must be divisible by ep_size \(8\)"
    with pytest.raises(ValueError, match=rule):
        local_experts(63, ep_size=8)
    with pytest.raises(ValueError, match=rule):
        plan_dispatch(np.zeros((8, 64), dtype=np.int64), 0)


# Keys have one byte up to 255 experts, and two bytes from 256 experts.
@pytest.mark.parametrize("num_experts", [8, 255, 256, 1000])
@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("num_tokens", [0, 300])
def test_slots_have_the_order_of_a_sort_in_python(
    num_experts: int, num_chunks: int, num_tokens: int
) -> None:
    ep_size = 4 if num_experts % 4 == 0 else 5
    table = _random_table(num_tokens, num_experts, 4)
    num_local = num_experts // ep_size
    sizes = chunk_sizes(num_local, num_chunks)

    def place(slot: int) -> tuple[int, ...]:
        expert = table[slot // 4][slot % 4]
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
        experts = [table[slot // 4][slot % 4] for slot in want]
        kept = [expert for expert in experts if expert != DROPPED]
        assert keys_N[: len(kept)].tolist() == kept
        assert all(key >= num_experts for key in keys_N[len(kept) :].tolist())
        before = [sum(expert < e for expert in kept) for e in range(num_experts + 1)]
        assert expert_starts(keys_N, num_experts).tolist() == before


def test_order_by_expert_by_hand() -> None:
    starts_WL1 = np.array([[4, 5, 7], [0, 1, 1]])  # counts [[1, 2], [1, 0]]
    plan = DispatchPlan(num_local=2, send_splits=[0, 0], recv_splits=[3, 1], starts_WL1=starts_WL1)
    orders, ends_L = order_by_expert(plan)
    assert orders.tolist() == [[0, 3, 1, 2], [0, 2, 3, 1]]
    assert ends_L.tolist() == [2, 4]
    assert (orders.dtype, ends_L.dtype) == (np.int32, np.int32)


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
    idx = [_tensor(table, top_k) for table in tables]
    by_expert = [sort_keys(i, num_experts) for i in idx]
    starts_WE1 = torch.stack([expert_starts(keys, num_experts) for keys, _ in by_expert]).numpy()
    plans = [plan_dispatch(starts_WE1, r, num_chunks=num_chunks) for r in range(num_ranks)]
    queues: list[list[Row]] = []
    for rank, ((_, slots_N), table) in enumerate(zip(by_expert, tables, strict=True)):
        slots = order_by_chunk(
            slots_N, starts_WE1[rank], ep_size=num_ranks, num_chunks=num_chunks
        ).tolist()
        queues.append([(rank, slot, table[slot // top_k][slot % top_k]) for slot in slots])

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
        assert all(table[slot // top_k][slot % top_k] == e for _, slot, e in returned_rows[rank])


def _split(rows: list[Row], sizes: list[int]) -> list[list[Row]]:
    """Remove consecutive parts from the front of ``rows`` and return them."""
    parts = []
    for size in sizes:
        parts.append(rows[:size])
        del rows[:size]
    return parts


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
    with pytest.raises(ValueError, match=message):
        check_routing(
            Routing(topk_idx_TK=idx, topk_weights_TK=weights), num_tokens=4, num_experts=8
        )


@pytest.mark.parametrize(("num_tokens", "dtype"), [(0, torch.float32), (4, torch.bfloat16)])
def test_routing_that_fits_passes(num_tokens: int, dtype: torch.dtype) -> None:
    idx_TK = torch.zeros(num_tokens, 8, dtype=torch.int64)
    routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=idx_TK.to(dtype))
    check_routing(routing, num_tokens=num_tokens, num_experts=8)
