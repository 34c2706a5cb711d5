"""Which ranges of a sequence run in parts, and in how many: a dynamic programme over costs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from torch import fx

from halley.compiler.graph_collectives import collective_kind, is_wait
from halley.compiler.partition.axes import Axes, Batch, BatchFlow


Span = tuple[int, int]  # [first, end), indices of nodes
_GROUPS_BETWEEN_LAYERS = 5


def group_nodes(
    flow: BatchFlow, nodes: Sequence[fx.Node], time_us: Callable[[Sequence[fx.Node]], float]
) -> list[Span]:
    """Return the nodes that compute in groups, in order, so that a search has few of them.

    A layer's way from its sorted rows to its combined ones is one group: no range may begin or end
    inside. Between two layers there are about five, of equal time.

    Args:
        flow: of the graph.
        nodes: of the graph.
        time_us: of consecutive nodes.

    Source: Lancet's code; its groups are a fifth of the time between two layers as well.
    """
    spans = _whole_spans(flow, nodes)
    times_us = [time_us(nodes[first:end]) for first, end in spans]
    layers = [at for at, span in enumerate(spans) if has_exchange(nodes, span)]
    gaps_us = [sum(times_us[a + 1 : b]) for a, b in pairwise(layers)]
    gap_us = median(gaps_us) if gaps_us else sum(times_us[: layers[0]]) if layers else 0.0
    groups: list[Span] = []
    spent_us = 0.0
    for at, (first, end) in enumerate(spans):
        alone = at in layers or at - 1 in layers
        if groups and not alone and spent_us < gap_us / _GROUPS_BETWEEN_LAYERS:
            groups[-1] = (groups[-1][0], end)
            spent_us += times_us[at]
        else:
            groups.append((first, end))
            spent_us = times_us[at]
    return groups


def has_exchange(nodes: Sequence[fx.Node], span: Span) -> bool:
    """Return whether an all-to-all is among the nodes of a span."""
    return any(collective_kind(node) == "all_to_all" for node in nodes[span[0] : span[1]])


def _whole_spans(flow: BatchFlow, nodes: Sequence[fx.Node]) -> list[Span]:
    """Return the shortest spans between which a graph may be cut."""
    first = next((at for at, node in enumerate(nodes) if node.op == "call_function"), 0)
    end = len(nodes) - 1  # the output
    position = {node: at for at, node in enumerate(nodes)}
    open_until = first
    cuts: list[int] = [first]
    for at in range(first, end):
        if at >= open_until and at > first:
            cuts.append(at)
        node = nodes[at]
        if _must_stay_together(flow, node):
            last_use = max((position[user] for user in _readers(node)), default=at)
            open_until = max(open_until, last_use + 1)
    return list(pairwise([*cuts, end])) if end > first else []


def _must_stay_together(flow: BatchFlow, node: fx.Node) -> bool:
    """Return whether a result cannot be divided again: rows, their numbers, what is on its way.

    Nor can several results at once, but each of them.
    """
    axes: Axes = flow.axes.get(node)
    each = axes if isinstance(axes, tuple) else (axes,)
    started = collective_kind(node) is not None and any(map(is_wait, node.users))
    has_several = isinstance(node.meta.get("val"), tuple | list)
    undivided = any(axis is not None and not isinstance(axis, Batch) for axis in each)
    return started or has_several or undivided


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what reads a result, but for the output, which saves it for backward."""
    return (user for user in node.users if user.op != "output")


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
