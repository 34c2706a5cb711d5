"""Plans of the partition pass on the whole graph: within memory, and no slower than without."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence

from torch import fx

from halley.compiler.graph_analysis import GraphAnalysis
from halley.compiler.graph_memory import LiveBytes
from halley.compiler.partition.choose import RANGE, PartitionPlan
from halley.compiler.sizes import Sizes


_MIN_GAIN = 0.05  # of forward's time: as much as predictions of it err by
Divide = Callable[[fx.Graph, Iterable[Sequence[int]]], None]


def fit_memory(
    graph: fx.Graph,
    plan: PartitionPlan,
    divide: Divide,
    *,
    sizes: Sizes,
    max_bytes: float,
    inside: Callable[[fx.Graph], Collection[fx.Node]] = lambda graph: (),
) -> PartitionPlan:
    """Return a plan without the ranges at which a graph's live bytes would rise too high.

    Parts of what backward wants live beside the whole while they are put together, and several
    parts are on their way at once.

    Args:
        graph: of forward; copies of it are divided.
        plan: of the graph.
        divide: runs ranges of a graph in parts, as ``partition`` does.
        sizes: of what nodes return.
        max_bytes: that may be alive.
        inside: finds the nodes whose results never come to memory, as of ``LiveBytes``.
    """
    while plan.ranges:
        copy = _divided(graph, plan, divide)
        alive = _alive(copy, sizes, inside(copy))
        too_high: set[int] = set()
        latest = 0
        for node, num_bytes in zip(copy.nodes, alive, strict=True):
            latest = node.meta.get(RANGE, latest)
            if num_bytes > max_bytes:
                too_high.add(latest)
        if not too_high:
            break
        plan = _without(plan, too_high)
    return plan


def fit_time(
    graph: fx.Graph,
    plan: PartitionPlan,
    divide: Divide,
    time_us: Callable[[fx.Graph], float],
) -> PartitionPlan:
    """Return the plan if the whole graph is clearly faster by it, else one without ranges.

    A range is priced alone, and its merges as if all of them were hidden; the whole tells. Parts
    that gain less than predictions err by may as well lose.

    Args:
        graph: of forward; a copy of it is divided.
        plan: of the graph.
        divide: runs ranges of a graph in parts, as ``partition`` does.
        time_us: predicts a graph in the order that it will get.
    """
    if not plan.ranges:
        return plan
    whole_us, parts_us = time_us(graph), time_us(_divided(graph, plan, divide))
    if parts_us < (1 - _MIN_GAIN) * whole_us:
        return plan
    reasons = [
        f"{report.exchanges[0]} stays whole: with all ranges in parts forward would take "
        f"{parts_us / 1e3:.2f} ms, and {whole_us / 1e3:.2f} without: "
        f"{_MIN_GAIN:.0%} less is asked for"
        for report in plan.reports
    ]
    return PartitionPlan(skipped=(*plan.skipped, *reasons))


def _divided(graph: fx.Graph, plan: PartitionPlan, divide: Divide) -> fx.Graph:
    copy = fx.Graph(owning_module=graph.owning_module)
    copy.output(copy.graph_copy(graph, {}))
    divide(copy, plan.ranges)
    return copy


def _alive(graph: fx.Graph, sizes: Sizes, inside: Collection[fx.Node]) -> list[int]:
    analysis = GraphAnalysis(graph)
    return LiveBytes(analysis, sizes, inside=inside).alive(range(len(analysis.nodes)))


def _without(plan: PartitionPlan, dropped: Collection[int]) -> PartitionPlan:
    kept = [at for at in range(len(plan.ranges)) if at not in dropped]
    reasons = [
        f"{plan.reports[at].exchanges[0]} stays whole: its parts would hold too much memory"
        for at in sorted(dropped)
    ]
    return dataclasses.replace(
        plan,
        ranges=tuple(plan.ranges[at] for at in kept),
        reports=tuple(plan.reports[at] for at in kept),
        skipped=(*plan.skipped, *reasons),
    )
