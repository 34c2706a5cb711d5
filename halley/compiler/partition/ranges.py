"""Which ranges of a sequence run in parts, and in how many: a dynamic programme over costs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """A number of parts and what it costs; one part is the range as it is."""

    num_parts: int
    cost_us: float


@dataclass(frozen=True)
class ChosenRange:
    """Items ``[first, end)`` of a sequence, which run in that many parts."""

    first: int
    end: int
    num_parts: int


def choose_parts(as_is_us: float, numbers: Iterable[int], price: Callable[[int], float]) -> Choice:
    """Return the number of parts that costs least; the search ends at the first that costs more.

    Args:
        as_is_us: in one part.
        numbers: of parts, ascending.
        price: microseconds by number of parts.

    Source: Lancet (arXiv:2404.19429), section 5; that the search ends early, its code.
    """
    best, last_us = Choice(1, as_is_us), float("inf")
    for number in numbers:
        cost_us = price(number)
        if cost_us > last_us:
            break
        last_us = cost_us
        if cost_us < best.cost_us:
            best = Choice(number, cost_us)
    return best


def choose_ranges(
    num_items: int, *, max_items: int, choose: Callable[[int, int], Choice]
) -> list[ChosenRange]:
    """Return the ranges that run in parts, so that the whole sequence costs least.

    ``T(n) = min over i of T(i) + P(i, n)``, with ``n - i`` at most ``max_items``. Of equal ones the
    shortest range wins.

    Args:
        num_items: of the sequence.
        max_items: of a range.
        choose: the best number of parts of items ``[i, n)``, and the cost.

    Source: Lancet (arXiv:2404.19429), section 5.
    """
    costs_us = [0.0]
    last: list[ChosenRange] = []
    for end in range(1, num_items + 1):
        best_us, best = float("inf"), ChosenRange(end - 1, end, 1)
        for first in range(end - 1, max(-1, end - max_items - 1), -1):
            choice = choose(first, end)
            if costs_us[first] + choice.cost_us < best_us:
                best_us = costs_us[first] + choice.cost_us
                best = ChosenRange(first, end, choice.num_parts)
        costs_us.append(best_us)
        last.append(best)
    chosen: list[ChosenRange] = []
    end = num_items
    while end > 0:
        chosen.append(last[end - 1])
        end = last[end - 1].first
    return [each for each in reversed(chosen) if each.num_parts > 1]
