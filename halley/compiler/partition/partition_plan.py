"""Plan the partition pass, and apply a plan: which segments run in how many microbatches.

The plan is the fastest one in simulation. Its segments must also fit in memory, and the whole
forward graph must gain enough.

Source: Lancet (arXiv:2404.19429), section 5.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, cast, final

import torch
from torch import fx

from halley.compiler.graph_analysis import GraphAnalysis
from halley.compiler.graph_collectives import collective_kind
from halley.compiler.graph_memory import LiveBytes
from halley.compiler.node_cost import NodeCost
from halley.compiler.options import MAX_PARTS
from halley.compiler.partition.divide import divide
from halley.compiler.partition.pipeline_cost import PipelineCost
from halley.compiler.partition.propagation import BatchFlow, Refusal, Rule, propagate_batch
from halley.compiler.partition.rules import all_rules
from halley.compiler.partition.segment import Segment, find_segment
from halley.compiler.partition.segment_search import (
    Choice,
    ChosenSegment,
    choose_num_parts,
    choose_segments,
    group_nodes,
    has_exchange,
)
from halley.compiler.sizes import Sizes
from halley.cost.simulate import NO_CONTENTION, Contention


# Lancet has one layer per segment. With two, the computation between them overlaps too; more gain
# little and make the search longer.
LAYERS_PER_SEGMENT = 2
_SEGMENT = "halley_segment"  # key in a node's meta: the index of its segment in the plan
_MIN_GAIN = 0.05  # of forward's time; predictions err by as much


@dataclass(frozen=True, kw_only=True)
class SegmentReport:
    """A segment that runs in microbatches, with predicted times in microseconds.

    Attributes:
        first, last: names of its first and last node.
        exchanges: names of its all-to-alls before the rewrite.
        num_parts: number of microbatches.
        before_us, after_us: time on the full batch, and in microbatches.
    """

    first: str
    last: str
    exchanges: tuple[str, ...]
    num_parts: int
    before_us: float
    after_us: float


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """The decisions of the partition pass.

    Attributes:
        ranges: for each segment the indices ``[first, end)`` of its nodes and its number of
            microbatches, ascending.
        reports: one report per segment.
        skipped: reasons why layers run on the full batch, and why segments are not longer.
    """

    ranges: tuple[tuple[int, int, int], ...] = ()
    reports: tuple[SegmentReport, ...] = ()
    skipped: tuple[str, ...] = ()


def read_plan(values: Mapping[str, Any]) -> PartitionPlan:
    """Return a plan from the result of ``dataclasses.asdict``, which may have been JSON."""
    reports: list[dict[str, Any]] = values["reports"]
    for report in reports:
        report["exchanges"] = tuple(report["exchanges"])
    return PartitionPlan(
        ranges=tuple((first, end, num_parts) for first, end, num_parts in values["ranges"]),
        reports=tuple(SegmentReport(**report) for report in reports),
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
    """Run segments of a graph in microbatches, in place; ``divide`` states the contract.

    Args:
        graph: graph to change.
        ranges: as in ``PartitionPlan``.
        batch_inputs: names of inputs with the batch as dimension 0.
        rules: the user's own rules.
        sizes: learns which symbolic sizes belong to a microbatch.

    Raises:
        RuntimeError: a segment cannot run in microbatches.
    """
    flow = propagate_batch(graph, batch_inputs, all_rules(rules))
    nodes = list(graph.nodes)
    segments: list[tuple[Segment, int]] = []
    for index, (first, end, num_parts) in enumerate(ranges):
        for node in nodes[first:end]:  # copies inherit it, so ``fit_memory`` finds the segment
            node.meta[_SEGMENT] = index
        segment = find_segment(flow, nodes[first:end])
        if isinstance(segment, str):
            raise RuntimeError(f"a planned segment cannot run in microbatches: {segment}")
        segments.append((segment, num_parts))
    divide(graph, flow, segments, sizes=sizes)


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
    """Return the segments and numbers of microbatches with the least predicted time.

    Args:
        graph: a forward graph.
        batch_inputs: names of inputs with the batch as dimension 0.
        rules: the user's own rules.
        cost: microseconds of a node.
        sizes: shapes and bytes of results.
        num_parts: use this number for all possible segments, even if that is slower; 0 chooses.
        contention: how computation and communication slow each other down.
    """
    flow = propagate_batch(graph, batch_inputs, all_rules(rules))
    price = PipelineCost(flow, cost=cost, sizes=sizes, contention=contention)
    return _Planner(graph, flow, price, num_parts).plan()


@final
class _Planner:
    """Searches the segments of one graph. Segments that are alike are priced once."""

    def __init__(
        self, graph: fx.Graph, flow: BatchFlow, price: PipelineCost, num_parts: int
    ) -> None:
        self._flow = flow
        self._price = price
        self._nodes = list(graph.nodes)
        self._known: dict[str, tuple[Choice, float]] = {}
        self._num_parts = num_parts
        wanted = [num_parts] if num_parts else range(2, MAX_PARTS + 1)
        self._numbers = [number for number in wanted if flow.batch_size % number == 0]
        self._groups = group_nodes(flow, self._nodes, price.full_batch_us)
        self._layers = [
            at for at, group in enumerate(self._groups) if has_exchange(self._nodes, group)
        ]
        steps = [after - before for before, after in pairwise(self._layers)]
        # A segment is at most as long as LAYERS_PER_SEGMENT layers, counted in groups.
        self._max_groups = LAYERS_PER_SEGMENT * max(steps, default=len(self._groups))

    def plan(self) -> PartitionPlan:
        chosen = choose_segments(
            len(self._groups), max_items=self._max_groups, choose=self._choose_for_search
        )
        ranges = ((*self._bounds(each.first, each.end), each.num_parts) for each in chosen)
        return PartitionPlan(
            ranges=tuple(ranges),
            reports=tuple(map(self._report, chosen)),
            skipped=tuple(dict.fromkeys(self._explain(chosen))),  # each reason once, in order
        )

    def _bounds(self, first: int, end: int) -> tuple[int, int]:
        """Return the indices of the nodes of groups ``[first, end)``."""
        return self._groups[first][0], self._groups[end - 1][1]

    def _choose_for_search(self, first: int, end: int) -> Choice:
        choice, _ = self._choose(first, end)
        # With a given number, segments cost nothing, so that the search takes all possible ones.
        is_free = self._num_parts and choice.num_parts > 1
        return Choice(choice.num_parts, 0.0) if is_free else choice

    def _choose(self, first: int, end: int) -> tuple[Choice, float]:
        """Return the best choice for groups ``[first, end)``, and their time on the full batch."""
        start, stop = self._bounds(first, end)
        key = self._signature(start, stop)
        if key not in self._known:
            nodes = self._nodes[start:stop]
            full_batch_us = self._price.full_batch_us(nodes)
            segment = find_segment(self._flow, nodes)
            choice = Choice(1, full_batch_us)
            if isinstance(segment, Segment):
                # A given number is taken even if it is slower than the full batch.
                limit_us = float("inf") if self._num_parts and self._numbers else full_batch_us
                time_us = partial(self._price.pipeline_us, segment, defers_concats=True)
                choice = choose_num_parts(limit_us, self._numbers, time_us)
            self._known[key] = choice, full_batch_us
        return self._known[key]

    def _signature(self, start: int, stop: int) -> str:
        """Return all that the times of nodes depend on: equal for the like layers of a model."""
        position = {node: at for at, node in enumerate(self._nodes[start:stop])}
        lines: list[str] = []
        for node, at in position.items():
            sources = [
                f"{at - position[source]}" if source in position else self._describe(source)
                for source in node.all_input_nodes
            ]
            leaves = any(user not in position for user in node.users)  # needs a concat
            numbers = [each for each in node.args if isinstance(each, int | float | bool)]
            lines.append(f"{self._describe(node)} {sources} {numbers} {leaves}")
        return "\n".join(lines)

    def _describe(self, node: fx.Node) -> str:
        axes = self._flow.axes[node]
        kinds = [
            f"{type(axis).__name__}{getattr(axis, 'dim', '')}"
            for axis in (axes if isinstance(axes, tuple) else (axes,))
        ]
        is_refused = isinstance(self._flow.calls.get(node), Refusal)
        target = str(node.target) if node.op == "call_function" else node.op
        return f"{target} {self._shapes(node.meta.get('val'))} {kinds} {is_refused}"

    def _shapes(self, value: object) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{self._price.sizes.shape(value)}"
        if isinstance(value, tuple | list):
            return " ".join(map(self._shapes, cast(Sequence[object], value)))
        return ""

    def _report(self, chosen: ChosenSegment) -> SegmentReport:
        choice, full_batch_us = self._choose(chosen.first, chosen.end)
        nodes = self._nodes[slice(*self._bounds(chosen.first, chosen.end))]
        return SegmentReport(
            first=nodes[0].name,
            last=nodes[-1].name,
            exchanges=tuple(n.name for n in nodes if collective_kind(n) == "all_to_all"),
            num_parts=choice.num_parts,
            before_us=full_batch_us,
            after_us=choice.cost_us,
        )

    def _explain(self, chosen: Sequence[ChosenSegment]) -> Iterator[str]:
        """Yield why layers run on the full batch, and why segments are not longer."""
        if not self._numbers and self._layers:
            wanted = self._num_parts or f"2 to {MAX_PARTS}"
            yield f"a batch of {self._flow.batch_size} has no {wanted} equal microbatches"
            return
        for layer in self._layers:
            found = next((each for each in chosen if each.first <= layer < each.end), None)
            nodes = self._nodes[slice(*self._groups[layer])]
            name = next(node.name for node in nodes if collective_kind(node) == "all_to_all")
            if found is None:
                segment = find_segment(self._flow, nodes)
                slower = "no segment around it is predicted to be faster in microbatches"
                yield _full_batch(name, segment if isinstance(segment, str) else slower)
                continue
            for first, end, what in (
                (found.first - 1, found.end, "begin earlier"),
                (found.first, found.end + 1, "end later"),
            ):
                if first < 0 or end > len(self._groups) or end - first > self._max_groups:
                    continue
                segment = find_segment(self._flow, self._nodes[slice(*self._bounds(first, end))])
                if isinstance(segment, str):
                    yield f"the segment around {name} cannot {what}: {segment}"


Divide: TypeAlias = Callable[[fx.Graph, Iterable[Sequence[int]]], None]


def fit_memory(
    graph: fx.Graph,
    plan: PartitionPlan,
    divide: Divide,
    *,
    sizes: Sizes,
    max_bytes: float,
    inside: Callable[[fx.Graph], Collection[fx.Node]] = lambda graph: (),
) -> PartitionPlan:
    """Return the plan without the segments that exceed a limit of live bytes.

    Several microbatches are in flight at once, and some results live next to the full-batch value
    while they are concatenated.

    Args:
        graph: a forward graph; only copies of it are changed.
        plan: plan of the graph.
        divide: applies ranges of a plan to a graph, as ``partition`` does.
        sizes: shapes and bytes of results.
        max_bytes: the limit.
        inside: finds the nodes of a graph whose results stay inside of a kernel.
    """
    while plan.ranges:
        copy = _divided(graph, plan, divide)
        analysis = GraphAnalysis(copy)
        live = LiveBytes(analysis, sizes, inside=inside(copy))
        too_large: set[int] = set()
        latest = 0  # a peak behind a segment is blamed on that segment
        for node, num_bytes in zip(copy.nodes, live.alive(range(len(copy.nodes))), strict=True):
            latest = node.meta.get(_SEGMENT, latest)
            if num_bytes > max_bytes:
                too_large.add(latest)
        if not too_large:
            break
        kept = [at for at in range(len(plan.ranges)) if at not in too_large]
        reason = "its microbatches would need too much memory"
        skipped = [_full_batch(plan.reports[at].exchanges[0], reason) for at in sorted(too_large)]
        plan = dataclasses.replace(
            plan,
            ranges=tuple(plan.ranges[at] for at in kept),
            reports=tuple(plan.reports[at] for at in kept),
            skipped=(*plan.skipped, *skipped),
        )
    return plan


def fit_time(
    graph: fx.Graph, plan: PartitionPlan, divide: Divide, time_us: Callable[[fx.Graph], float]
) -> PartitionPlan:
    """Return the plan if it makes the whole graph at least 5 % faster, else an empty one.

    The search priced each segment alone, and concats behind the pipeline as free. Only the time of
    the whole graph includes all effects, and a smaller gain may be an error of prediction.

    Args:
        graph: a forward graph; only a copy of it is changed.
        plan: plan of the graph.
        divide: applies ranges of a plan to a graph, as ``partition`` does.
        time_us: predicts a graph in the order that the passes will give it.
    """
    if not plan.ranges:
        return plan
    before_us, after_us = time_us(graph), time_us(_divided(graph, plan, divide))
    if after_us < (1 - _MIN_GAIN) * before_us:
        return plan
    reason = (
        f"all segments in microbatches would change the time of forward from {before_us / 1e3:.2f} "
        f"to {after_us / 1e3:.2f} ms, and a gain of {_MIN_GAIN:.0%} is required"
    )
    reasons = [_full_batch(report.exchanges[0], reason) for report in plan.reports]
    return PartitionPlan(skipped=(*plan.skipped, *reasons))


def _divided(graph: fx.Graph, plan: PartitionPlan, divide: Divide) -> fx.Graph:
    copy = fx.Graph(owning_module=graph.owning_module)
    copy.output(copy.graph_copy(graph, {}))
    divide(copy, plan.ranges)
    return copy


def _full_batch(name: str, reason: str) -> str:
    return f"{name} runs on the full batch: {reason}"
