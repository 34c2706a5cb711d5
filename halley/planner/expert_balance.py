"""Plans where experts live from the load that was counted: replicas, then their packing.

Source: DeepSeek's expert-parallelism load balancer (EPLB, github.com/deepseek-ai/EPLB, MIT), its
global policy: spare places go one by one to the expert with the most load a replica, then replicas
are packed on ranks, heaviest first, each on the least loaded rank with a place left. Graham's rule
of the longest processing time first (SIAM J. Appl. Math. 17, 1969). Here, besides: no rank holds an
expert twice; replicas are swapped, or give their place to one of another expert, while that
relieves the most loaded rank; and places are left unused where using them would not.
"""

import math
from collections.abc import Sequence

from halley.core.placement import ExpertPlacement
from halley.core.types import MAX_EXPERTS


_MAX_CHANGES = 200
_NUM_STARTS = 8
_GAIN = 1e-3  # of the mean load: what a replica, or a change, must relieve the top rank by


def plan_placement(counts_E: Sequence[float], *, num_ranks: int, spare: int) -> ExpertPlacement:
    """Return a placement whose most loaded rank has little more than the mean.

    Replicas of an expert are taken to share its load equally (``core.placement.choose_replicas``).
    Never worse than the plain placement, nor than with fewer spare places. What gains less than a
    thousandth of the mean is not done, as each replica costs memory.

    Args:
        counts_E: load of each expert, at least 0; not all 0.
        num_ranks: W.
        spare: experts that a rank may hold beyond ``ceil(E / W)``; with 0 experts are only moved,
            unless they do not divide over the ranks.

    Raises:
        ValueError: a number is out of range, or a rank would hold more experts than there are.
    """
    num_experts = len(counts_E)
    fewest = check_spare(num_experts, num_ranks=num_ranks, spare=spare)
    if min(counts_E, default=0.0) < 0 or not 0 < sum(counts_E) < math.inf:
        raise ValueError(f"counts ({list(counts_E)}) must be at least 0 and not all 0")
    best: ExpertPlacement | None = None
    if num_experts % num_ranks == 0:
        best = ExpertPlacement.plain(num_experts, num_ranks=num_ranks)
    least = max(rank_loads(best, counts_E)) if best else math.inf
    smallest_gain = _GAIN * sum(counts_E) / num_ranks
    for num_local in range(fewest, fewest + spare + 1):
        found = _plan(counts_E, num_ranks=num_ranks, num_local=num_local)
        load = max(rank_loads(found, counts_E))
        if best is None or load < least - smallest_gain:
            best, least = found, load
    assert best is not None
    return best


def check_spare(num_experts: int, *, num_ranks: int, spare: int) -> int:
    """Return the fewest experts that a rank can hold, ``ceil(E / W)``.

    Raises:
        ValueError: there is no rank, there are more ranks or experts than ``MAX_EXPERTS``, or with
            ``spare`` more a rank would hold more than all.
    """
    if num_ranks < 1:
        raise ValueError(f"ranks ({num_ranks}) must be at least 1")
    fewest = -(-num_experts // num_ranks)
    if spare < 0:
        raise ValueError(f"spare ({spare}) must be at least 0")
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"experts ({num_experts}) must be at most {MAX_EXPERTS}")
    if num_ranks > MAX_EXPERTS:
        raise ValueError(f"ranks ({num_ranks}) must be at most {MAX_EXPERTS}")
    if fewest + spare > num_experts:
        raise ValueError(
            f"spare ({spare}) must leave a rank at most all experts ({num_experts}), and it has "
            f"{fewest} without"
        )
    return fewest


def rank_loads(placement: ExpertPlacement, counts_E: Sequence[float]) -> list[float]:
    """Return the load of each rank, in the unit of the counts."""
    shares_E = [count / len(placement.ranks_of(expert)) for expert, count in enumerate(counts_E)]
    return [math.fsum(shares_E[expert] for expert in experts) for experts in placement.experts_WL]


def max_over_mean(loads: Sequence[float]) -> float:
    """Return the load of the most loaded rank over the mean: 1 is balanced."""
    return max(loads) * len(loads) / math.fsum(loads)


