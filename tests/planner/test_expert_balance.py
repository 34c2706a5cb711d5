"""Placements compared with all possible placements, the plain one, and bounds at real sizes."""

import itertools
import random

from halley.core.placement import ExpertPlacement
from halley.planner.expert_balance import plan_placement, rank_loads


def test_plans_by_hand() -> None:
    moved = plan_placement([8, 7, 2, 1], num_ranks=2, spare=0)
    assert moved.experts_WL == ((0, 3), (1, 2))
    # Expert 0 has half of the load; with a replica on each of four ranks, the load is even.
    counts = [12, 3, 3, 3, 3, 0, 0, 0]
    replicated = plan_placement(counts, num_ranks=4, spare=1)
    assert 0 in replicated.replicated
    assert rank_loads(replicated, counts) == [6.0] * 4
    balanced = plan_placement([5, 3, 4, 4, 7, 1], num_ranks=3, spare=2)
    assert balanced == ExpertPlacement.plain(6, num_ranks=3)
    uneven = plan_placement([9, 5, 1, 1, 1], num_ranks=4, spare=0)
    assert (uneven.num_ranks, uneven.num_local) == (4, 2)
    assert len(uneven.replicated) > 0


def _least_load(counts_E: list[int], *, num_ranks: int, num_local: int) -> float:
    """Return the load of the most loaded rank under the best of all placements."""
    least = float("inf")
    choices = itertools.combinations(range(len(counts_E)), num_local)
    for ranks in itertools.combinations_with_replacement(list(choices), num_ranks):
        held = [expert for experts in ranks for expert in experts]
        if len(set(held)) == len(counts_E):
            shares = [count / held.count(e) for e, count in enumerate(counts_E)]
            least = min(least, max(sum(shares[e] for e in experts) for experts in ranks))
    return least


SIZES = [(4, 2, 0), (4, 2, 1), (6, 2, 0), (6, 3, 0), (6, 3, 1), (4, 4, 1), (5, 4, 0), (5, 2, 1)]


def test_plans_are_near_the_best_of_all_placements() -> None:
    """The load is at most 8/7 of the best, and equal to the best in four fifths of the cases."""
    generator = random.Random(0)
    ratios: list[float] = []
    for num_experts, num_ranks, spare in SIZES * 8:
        counts = [generator.randint(1, 20) ** 2 for _ in range(num_experts)]
        placement = plan_placement(counts, num_ranks=num_ranks, spare=spare)
        fewest = -(-num_experts // num_ranks)
        best = min(
            _least_load(counts, num_ranks=num_ranks, num_local=num_local)
            for num_local in range(fewest, fewest + spare + 1)
        )
        ratios.append(max(rank_loads(placement, counts)) / best)
    assert max(ratios) <= 8 / 7
    assert min(ratios) >= 1 - 1e-9
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= len(ratios) * 4 / 5


def test_plans_are_never_worse_than_the_plain_one_or_with_fewer_spare_slots() -> None:
    generator = random.Random(1)
    for _ in range(25):
        num_ranks = generator.choice([2, 4, 8])
        num_experts = num_ranks * generator.randint(2, 6)
        counts = [generator.paretovariate(1.0) for _ in range(num_experts)]
        plain = ExpertPlacement.plain(num_experts, num_ranks=num_ranks)
        least = max(rank_loads(plain, counts))
        for spare in range(3):
            placement = plan_placement(counts, num_ranks=num_ranks, spare=spare)
            load = max(rank_loads(placement, counts))
            assert load <= least * (1 + 1e-12)
            least = load
