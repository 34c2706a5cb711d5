"""From decisions to an order of a graph's nodes: units behind their all-to-alls, waits late."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import final

from halley.compiler.graph_analysis import GraphAnalysis, NodeKind, bits
from halley.compiler.wgrad.movable_nodes import Unit
from halley.cost.simulate import Operation, graph_spans


@final
class _Emitter:
    """Lists nodes, each after what it needs."""

    def __init__(self, analysis: GraphAnalysis) -> None:
        self.analysis = analysis
        self.order: list[int] = []
        self.mask = 0

    def emit(self, index: int) -> None:
        """List a node, before it all that it needs and that is not listed yet."""
        if self.mask >> index & 1:
            return
        for need in bits(self.analysis.ancestors[index] & ~self.mask):  # ascending is legal
            self._list(need)
        self._list(index)

    def emit_ready(self, indices: Iterable[int]) -> None:
        """List those of the nodes, ascending, that wait for none that is not listed."""
        for index in indices:
            if not self.mask >> index & 1 and not self.analysis.ancestors[index] & ~self.mask:
                self._list(index)

    def _list(self, index: int) -> None:
        self.order.append(index)
        self.mask |= 1 << index


def build_order(
    analysis: GraphAnalysis,
    units: Sequence[Unit],
    windows: Mapping[int, Sequence[int]],
    *,
    early: Sequence[int] = (),
) -> list[int]:
    """Return the nodes with units behind the start of their all-to-all.

    The rest keeps its order, but for waits and reductions: a wait comes right before what first
    reads its result, a reduction as soon as its gradient is there. What reads a moved unit follows
    it.

    Args:
        analysis: of the graph.
        units: what may move.
        windows: by index of an all-to-all's node, the units that run behind it, in order.
        early: nodes, ascending, that come as soon as what they need is there.
    """
    moved = sum(1 << node for ats in windows.values() for at in ats for node in units[at].nodes)
    reduced = sum(1 << index for index in analysis.find_collectives("reduce"))
    last = [index for index, above in enumerate(analysis.ancestors) if above & reduced]
    late = [index for index, above in enumerate(analysis.ancestors) if above & moved]
    late = [index for index in late if not moved >> index & 1 and index not in last]
    held = moved | sum(1 << index for index in (*last, *late))
    emitter = _Emitter(analysis)
    for index in analysis.find(NodeKind.INPUT):
        emitter.emit(index)
    for index, kind in enumerate(analysis.kinds):
        if held >> index & 1 or kind in (NodeKind.WAIT, NodeKind.OUTPUT):
            continue
        emitter.emit(index)
        for at in windows.get(index, ()):
            for node in units[at].nodes:
                emitter.emit(node)
        if index in windows:
            emitter.emit_ready(late)
        emitter.emit_ready(early)
    for index in (*late, *range(len(analysis.nodes))):
        if analysis.kinds[index] is not NodeKind.OUTPUT:
            emitter.emit(index)
    emitter.emit(len(analysis.nodes) - 1)
    return emitter.order


def place_reductions(
    analysis: GraphAnalysis, operations: Sequence[Operation], order: Sequence[int]
) -> list[int]:
    """Return the order with reductions of gradients in the gaps between all-to-alls.

    All-to-alls go first: computation waits for them. In the gap that follows one, until the next
    starts, go the reductions whose gradient is there by then, the longest that fits first. Those
    that fit nowhere go behind the last all-to-all.

    Args:
        analysis: of the graph.
        operations: the same nodes with their times.
        order: of all nodes.

    Source: Lancet's code, which simulates with reductions that take no time and fills the gaps.
    """
    reductions = [index for index in order if analysis.collectives[index] == "reduce"]
    all_to_alls = [index for index in order if analysis.collectives[index] == "all_to_all"]
    if not reductions or not all_to_alls:
        return list(order)
    gaps_us = _gaps_us(analysis, operations, order, all_to_alls)
    rest = [index for index in order if analysis.collectives[index] != "reduce"]
    place = {index: at for at, index in enumerate(rest)}
    ready_at = {
        index: max(
            (place[need] for need in bits(analysis.ancestors[index]) if need in place), default=0
        )
        for index in reductions
    }
    behind: dict[int, list[int]] = {}
    waiting = list(reductions)
    for window, gap_us in enumerate(gaps_us):
        start, end = place[all_to_alls[window]], place[all_to_alls[window + 1]]
        left_us = gap_us
        while fitting := [
            index
            for index in waiting
            if ready_at[index] < end and operations[index].duration_us <= left_us
        ]:
            best = max(fitting, key=lambda index: operations[index].duration_us)
            behind.setdefault(max(start, ready_at[best]), []).append(best)
            left_us -= operations[best].duration_us
            waiting.remove(best)
    for index in waiting:
        behind.setdefault(max(place[all_to_alls[-1]], ready_at[index]), []).append(index)
    return _repair(analysis, [n for at, i in enumerate(rest) for n in (i, *behind.get(at, ()))])


def _gaps_us(
    analysis: GraphAnalysis,
    operations: Sequence[Operation],
    order: Sequence[int],
    all_to_alls: Sequence[int],
) -> list[float]:
    """Return for how long the wire is free between all-to-alls if reductions took no time."""
    reductions = set(analysis.find_collectives("reduce"))
    instant = [
        Operation(name=each.name, role=each.role, duration_us=0.0, needs=each.needs)
        if index in reductions
        else each
        for index, each in enumerate(operations)
    ]
    spans = {span.name: span for span in graph_spans(instant, order)}
    found = [spans.get(operations[index].name) for index in all_to_alls]
    return [
        0.0 if before is None or after is None else max(0.0, after.start_us - before.end_us)
        for before, after in pairwise(found)
    ]


def _repair(analysis: GraphAnalysis, order: Sequence[int]) -> list[int]:
    """Return the order with each wait of a reduction behind it, and what reads that behind both."""
    emitter = _Emitter(analysis)
    delayed: list[int] = []
    for index in order:
        reduced = any(
            analysis.collectives[need] == "reduce" for need in bits(analysis.ancestors[index])
        )
        if reduced:
            delayed.append(index)
        else:
            emitter.emit(index)
    for index in delayed:
        emitter.emit(index)
    return emitter.order
