"""Build the node order of a backward graph, given the units of nodes to run under all-to-alls.

Rule numbers are those of docs/lancet.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import final

from halley.compiler.graph_analysis import GraphAnalysis, NodeKind, bits, mask_of
from halley.compiler.wgrad.movable_nodes import Unit
from halley.cost.simulate import Operation, graph_spans


@final
class _Emitter:
    """Builds an order of a graph: appends indices of nodes, each after its ancestors."""

    def __init__(self, analysis: GraphAnalysis) -> None:
        self.order: list[int] = []
        self._ancestors = analysis.ancestors
        self._emitted = 0  # bit mask of the nodes in ``order``

    def emit(self, index: int) -> None:
        if self._emitted >> index & 1:
            return
        # Append missing ancestors by ascending index: the graph's own order, which is legal.
        for each in (*bits(self._ancestors[index] & ~self._emitted), index):
            self.order.append(each)
            self._emitted |= 1 << each

    def emit_ready(self, indices: Iterable[int]) -> None:
        for index in indices:
            if not self._ancestors[index] & ~self._emitted:
                self.emit(index)


def build_order(
    analysis: GraphAnalysis,
    units: Sequence[Unit],
    windows: Mapping[int, Sequence[int]],
    *,
    early: Sequence[int] = (),
) -> list[int]:
    """Return a node order in which weight-gradient units follow the start of their all-to-all.

    Other nodes keep their order, except readers of moved nodes, and waits (rule 11 of
    docs/lancet.md). Waits for reduced gradients, and their readers, run at the end.

    ``windows`` has, for the index of an all-to-all, the indices of the units to run under it, in
    order. Nodes in ``early``, ascending, run as soon as their ancestors have run.
    """
    moved = mask_of(node for ats in windows.values() for at in ats for node in units[at].nodes)
    reductions = mask_of(analysis.find_collectives("reduce"))
    after_moved: list[int] = []
    held = moved
    for index, ancestors in enumerate(analysis.ancestors):
        if ancestors & reductions:
            held |= 1 << index
        elif ancestors & moved and not moved >> index & 1:
            held |= 1 << index
            after_moved.append(index)
    emitter = _Emitter(analysis)
    for index in analysis.find(NodeKind.INPUT):
        emitter.emit(index)
    for index, kind in enumerate(analysis.kinds):
        # Skip waits here: emitting the first reader of a wait also emits the wait, its ancestor.
        if held >> index & 1 or kind in (NodeKind.WAIT, NodeKind.OUTPUT):
            continue
        emitter.emit(index)
        for at in windows.get(index, ()):
            for node in units[at].nodes:
                emitter.emit(node)
        if index in windows:
            emitter.emit_ready(after_moved)
        emitter.emit_ready(early)
    for index in (*after_moved, *range(len(analysis.nodes))):  # the nodes that are left
        if analysis.kinds[index] is not NodeKind.OUTPUT:
            emitter.emit(index)
    emitter.emit(len(analysis.nodes) - 1)  # the output node
    return emitter.order


def place_reductions(
    analysis: GraphAnalysis, operations: Sequence[Operation], order: Sequence[int]
) -> list[int]:
    """Return ``order`` with gradient reductions moved between all-to-alls, or after the last one.

    All-to-alls have priority on the network, because computation waits for them. The gap after an
    all-to-all repeatedly takes the longest reduction that fits and whose gradient is ready before
    the next all-to-all. Other reductions follow the last all-to-all (rule 12).

    Source: the code of Lancet, which finds the gaps by simulating reductions that take no time.
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
    behind: dict[int, list[int]] = {}  # by position in ``rest``: reductions to start after the node
    waiting = list(reductions)
    for (start, end), left_us in zip(pairwise(all_to_alls), gaps_us, strict=True):
        while fitting := [
            index
            for index in waiting
            if ready_at[index] < place[end] and operations[index].duration_us <= left_us
        ]:
            best = max(fitting, key=lambda index: operations[index].duration_us)
            behind.setdefault(max(place[start], ready_at[best]), []).append(best)
            left_us -= operations[best].duration_us
            waiting.remove(best)
    for index in waiting:
        behind.setdefault(max(place[all_to_alls[-1]], ready_at[index]), []).append(index)
    reduced = mask_of(reductions)
    emitter = _Emitter(analysis)
    placed = [each for at, index in enumerate(rest) for each in (index, *behind.get(at, ()))]
    # Nodes that depend on reductions, such as their waits, run last: a wait blocks computation.
    for index in sorted(placed, key=lambda index: bool(analysis.ancestors[index] & reduced)):
        emitter.emit(index)
    return emitter.order


def _gaps_us(
    analysis: GraphAnalysis,
    operations: Sequence[Operation],
    order: Sequence[int],
    all_to_alls: Sequence[int],
) -> list[float]:
    """Predict the gap in us from each all-to-all to the next, as if reductions took no time."""
    reductions = set(analysis.find_collectives("reduce"))
    without = [
        replace(each, duration_us=0.0, host_us=0.0, is_read=False) if index in reductions else each
        for index, each in enumerate(operations)
    ]
    spans = {span.name: span for span in graph_spans(without, order)}
    found = [spans.get(operations[index].name) for index in all_to_alls]
    return [
        0.0 if before is None or after is None else max(0.0, after.start_us - before.end_us)
        for before, after in pairwise(found)
    ]