def _plan(counts_E: Sequence[float], *, num_ranks: int, num_local: int) -> ExpertPlacement:
    """Return the best placement of several numbers of hot replicas, beginning with as many as fit.

    Many even shares may pack worse than a few large ones beside replicas of experts with no load.
    """
    num_more = num_ranks * num_local - len(counts_E)
    found: list[tuple[float, ExpertPlacement]] = []
    for num_hot in range(num_more, -1, -max(1, num_more // _NUM_STARTS)):
        num_E = _replicate(counts_E, num_ranks=num_ranks, num_hot=num_hot, num_more=num_more)
        shares_E = [count / num for count, num in zip(counts_E, num_E, strict=True)]
        ranks = _pack(shares_E, num_E, num_ranks=num_ranks, num_local=num_local)
        _improve(ranks, counts_E)
        placement = ExpertPlacement(
            num_experts=len(counts_E), experts_WL=tuple(tuple(sorted(held)) for held in ranks)
        )
        found.append((max_over_mean(rank_loads(placement, counts_E)), placement))
        if found[-1][0] < 1 + _GAIN:
            break
    return min(found, key=lambda each: each[0])[1]


def _replicate(
    counts_E: Sequence[float], *, num_ranks: int, num_hot: int, num_more: int
) -> list[int]:
    """Return how many replicas each expert gets, at most one a rank.

    Args:
        num_hot: how many go to experts with the most load a replica.
        num_more: how many there are beyond one each; others go to those with the least.
    """
    num_E = [1] * len(counts_E)
    for index in range(num_more):
        choose = max if index < num_hot else min
        open_experts = [e for e, num in enumerate(num_E) if num < num_ranks]
        num_E[choose(open_experts, key=lambda e: counts_E[e] / num_E[e])] += 1
    return num_E


def _pack(
    shares_E: Sequence[float], num_replicas_E: Sequence[int], *, num_ranks: int, num_local: int
) -> list[set[int]]:
    """Return the experts of each rank, heaviest replicas placed first."""
    ranks: list[set[int]] = [set() for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for expert in sorted(range(len(shares_E)), key=lambda e: -shares_E[e]):
        for _ in range(num_replicas_E[expert]):
            free = [r for r in range(num_ranks) if len(ranks[r]) < num_local]
            fitting = [r for r in free if expert not in ranks[r]]
            if fitting:
                rank = min(fitting, key=lambda r: loads[r])
            else:
                # Every rank with a place left holds the expert. Another rank, which is full, has
                # some expert that the free one has not: it moves there and leaves its place.
                rank = min(
                    (r for r in range(num_ranks) if expert not in ranks[r]), key=lambda r: loads[r]
                )
                moved = min(ranks[rank] - ranks[free[0]], key=lambda e: shares_E[e])
                ranks[rank].remove(moved)
                ranks[free[0]].add(moved)
                loads[rank] -= shares_E[moved]
                loads[free[0]] += shares_E[moved]
            ranks[rank].add(expert)
            loads[rank] += shares_E[expert]
    return ranks


def _improve(ranks: list[set[int]], counts_E: Sequence[float]) -> None:
    """Relieve the most loaded rank, change by change, while one is worth it."""
    least_gain = _GAIN * sum(counts_E) / len(ranks)
    for _ in range(_MAX_CHANGES):
        num_E = [sum(e in held for held in ranks) for e in range(len(counts_E))]
        shares_E = [count / num for count, num in zip(counts_E, num_E, strict=True)]
        loads = [math.fsum(shares_E[e] for e in held) for held in ranks]
        top = max(range(len(ranks)), key=lambda r: loads[r])
        if not _swap(ranks, shares_E, loads, top=top, least_gain=least_gain) and not _replace(
            ranks, counts_E, num_E, loads, top=top, least_gain=least_gain
        ):
            return


def _swap(
    ranks: list[set[int]],
    shares_E: Sequence[float],
    loads: Sequence[float],
    *,
    top: int,
    least_gain: float,
) -> bool:
    """Swap a replica of the top rank with a lighter one of another; return whether that helped."""
    best = least_gain, 0, 0, 0
    for other, held in enumerate(ranks):
        gap = loads[top] - loads[other]
        for mine in ranks[top] - held:
            for theirs in held - ranks[top]:
                moved = shares_E[mine] - shares_E[theirs]
                # The heavier of both ranks afterwards is so much lighter than the top one now.
                best = max(best, (min(moved, gap - moved), other, mine, theirs))
    gain, other, mine, theirs = best
    if gain <= least_gain:
        return False
    ranks[top] ^= {mine, theirs}
    ranks[other] ^= {mine, theirs}
    return True


def _replace(
    ranks: list[set[int]],
    counts_E: Sequence[float],
    num_E: Sequence[int],
    loads: Sequence[float],
    *,
    top: int,
    least_gain: float,
) -> bool:
    """Put a replica of another expert in the place of one on the top rank, if that helps.

    The other ranks with the expert that leaves get more of its load; those with the one that comes
    get less.
    """
    best = least_gain, 0, 0
    for leaves in ranks[top]:
        if num_E[leaves] == 1:
            continue
        more = counts_E[leaves] / (num_E[leaves] - 1) - counts_E[leaves] / num_E[leaves]
        for comes in set(range(len(counts_E))) - ranks[top]:
            share = counts_E[comes] / (num_E[comes] + 1)
            less = counts_E[comes] / num_E[comes] - share
            after = [
                load + more * (leaves in held) - less * (comes in held)
                for load, held in zip(loads, ranks, strict=True)
            ]
            after[top] = loads[top] - counts_E[leaves] / num_E[leaves] + share
            best = max(best, (loads[top] - max(after), leaves, comes))
    gain, leaves, comes = best
    if gain <= least_gain:
        return False
    ranks[top] ^= {leaves, comes}
    return True
