"""Plan which experts each rank holds, some as replicas, to balance the counted load of the ranks.

Source: the global policy of DeepSeek's expert-parallelism load balancer (EPLB,
github.com/deepseek-ai/EPLB, MIT). Each spare place goes to the expert with the most load per
replica. Then the replicas are packed, heaviest first, each on the least loaded rank with a free
place (longest processing time first: Graham, SIAM J. Appl. Math. 17, 1969).

Halley differs in four points. A rank never holds an expert twice. Some spare places may go to idle
experts. After packing, replicas are swapped and replaced as long as this reduces the load of the
most loaded rank. Spare places stay unused if they do not reduce that load.
"""

import math
from collections.abc import Sequence

from halley.core.placement import ExpertPlacement
from halley.core.types import MAX_EXPERTS


_MAX_CHANGES = 200  # most swaps and replacements of one packing
_NUM_STARTS = 8  # ``_plan`` tries at most twice this number of placements
_GAIN = 1e-3  # least reduction of the most loaded rank's load, as a share of the mean load


def plan_placement(counts_E: Sequence[float], *, num_ranks: int, spare: int) -> ExpertPlacement:
    """Return a plan of which experts each rank holds, to reduce the load of the most loaded rank.

    The plan assumes that the replicas of an expert share its load equally
    (``core.placement.choose_replicas``). It is never worse than the plain placement, nor than the
    plan with fewer spare places. Spare places need memory, so each rank gets one more only if this
    reduces the largest load by more than a thousandth of the mean load.

    Args:
        counts_E: load of each expert, at least 0 and not all 0.
        spare: experts that a rank may hold beyond ``ceil(E / W)``. With 0, and if the number of
            ranks W divides E, experts are moved but not replicated.
    """
    num_experts = len(counts_E)
    fewest = check_spare(num_experts, num_ranks=num_ranks, spare=spare)
    if min(counts_E, default=0.0) < 0 or not 0 < sum(counts_E) < math.inf:
        raise ValueError(f"counts ({list(counts_E)}) must be at least 0 and not all 0")
    best, least = None, math.inf
    if num_experts % num_ranks == 0:
        best = ExpertPlacement.plain(num_experts, num_ranks=num_ranks)
        least = max(rank_loads(best, counts_E))
    smallest_gain = _GAIN * sum(counts_E) / num_ranks
    for num_local in range(fewest, fewest + spare + 1):
        found = _plan(counts_E, num_ranks=num_ranks, num_local=num_local)
        load = max(rank_loads(found, counts_E))
        if load < least - smallest_gain:
            best, least = found, load
    assert best is not None
    return best


