"""The dispatch plan against one that plain Python makes slot by slot."""

import functools
import operator
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from halley.core.types import Routing
from halley.fused.kernels.layout import (
    IS_USABLE,
    MAX_CHUNKS,
    NUM_COPIES,
    NUM_OWN_COPIES,
    NUM_TICKETS,
    NUM_TILES,
    TASK_ROWS,
    Layout,
)
from tests.fused.kernel_case import KernelCase, make_tokens
from tests.fused.kernel_rank import KernelRank, run_world


@dataclass(frozen=True, kw_only=True)
class TokenCopy:
    """One token that this rank receives; experts are those on this rank."""

    source: int  # rank
    token: int  # index on the source rank
    place: int  # of the source rank in the ring that begins with this rank
    rows: list[int]  # of the experts, in the order of the token's choices
    weights: list[float]
    smallest: int  # smallest expert
    group: int  # group of the largest expert


@dataclass
class ExpectedPlan:
    """Contents of a rank's plan; None pads the two lists of token copies to whole tasks."""

    expert_begin: list[int] = field(default_factory=list)  # first row of each local expert
    tiles: list[tuple[int, int]] = field(default_factory=list)  # expert and number of rows
    fetch: list[TokenCopy | None] = field(default_factory=list)
    combine: list[TokenCopy | None] = field(default_factory=list)
    num_own_copies: int = 0


def _whole_tasks(copies: list[TokenCopy]) -> list[TokenCopy | None]:
    return [*copies, *[None] * (-len(copies) % TASK_ROWS)]


