"""The weight-gradient pass's decisions for one graph, within its memory, and what they change."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from torch import fx

from halley.compiler.graph_analysis import GraphAnalysis, NodeKind, is_gemm, module_of
from halley.compiler.graph_memory import LiveBytes
from halley.compiler.node_cost import NodeCost, operations
from halley.compiler.partition.choose import RangeReport
from halley.compiler.sizes import Sizes
from halley.compiler.wgrad.movable_nodes import Unit, assign, find_units, label
from halley.compiler.wgrad.order import build_order, place_reductions
from halley.core.timeline import Span, exposed_us
from halley.cost.simulate import (
    NO_CONTENTION,
    Contention,
    GraphTime,
    Operation,
    graph_spans,
    time_of,
)


@final
class Headroom:
    """Live bytes over the order of a graph, its units moved behind all-to-alls one after another.

    A gradient that runs later holds its operands longer, and has its own result later; what counts
    is where the bytes come near the limit, mostly at the beginning of backward. Further down, where
    activations are gone, gradients may be late for free.

    The order that comes out differs in small things (casts that follow their gradient, waits that
    come late), so that its peak is counted again.

    Args:
        analysis: of the graph.
        live: of it.
        units: that may move.
        all_to_alls: indices of nodes, ascending.
        limit: bytes alive at most.
    """

    def __init__(
        self,
        analysis: GraphAnalysis,
        live: LiveBytes,
        *,
        units: Sequence[Unit],
        all_to_alls: Sequence[int],
        limit: float,
    ) -> None:
        num_nodes = len(analysis.nodes)
        self._live = live
        self._units = units
        self._all_to_alls = all_to_alls
        self._limit = limit
        self._is_input = [kind is NodeKind.INPUT for kind in analysis.kinds]
        self._place = list(range(num_nodes))
        self._alive = live.alive(self._place)
        # Behind each all-to-all: bytes that units make and let go, and the most more at once.
        self._steps: dict[int, list[tuple[int, int]]] = {}
        self._working = [0] * num_nodes
        self._reads: list[list[int]] = [[] for _ in analysis.nodes]  # buffers that each node reads
        for buffer, readers in enumerate(live.readers):
            for reader in readers:
                self._reads[reader].append(buffer)

    def take(self, ats: Sequence[int], window: int) -> bool:
        """Move units behind an all-to-all if live bytes stay within the limit.

        Args:
            ats: indices of units.
            window: position of the all-to-all among all.

        Returns:
            Whether they are there now.
        """
        start = self._all_to_alls[window]
        nodes = [node for at in ats for node in self._units[at].nodes]
        touched = {buffer for node in nodes for buffer in self._reads[node]} | set(nodes)
        buffers = [buffer for buffer in touched if self._live.num_bytes[buffer]]
        before = {buffer: self._span(buffer) for buffer in buffers}
        places = [self._place[node] for node in nodes]
        for node in nodes:
            self._place[node] = start
        after = {buffer: self._span(buffer) for buffer in buffers}
        self._add(before, -1)
        self._add(after, 1)
        made = sum(self._live.num_bytes[node] for node in nodes)
        freed = sum(self._live.num_bytes[each] for each in buffers if after[each][1] == start + 1)
        self._steps.setdefault(start, []).append((made, freed))
        self._working[start] = _most(self._steps[start])
        grown = [
            self._alive[at] + self._working[at]
            for buffer, (first, end) in after.items()
            for at in range(first, end)
            if not before[buffer][0] <= at < before[buffer][1]
        ]
        if max(self._alive[start] + self._working[start], *grown, 0) <= self._limit:
            return True
        self._steps[start].pop()
        self._working[start] = _most(self._steps[start])
        self._add(after, -1)
        self._add(before, 1)
        for node, place in zip(nodes, places, strict=True):
            self._place[node] = place
        return False

    def _span(self, buffer: int) -> tuple[int, int]:
        """Return the positions ``[first, end)`` at which a buffer is alive.

        What a moved node makes counts from behind its all-to-all on, and before in ``_working``.
        """
        made = 0 if self._is_input[buffer] else self._place[buffer]
        first = made + (self._place[buffer] != buffer)
        last = max((self._place[reader] for reader in self._live.readers[buffer]), default=made)
        return first, max(first, last + 1)

    def _add(self, spans: dict[int, tuple[int, int]], sign: int) -> None:
        for buffer, (first, end) in spans.items():
            change = sign * self._live.num_bytes[buffer]
            for at in range(first, end):
                self._alive[at] += change


def _most(steps: Sequence[tuple[int, int]]) -> int:
    """Return the most bytes beyond the first's, of steps that make some and then let some go."""
    most = grown = 0
    for made, freed in steps:
        most = max(most, grown + made)
        grown += made - freed
    return most


_MAX_TRIES = 8  # each allows as much less as the last was too high


@dataclass(frozen=True, kw_only=True)
class OrderReport:
    """What an order of a graph does, as predicted.

    Attributes:
        windows: names of the matrix products behind each all-to-all, by name of that.
        modules: where these are in the model, as ``module_of`` says it, by name.
        time_before, time_after: of the graph.
        peak_before, peak_after: bytes alive at the worst moment.
        spans_before, spans_after: when each node runs.
        ranges: that run in parts.
        skipped: why others do not.
        predicted: operations whose time nobody has measured, by their keys in profiles.
        sm_margins: multiprocessors that dense and grouped products leave free beside collectives.
        planning_s, measuring_s: what the passes took: to plan, and to measure what they did not
            know yet.
    """

    windows: dict[str, tuple[str, ...]]
    time_before: GraphTime
    time_after: GraphTime
    peak_before: int
    peak_after: int
    modules: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    spans_before: tuple[Span, ...] = field(default=(), repr=False)
    spans_after: tuple[Span, ...] = field(default=(), repr=False)
    ranges: tuple[RangeReport, ...] = ()
    skipped: tuple[str, ...] = ()
    predicted: tuple[str, ...] = ()
    sm_margins: tuple[int, int] = (0, 0)
    planning_s: float = 0.0
    measuring_s: float = 0.0