def check_spare(num_experts: int, *, num_ranks: int, spare: int) -> int:
    """Check the arguments; return how many experts a rank holds without spares, ``ceil(E / W)``.

    Raises a ``ValueError`` if a number is out of range, or ``ceil(E / W) + spare`` is more than E.
    """
    for name, number, least in (("ranks", num_ranks, 1), ("spare", spare, 0)):
        if number < least:
            raise ValueError(f"{name} ({number}) must be at least {least}")
    for name, number in (("experts", num_experts), ("ranks", num_ranks)):
        if number > MAX_EXPERTS:
            raise ValueError(f"{name} ({number}) must be at most {MAX_EXPERTS}")
    fewest = -(-num_experts // num_ranks)
    if fewest + spare > num_experts:
        rule = f"leave a rank at most all experts ({num_experts}), and it has {fewest} without"
        raise ValueError(f"spare ({spare}) must {rule}")
    return fewest


def rank_loads(placement: ExpertPlacement, counts_E: Sequence[float]) -> list[float]:
    """Return each rank's load, in units of ``counts_E``; replicas share a load equally."""
    shares_E = [count / len(placement.ranks_of(expert)) for expert, count in enumerate(counts_E)]
    return [math.fsum(shares_E[expert] for expert in experts) for experts in placement.experts_WL]


def max_over_mean(loads: Sequence[float]) -> float:
    """Return the load of the most loaded rank divided by the mean load; 1 if balanced."""
    return max(loads) * len(loads) / math.fsum(loads)


def _plan(counts_E: Sequence[float], *, num_ranks: int, num_local: int) -> ExpertPlacement:
    """Return the best of several placements with different numbers of replicas of hot experts."""
    # More replicas of hot experts are not always better: many equal shares can be harder to pack
    # than a few large shares next to replicas of idle experts.
    num_more = num_ranks * num_local - len(counts_E)
    found: list[tuple[float, ExpertPlacement]] = []
    for num_hot in range(num_more, -1, -max(1, num_more // _NUM_STARTS)):
        num_E = [1] * len(counts_E)  # number of replicas of each expert, at most one per rank
        for index in range(num_more):
            choose = max if index < num_hot else min  # expert with most or least load per replica
            open_experts = [e for e, num in enumerate(num_E) if num < num_ranks]
            num_E[choose(open_experts, key=lambda e: counts_E[e] / num_E[e])] += 1
        shares_E = [count / num for count, num in zip(counts_E, num_E, strict=True)]
        ranks = _pack(shares_E, num_E, num_ranks=num_ranks, num_local=num_local)
        for _ in range(_MAX_CHANGES):
            if not _improve(ranks, counts_E):
                break
        placement = ExpertPlacement(
            num_experts=len(counts_E), experts_WL=tuple(tuple(sorted(held)) for held in ranks)
        )
        found.append((max_over_mean(rank_loads(placement, counts_E)), placement))
        if found[-1][0] < 1 + _GAIN:
            break
    return min(found, key=lambda each: each[0])[1]


def _pack(
    shares_E: Sequence[float], num_replicas_E: Sequence[int], *, num_ranks: int, num_local: int
) -> list[set[int]]:
    """Assign the replicas to ranks, heaviest first; return the experts of each rank."""
    ranks: list[set[int]] = [set() for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for expert in sorted(range(len(shares_E)), key=lambda e: -shares_E[e]):
        for _ in range(num_replicas_E[expert]):
            without = [r for r in range(num_ranks) if expert not in ranks[r]]
            free = [r for r in range(num_ranks) if len(ranks[r]) < num_local]
            fitting = [r for r in without if r in free]
            rank = min(fitting or without, key=lambda r: loads[r])
            if not fitting:
                # All ranks that are not full already hold the expert. So a full rank gets it, and
                # one expert of the full rank moves to a rank that is not full.
                moved = min(ranks[rank] - ranks[free[0]], key=lambda e: shares_E[e])
                ranks[rank].remove(moved)
                ranks[free[0]].add(moved)
                loads[rank] -= shares_E[moved]
                loads[free[0]] += shares_E[moved]
            ranks[rank].add(expert)
            loads[rank] += shares_E[expert]
    return ranks


def _improve(ranks: list[set[int]], counts_E: Sequence[float]) -> bool:
    """Swap or replace an expert of the most loaded rank, in place; return whether its load fell."""
    num_E = [sum(e in held for held in ranks) for e in range(len(counts_E))]
    shares_E = [count / num for count, num in zip(counts_E, num_E, strict=True)]
    loads = [math.fsum(shares_E[e] for e in held) for held in ranks]
    top = max(range(len(ranks)), key=lambda r: loads[r])
    least_gain = _GAIN * sum(counts_E) / len(ranks)
    swap = least_gain, 0, 0, 0
    for other, held in enumerate(ranks):
        gap = loads[top] - loads[other]
        for mine in ranks[top] - held:
            for theirs in held - ranks[top]:
                moved = shares_E[mine] - shares_E[theirs]
                # The swap reduces the larger load of the two ranks by ``min(moved, gap - moved)``.
                swap = max(swap, (min(moved, gap - moved), other, mine, theirs))
    gain, other, mine, theirs = swap
    if gain > least_gain:
        ranks[top] ^= {mine, theirs}
        ranks[other] ^= {mine, theirs}
        return True
    replacement = least_gain, 0, 0
    for removed in [expert for expert in ranks[top] if num_E[expert] > 1]:
        # Other ranks with ``removed`` get more load; other ranks with ``added`` get less.
        more = counts_E[removed] / (num_E[removed] - 1) - counts_E[removed] / num_E[removed]
        for added in set(range(len(counts_E))) - ranks[top]:
            share = counts_E[added] / (num_E[added] + 1)
            less = counts_E[added] / num_E[added] - share
            after = [
                load + more * (removed in held) - less * (added in held)
                for load, held in zip(loads, ranks, strict=True)
            ]
            after[top] = loads[top] - counts_E[removed] / num_E[removed] + share
            replacement = max(replacement, (loads[top] - max(after), removed, added))
    gain, removed, added = replacement
    if gain > least_gain:
        ranks[top] ^= {removed, added}
    return gain > least_gain