def _expected_plan(layout: Layout, rank: int, routings: list[Routing]) -> ExpectedPlan:
    plan, num_local = ExpectedPlan(), layout.num_local
    ring = [(rank + i) % layout.num_ranks for i in range(layout.num_ranks)]
    tables = [routing.topk_idx_TK.tolist() for routing in routings]
    row_of: dict[tuple[int, int, int], int] = {}
    for local in range(num_local):
        expert, begin = rank * num_local + local, len(plan.tiles) * layout.block_m
        rows = [(s, t) for s in ring for t, experts in enumerate(tables[s]) if expert in experts]
        row_of |= {(s, t, expert): begin + row for row, (s, t) in enumerate(rows)}
        plan.expert_begin.append(begin)
        for start in range(0, len(rows), layout.block_m):
            tile = rows[start : start + layout.block_m]
            plan.tiles.append((local, len(tile)))
    copies = []
    for place, source in enumerate(ring):
        for token, experts in enumerate(tables[source]):
            mine = [k for k, e in enumerate(experts) if e >= 0 and e // num_local == rank]
            if mine:
                weights = routings[source].topk_weights_TK[token]
                copy = TokenCopy(
                    source=source,
                    token=token,
                    place=place,
                    rows=[row_of[source, token, experts[k]] for k in mine],
                    weights=[weights[k].item() for k in mine],
                    smallest=min(experts[k] for k in mine),
                    group=_group_of(max(experts[k] for k in mine) % num_local, layout),
                )
                copies.append(copy)
    own, others = [s for s in copies if s.place == 0], [s for s in copies if s.place > 0]
    for part in (own, others):
        plan.fetch += _whole_tasks(sorted(part, key=lambda s: (s.smallest, s.place, s.token)))
    for part in (others, own):
        plan.combine += _whole_tasks(sorted(part, key=lambda s: (s.group, s.place, s.token)))
    plan.num_own_copies = len(_whole_tasks(own))
    return plan


def _group_of(local: int, layout: Layout) -> int:
    return local * layout.num_groups // layout.num_local


def check_plan(rank: KernelRank, routings: list[Routing], num_rows: int) -> None:
    """Compare the plan of a rank with the expected one."""
    layout = rank.layout
    expected = _expected_plan(layout, rank.rank, routings)
    summary = rank.section("summary", 16)
    num_tiles = len(expected.tiles)
    assert summary[IS_USABLE.value] == 1
    assert summary[NUM_TILES.value] == num_tiles
    assert summary[NUM_COPIES.value] == len(expected.fetch)
    assert summary[NUM_OWN_COPIES.value] == expected.num_own_copies
    assert num_rows == num_tiles * layout.block_m
    assert rank.host_status[2] == 0
    _check_copies(rank, "fetch", expected.fetch)
    _check_copies(rank, "combine", expected.combine)
    tiles_of_group = Counter(_group_of(local, layout) for local, _ in expected.tiles)
    rows_of_expert = [0] * layout.num_local
    for local, num_tile_rows in expected.tiles:
        rows_of_expert[local] += num_tile_rows
    masks = [
        sum(1 << peer for peer in {e // layout.num_local for e in experts if e >= 0})
        for experts in routings[rank.rank].topk_idx_TK.tolist()
    ]
    wants = {
        "expert_begin": expected.expert_begin,
        "expert_rows": rows_of_expert,
        "tile_expert": [local for local, _ in expected.tiles],
        "tile_rows": [num_tile_rows for _, num_tile_rows in expected.tiles],
        "group_tiles": [tiles_of_group[group] for group in range(layout.num_groups)],
        "token_contributors": masks,
        "contributors": [functools.reduce(operator.or_, masks, 0)],
        "tile_arrived": [0] * num_tiles,
        "tickets": [0] * NUM_TICKETS,
        "chunk_done": [0] * MAX_CHUNKS * layout.num_groups,
        "chunk_sent": [0] * MAX_CHUNKS,
    }
    for name, want in wants.items():
        assert rank.section(name, len(want)).tolist() == want, name


def _check_copies(rank: KernelRank, kind: str, copies: list[TokenCopy | None]) -> None:
    layout = rank.layout
    origins = rank.section(f"{kind}_origin", len(copies)).tolist()
    slots = rank.section(f"{kind}_rows", len(copies), layout.top_k).tolist()
    weights = rank.section("combine_weight", len(copies), layout.top_k).view(torch.float32).tolist()
    for index, copy in enumerate(copies):
        if copy is None:
            assert origins[index] == -1
            continue
        assert divmod(origins[index], layout.max_tokens) == (copy.source, copy.token)
        num_unused = layout.top_k - len(copy.rows)
        assert slots[index] == copy.rows + [-1] * num_unused
        if kind == "combine":
            assert weights[index] == copy.weights + [0.0] * num_unused


def _plan_and_check(rank: KernelRank) -> int:
    case = rank.case
    for call in range(len(case.num_tokens_CW)):
        tokens = [make_tokens(case, peer, call=call) for peer in range(case.num_ranks)]
        x_TD, routing = tokens[rank.rank]
        num_rows = rank.make_plan(x_TD, routing)
        rank.check()
        check_plan(rank, [routing for _, routing in tokens], num_rows)
        assert torch.equal(rank.sent_rows[: len(x_TD)], x_TD)
        assert rank.sent_rows[len(x_TD) :].isnan().all()
        # All counters but PLANNED and EPOCH are zero.
        assert rank.counters.sum() == 2 * rank.epoch
    return rank.epoch


CASES = {
    "top 10": KernelCase(
        top_k=10, num_tokens_CW=((9, 12),), num_experts=12, block_slots=32, dropped=0.2
    ),
    "all experts": KernelCase(top_k=4, num_tokens_CW=((9, 12),)),
    "all dropped": KernelCase(dropped=1.0),
    "one rank": KernelCase(num_tokens_CW=((33,),)),
    "one expert a rank": KernelCase(num_tokens_CW=((19, 40, 3, 20),), num_experts=4),
    "one expert": KernelCase(num_tokens_CW=((19,),), num_experts=1, top_k=1),
    "empty expert": KernelCase(load="empty-expert", num_tokens_CW=((19, 20),)),
    "one takes all": KernelCase(load="one-hot", top_k=1, num_tokens_CW=((19, 40),)),
    "no tokens": KernelCase(num_tokens_CW=((0, 30), (30, 0), (0, 0))),
    "more than a task": KernelCase(num_tokens_CW=((70, 65),), block_slots=64),
    "full tasks": KernelCase(num_tokens_CW=((64, 64, 64),), num_experts=3, top_k=3, block_slots=64),
    "larger max_tokens": KernelCase(num_tokens_CW=((3, 20),), max_tokens=100, block_slots=32),
    "many experts": KernelCase(num_tokens_CW=((12, 15),), num_experts=80, top_k=4, block_slots=32),
}


@pytest.mark.parametrize("name", CASES)
def test_plan_equals_one_made_slot_by_slot(name: str) -> None:
    case = CASES[name]
    epochs = run_world(case, _plan_and_check, seed=len(name))
    assert epochs == [len(case.num_tokens_CW)] * case.num_ranks


def test_plan_is_equal_in_a_schedule_with_long_pauses() -> None:
    case = KernelCase(num_tokens_CW=((20, 13, 0), (4, 9, 30)), num_experts=6, dropped=0.1)
    run_world(case, _plan_and_check, seed=1, starve=0.02)


@pytest.mark.parametrize(
    ("idx_dtype", "weights_dtype"), [(torch.int32, torch.bfloat16), (torch.int16, torch.float16)]
)
def test_narrow_routing_dtypes_are_accepted(
    idx_dtype: torch.dtype, weights_dtype: torch.dtype
) -> None:
    case = KernelCase(dropped=0.2)

    def run(rank: KernelRank) -> None:
        routings = [
            Routing(
                topk_idx_TK=routing.topk_idx_TK.to(idx_dtype),
                topk_weights_TK=routing.topk_weights_TK.to(weights_dtype),
            )
            for _, routing in (make_tokens(case, peer) for peer in range(case.num_ranks))
        ]
        num_rows = rank.make_plan(make_tokens(case, rank.rank)[0], routings[rank.rank])
        check_plan(rank, routings, num_rows)

    run_world(case, run)


def test_triton_compiles_again_when_offsets_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton finds a compiled kernel by the text of its constants."""
    before, same = CASES["top 10"].layout(), CASES["top 10"].layout()
    monkeypatch.setattr("halley.fused.kernels.layout.MAX_GROUPS", 2)
    after = CASES["top 10"].layout()
    assert before == same
    assert (str(before) == str(same), str(before) == str(after)) == (True, False)