def plan_wgrad(
    analysis: GraphAnalysis,
    *,
    cost: NodeCost,
    sizes: Sizes,
    max_bytes: float,
    contention: Contention = NO_CONTENTION,
    inside: Collection[fx.Node] = frozenset(),
    gemms_alone: bool = False,
) -> list[int]:
    """Return the order of the weight-gradient pass; in forward, what joins parts moves, too.

    Args:
        analysis: of the graph.
        cost: microseconds of a node.
        sizes: of what nodes return.
        max_bytes: that may be alive.
        contention: of computation and communication.
        inside: nodes whose results never come to memory, as of ``LiveBytes``.
        gemms_alone: as of ``find_units``.

    Contract: the same nodes in another order, one that is legal. All-to-alls, gathers and fused
    operators keep their order. Peak of live bytes at most ``max_bytes``, or as before.
    """
    all_to_alls = analysis.find_collectives("all_to_all")
    identity = list(range(len(analysis.nodes)))
    if not all_to_alls:
        return identity
    works = operations(analysis, cost)
    labels = label(analysis, all_to_alls)
    units = find_units(analysis, labels, cost=cost, gemms_alone=gemms_alone)
    # In microseconds of computation as it is alone: so much runs behind an all-to-all.
    stretch = contention.comm / contention.compute
    times_us = [time_us * stretch for time_us in _exposed_us(works, units, all_to_alls)]
    # Inductor computes these where what they read is made. What reads nothing, such as zeros for an
    # embedding's gradient, would only take memory.
    in_units = {index for unit in units for index in unit.nodes}
    movable = [index for index in labels if index not in in_units and analysis.needs[index]]
    early = sorted(movable) if gemms_alone else []
    live = LiveBytes(analysis, sizes, inside=inside)
    allowed = max_bytes
    for _ in range(_MAX_TRIES):
        capacity = Headroom(analysis, live, units=units, all_to_alls=all_to_alls, limit=allowed)
        assignment = assign(units, times_us, fits=capacity.take)
        windows = dict(zip(all_to_alls, assignment.windows, strict=True))
        order = build_order(analysis, units, windows, early=early)
        order = place_reductions(analysis, works, order)
        peak = live.peak(order)[0]
        if peak <= max_bytes:
            return order
        allowed -= peak - max_bytes
    return identity


def _exposed_us(
    works: Sequence[Operation], units: Sequence[Unit], all_to_alls: Sequence[int]
) -> list[float]:
    """Return for how long nothing runs beside each all-to-all that stays where it is."""
    moved = {index for unit in units for index in unit.nodes}
    stays = [
        replace(work, duration_us=0.0) if index in moved else work
        for index, work in enumerate(works)
    ]
    spans = graph_spans(stays, range(len(stays)))
    compute = [span for span in spans if span.stream == "compute"]
    own = {span.name: span for span in spans if span.stream == "comm"}
    found = [own.get(works[index].name) for index in all_to_alls]
    return [0.0 if span is None else exposed_us([span], compute) for span in found]


def report_order(
    analysis: GraphAnalysis,
    order: Sequence[int],
    *,
    cost: NodeCost,
    sizes: Sizes,
    contention: Contention = NO_CONTENTION,
    inside: Collection[fx.Node] = frozenset(),
) -> OrderReport:
    """Return what an order does to a graph.

    Args:
        analysis: of the graph as it was.
        order: of all of its nodes.
        cost: microseconds of a node.
        sizes: of what nodes return.
        contention: of computation and communication.
        inside: nodes whose results never come to memory, as of ``LiveBytes``.
    """
    works, live = operations(analysis, cost), LiveBytes(analysis, sizes, inside=inside)
    identity = range(len(analysis.nodes))
    shown = [analysis.nodes[index] for index in analysis.find_collectives("all_to_all")]
    shown += filter(is_gemm, analysis.nodes)
    before, after = (graph_spans(works, each, contention) for each in (identity, order))
    return OrderReport(
        windows=hidden_gemms(analysis, order),
        modules={node.name: module_of(node) for node in shown},
        time_before=time_of(before),
        time_after=time_of(after),
        peak_before=live.peak(identity)[0],
        peak_after=live.peak(order)[0],
        spans_before=tuple(before),
        spans_after=tuple(after),
    )


def hidden_gemms(analysis: GraphAnalysis, order: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Return the matrix products between start and wait of each all-to-all, by names."""
    found: dict[str, tuple[str, ...]] = {}
    place = {index: at for at, index in enumerate(order)}
    for start in analysis.find_collectives("all_to_all"):
        ends = [place[wait] for wait in analysis.find_waits(start)]
        between = order[place[start] + 1 : min(ends, default=len(order))]
        nodes = [analysis.nodes[index] for index in between]
        found[analysis.nodes[start].name] = tuple(node.name for node in nodes if is_gemm(node))
    return found
