"""Choose the segments of a graph and their numbers of microbatches by dynamic programming."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TypeAlias

from torch import fx

from halley.compiler.graph_collectives import collective_kind, is_wait
from halley.compiler.partition.propagation import Batch, BatchFlow


NodeRange: TypeAlias = tuple[int, int]  # [first, end), indices of nodes
_GROUPS_BETWEEN_LAYERS = 5


def group_nodes(
    flow: BatchFlow, nodes: Sequence[fx.Node], time_us: Callable[[Sequence[fx.Node]], float]
) -> list[NodeRange]:
    """Group the operators of a graph, in order, so that the search has few items.

    All nodes from the sorted rows of an MoE layer to its combined rows are one group, because no
    segment may begin or end there. The nodes between two layers form about five groups of equal
    time, as in Lancet's code.

    Args:
        flow: batch-dim propagation over the graph.
        nodes: all nodes of the graph.
        time_us: time of consecutive nodes.
    """
    ranges = _find_shortest(flow, nodes)
    times_us = [time_us(nodes[first:end]) for first, end in ranges]
    layers = [at for at, each in enumerate(ranges) if has_exchange(nodes, each)]
    gaps_us = [sum(times_us[a + 1 : b]) for a, b in pairwise(layers)]
    # The median ignores a layer that differs from the others.
    gap_us = median(gaps_us) if gaps_us else sum(times_us[: layers[0]]) if layers else 0.0
    groups: list[NodeRange] = []
    group_us = 0.0
    for at, (first, end) in enumerate(ranges):
        begins_group = at in layers or at - 1 in layers
        if groups and not begins_group and group_us < gap_us / _GROUPS_BETWEEN_LAYERS:
            groups[-1] = (groups[-1][0], end)
            group_us += times_us[at]
        else:
            groups.append((first, end))
            group_us = times_us[at]
    return groups


def has_exchange(nodes: Sequence[fx.Node], indices: NodeRange) -> bool:
    """Return whether an all-to-all is among a range of the nodes."""
    return any(collective_kind(node) == "all_to_all" for node in nodes[slice(*indices)])


def _find_shortest(flow: BatchFlow, nodes: Sequence[fx.Node]) -> list[NodeRange]:
    """Return the shortest ranges at whose ends a segment may begin or end."""
    first = next((at for at, node in enumerate(nodes) if node.op == "call_function"), 0)
    end = len(nodes) - 1  # the output
    position = {node: at for at, node in enumerate(nodes)}
    open_until = first
    cuts: list[int] = [first]
    for at in range(first, end):
        if at >= open_until and at > first:
            cuts.append(at)
        if _must_stay_in_segment(flow, nodes[at]):
            # The output of the graph saves values for backward and does not count as a reader.
            readers = (position[user] for user in nodes[at].users if user.op != "output")
            open_until = max(open_until, max(readers, default=at) + 1)
    return list(pairwise([*cuts, end])) if end > first else []


def _must_stay_in_segment(flow: BatchFlow, node: fx.Node) -> bool:
    """Return whether all readers of a value must be in the segment of the value.

    A full-batch value can be sliced for microbatches along a batch dimension only. That excludes
    sorted rows, their counts and indices, results of a collective that is still running, and
    tuples, of which only the items can be sliced.
    """
    axes = flow.axes.get(node)
    is_running = collective_kind(node) is not None and any(map(is_wait, node.users))
    is_tuple = isinstance(node.meta.get("val"), tuple | list)
    each = axes if isinstance(axes, tuple) else (axes,)
    can_be_sliced = all(axis is None or isinstance(axis, Batch) for axis in each)
    return is_running or is_tuple or not can_be_sliced


@dataclass(frozen=True)
class Choice:
    """A number of microbatches and the time with it; 1 is the full batch."""

    num_parts: int
    cost_us: float


@dataclass(frozen=True)
class ChosenSegment:
    """Items ``[first, end)`` of a sequence, which run in ``num_parts`` microbatches."""

    first: int
    end: int
    num_parts: int


def choose_num_parts(
    full_batch_us: float, numbers: Iterable[int], time_us: Callable[[int], float]
) -> Choice:
    """Return the number of microbatches that takes least time.

    The search ends at the first number that takes more time than the number before.

    Args:
        full_batch_us: time on the full batch.
        numbers: numbers of microbatches to try, ascending.
        time_us: time by number of microbatches.

    Source: Lancet (arXiv:2404.19429), section 5; the early end is in its code only.
    """
    best, last_us = Choice(1, full_batch_us), float("inf")
    for number in numbers:
        cost_us = time_us(number)
        if cost_us > last_us:
            break
        last_us = cost_us
        if cost_us < best.cost_us:
            best = Choice(number, cost_us)
    return best


def choose_segments(
    num_items: int, *, max_items: int, choose: Callable[[int, int], Choice]
) -> list[ChosenSegment]:
    """Return the segments to run in microbatches so that the whole sequence takes least time.

    With P(i, n) the least time of items ``[i, n)``, the least time of the first n items is
    ``T(n) = min over i of T(i) + P(i, n)``. Of equal times, the shortest segment wins.

    Args:
        num_items: length of the sequence.
        max_items: most items of a segment.
        choose: best number of microbatches of items ``[first, end)``, with its time.

    Source: Lancet (arXiv:2404.19429), section 5.
    """
    costs_us = [0.0]  # T(n) by n
    last: list[ChosenSegment] = []  # by n - 1, the last segment of the best division of n items
    for end in range(1, num_items + 1):
        best_us, best = float("inf"), ChosenSegment(end - 1, end, 1)
        # Short segments first: with ``<`` below, they win ties.
        for first in range(end - 1, max(-1, end - max_items - 1), -1):
            choice = choose(first, end)
            if costs_us[first] + choice.cost_us < best_us:
                best_us = costs_us[first] + choice.cost_us
                best = ChosenSegment(first, end, choice.num_parts)
        costs_us.append(best_us)
        last.append(best)
    chosen: list[ChosenSegment] = []
    end = num_items
    while end > 0:
        chosen.append(last[end - 1])
        end = last[end - 1].first
    return [each for each in reversed(chosen) if each.num_parts > 1]
