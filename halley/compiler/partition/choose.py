"""The partition pass: ranges of forward around MoE layers become pipelines of parts of the batch.

Computation of one part runs while the all-to-all of another travels. Which ranges, and in how many
parts, is what a simulation of each finds fastest.

Source: Lancet (arXiv:2404.19429), section 5.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast, final

import torch
from torch import fx

from halley.compiler.graph_analysis import GraphAnalysis
from halley.compiler.graph_collectives import collective_kind
from halley.compiler.graph_memory import LiveBytes
from halley.compiler.node_cost import NodeCost
from halley.compiler.options import MAX_PARTS
from halley.compiler.partition.axes import BatchFlow, Refusal, Rule, find_axes
from halley.compiler.partition.divide import divide
from halley.compiler.partition.pipeline_cost import PipelineCost
from halley.compiler.partition.ranges import (
    Choice,
    ChosenRange,
    choose_parts,
    choose_ranges,
    group_nodes,
    has_exchange,
)
from halley.compiler.partition.region import Region, find_region
from halley.compiler.partition.rules import all_rules
from halley.compiler.sizes import Sizes
from halley.cost.simulate import NO_CONTENTION, Contention


# Lancet has one layer. With two, the computation between them hides as well; with more, little is
# gained that the search does not take.
LAYERS_A_RANGE = 2
RANGE = "halley_range"  # in a node's meta: the range of a plan that it comes from


@dataclass(frozen=True, kw_only=True)
class RangeReport:
    """A range that runs in parts, with its predicted microseconds.

    Attributes:
        first, last: names of its first and last node.
        exchanges: names of its all-to-alls, as they were.
    """

    first: str
    last: str
    exchanges: tuple[str, ...]
    num_parts: int
    before_us: float
    after_us: float


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """What the partition pass decides.

    Attributes:
        ranges: indices of nodes, ``[first, end)``, and numbers of parts; ascending.
        reports: of the ranges.
        skipped: for each layer that no range holds, and for each range that could not reach
            further, why.
    """

    ranges: tuple[tuple[int, int, int], ...] = ()
    reports: tuple[RangeReport, ...] = ()
    skipped: tuple[str, ...] = ()


def read_plan(values: Mapping[str, Any]) -> PartitionPlan:
    """Return the plan that ``dataclasses.asdict`` made these of, through JSON or not."""
    reports: list[dict[str, Any]] = values["reports"]
    for report in reports:
        report["exchanges"] = tuple(report["exchanges"])
    return PartitionPlan(
        ranges=tuple((first, end, num_parts) for first, end, num_parts in values["ranges"]),
        reports=tuple(RangeReport(**report) for report in reports),
        skipped=tuple(values["skipped"]),
    )


def partition(
    graph: fx.Graph,
    ranges: Iterable[Sequence[int]],
    *,
    batch_inputs: Sequence[str],
    rules: Mapping[str, Rule],
    sizes: Sizes,
) -> None:
    """Run ranges of a graph in parts.

    Args:
        graph: changed; ``divide`` has the contract.
        ranges: as in ``PartitionPlan``.
        batch_inputs: names of inputs that have the batch.
        rules: a user's own.
        sizes: learns which sizes are of parts.

    Raises:
        RuntimeError: a range cannot run in parts.
    """
    flow = find_axes(graph, batch_inputs, all_rules(rules))
    nodes = list(graph.nodes)
    regions: list[tuple[Region, int]] = []
    for at, (first, end, num_parts) in enumerate(ranges):
        for node in nodes[first:end]:
            node.meta[RANGE] = at
        region = find_region(flow, nodes[first:end])
        if isinstance(region, str):
            raise RuntimeError(f"a planned range cannot run in parts: {region}")
        regions.append((region, num_parts))
    divide(graph, flow, regions, sizes=sizes)


def plan_partition(
    graph: fx.Graph,
    *,
    batch_inputs: Sequence[str],
    rules: Mapping[str, Rule],
    cost: NodeCost,
    sizes: Sizes,
    num_parts: int = 0,
    contention: Contention = NO_CONTENTION,
) -> PartitionPlan:
    """Return the ranges that are predicted to be fastest in parts.

    Args:
        graph: of forward.
        batch_inputs: names of inputs that have the batch.
        rules: a user's own.
        cost: microseconds of a node.
        sizes: of what nodes return.
        num_parts: runs all that can be in as many parts, fast or not; 0 chooses.
        contention: of computation and communication.
    """
    flow = find_axes(graph, batch_inputs, all_rules(rules))
    price = PipelineCost(flow, cost=cost, sizes=sizes, contention=contention)
    return _Planner(graph, flow, price, num_parts).plan()


@final
class _Planner:
    """Prices ranges of a graph's groups, those that are alike once."""

    def __init__(
        self, graph: fx.Graph, flow: BatchFlow, price: PipelineCost, num_parts: int
    ) -> None:
        self._flow = flow
        self._price = price
        self._nodes = list(graph.nodes)
        self._known: dict[str, tuple[Choice, float]] = {}
        self._is_given = num_parts > 0
        wanted = [num_parts] if num_parts else range(2, MAX_PARTS + 1)
        self._numbers = [number for number in wanted if flow.batch_size % number == 0]
        self._groups = group_nodes(flow, self._nodes, price.as_is)
        self._layers = [
            at for at, group in enumerate(self._groups) if has_exchange(self._nodes, group)
        ]

    def plan(self) -> PartitionPlan:
        steps = [after - before for before, after in pairwise(self._layers)]
        max_items = LAYERS_A_RANGE * max(steps, default=len(self._groups))
        chosen = choose_ranges(
            len(self._groups),
            max_items=max_items,
            choose=self._rate,
        )
        ranges = ((*self._bounds(each.first, each.end), each.num_parts) for each in chosen)
        return PartitionPlan(
            ranges=tuple(ranges),
            reports=tuple(map(self._report, chosen)),
            skipped=tuple(dict.fromkeys(self._explain(chosen, max_items))),
        )

    def _bounds(self, first: int, end: int) -> tuple[int, int]:
        """Return the indices of the nodes of groups ``[first, end)``."""
        return self._groups[first][0], self._groups[end - 1][1]

    def _rate(self, first: int, end: int) -> Choice:
        """Return the choice; one in a given number of parts costs nothing, so that all are."""
        choice, _ = self._choose(first, end)
        return Choice(choice.num_parts, 0.0) if self._is_given and choice.num_parts > 1 else choice

    def _choose(self, first: int, end: int) -> tuple[Choice, float]:
        """Return the best number of parts of groups ``[first, end)``, and the time in one."""
        start, stop = self._bounds(first, end)
        key = self._signature(start, stop)
        if key not in self._known:
            nodes = self._nodes[start:stop]
            as_is_us = self._price.as_is(nodes)
            region = find_region(self._flow, nodes)
            choice = Choice(1, as_is_us)
            if isinstance(region, Region) and self._is_given and self._numbers:
                number = self._numbers[0]
                choice = Choice(number, self._price.in_parts(region, number, defers_merges=True))
            elif isinstance(region, Region):
                in_parts = partial(self._price.in_parts, region, defers_merges=True)
                choice = choose_parts(as_is_us, self._numbers, in_parts)
            self._known[key] = choice, as_is_us
        return self._known[key]

    def _signature(self, start: int, stop: int) -> str:
        """Return what the price of a range depends on: the layers of a model are alike."""
        position = {node: at for at, node in enumerate(self._nodes[start:stop])}
        lines: list[str] = []
        for node, at in position.items():
            sources = [
                f"{at - position[source]}" if source in position else self._describe(source)
                for source in node.all_input_nodes
            ]
            leaves = any(user not in position for user in node.users)
            numbers = [each for each in node.args if isinstance(each, int | float | bool)]
            lines.append(f"{self._describe(node)} {sources} {numbers} {leaves}")
        return "\n".join(lines)

    def _describe(self, node: fx.Node) -> str:
        axes = self._flow.axes[node]
        kinds = [
            f"{type(axis).__name__}{getattr(axis, 'dim', '')}"
            for axis in (axes if isinstance(axes, tuple) else (axes,))
        ]
        refused = isinstance(self._flow.calls.get(node), Refusal)
        target = str(node.target) if node.op == "call_function" else node.op
        return f"{target} {self._shapes(node.meta.get('val'))} {kinds} {refused}"

    def _shapes(self, value: object) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{self._price.sizes.shape(value)}"
        if isinstance(value, tuple | list):
            return " ".join(map(self._shapes, cast(Sequence[object], value)))
        return ""

    def _report(self, chosen: ChosenRange) -> RangeReport:
        first, end = self._bounds(chosen.first, chosen.end)
        choice, as_is_us = self._choose(chosen.first, chosen.end)
        nodes = self._nodes[first:end]
        return RangeReport(
            first=nodes[0].name,
            last=nodes[-1].name,
            exchanges=tuple(n.name for n in nodes if collective_kind(n) == "all_to_all"),
            num_parts=choice.num_parts,
            before_us=as_is_us,
            after_us=choice.cost_us,
        )

    def _explain(self, chosen: Sequence[ChosenRange], max_items: int) -> Iterator[str]:
        """Yield why layers are in no range, and why ranges end where they do."""
        if not self._numbers and self._layers:
            wanted = "of the number that is given" if self._is_given else f"of 2 to {MAX_PARTS}"
            yield f"a batch of {self._flow.batch_size} has no equal parts {wanted}"
            return
        for layer in self._layers:
            found = next((each for each in chosen if each.first <= layer < each.end), None)
            nodes = self._nodes[slice(*self._groups[layer])]
            name = next(node.name for node in nodes if collective_kind(node) == "all_to_all")
            if found is None:
                region = find_region(self._flow, nodes)
                slower = "no range around it is predicted to be faster in parts"
                yield f"{name} stays whole: {region if isinstance(region, str) else slower}"
                continue
            for first, end, where in (
                (found.first - 1, found.end, "begins no earlier"),
                (found.first, found.end + 1, "ends no later"),
            ):
                if first < 0 or end > len(self._groups) or end - first > max_items:
                    continue
                start, stop = self._bounds(first, end)
                region = find_region(self._flow, self._nodes[start:stop])
                if isinstance(region, str):
                    yield f"the range around {name} {where}: {region}"


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
