"""Schedule weight-gradient GEMMs under backward all-to-alls, within a limit of live bytes.

Autograd emits the weight-gradient GEMM of a layer before its data-gradient GEMM, although only the
latter feeds the next all-to-all. It puts each wait directly after the start. docs/lancet.md has a
picture. The overlap window of an all-to-all is the time from its start to its wait.

docs/lancet.md lists the rules of this pass. The code cites them by number, such as "rule 7". This
file finds the time to fill (rule 6), counts live bytes (9), tries again if their peak is too high
(13), and compares times (14). Rules 11 and 12 are in ``order.py``, others in ``movable_nodes.py``.

Source: Lancet (arXiv:2404.19429), section 4 and algorithm 1. Rules 8 and 12, and the last window in
10, are in the code of Lancet only. Rules 9 and 13 are Halley's.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from torch import fx

from halley.compiler.graph_analysis import GraphAnalysis, NodeKind, Sizes, is_gemm, module_of
from halley.compiler.graph_memory import LiveBytes
from halley.compiler.node_cost import NodeCost, operations
from halley.compiler.wgrad.movable_nodes import Unit, assign, find_movable, find_units
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


_MAX_TRIES = 8  # maximum of assignments; each after the first has a lower memory limit (rule 13)


@final
class MemoryBudget:
    """Decides which weight-gradient units may move under all-to-alls within a limit of live bytes.

    A gradient that is computed later keeps its operands alive longer, and its own result becomes
    alive later. Bytes are counted in the order of the graph, with each moved node at the position
    of its all-to-all. The final order differs a little, so ``plan_wgrad`` counts its peak again.
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
        self._live = live
        self._units = units
        self._all_to_alls = all_to_alls
        self._limit = limit
        self._is_input = [kind is NodeKind.INPUT for kind in analysis.kinds]
        self._place = list(range(len(analysis.nodes)))  # position of each node after the moves
        self._alive = live.alive(self._place)  # live bytes by position, without ``_transient``
        # ``_moves``: by position of an all-to-all, the bytes that each move allocates and frees.
        # ``_transient``: by position, the most bytes beyond ``_alive`` while moved units run there.
        self._moves: dict[int, list[tuple[int, int]]] = {}
        self._transient = [0] * len(analysis.nodes)
        self._reads: list[list[int]] = [[] for _ in analysis.nodes]  # buffers that each node reads
        for buffer, readers in enumerate(live.readers):
            for reader in readers:
                self._reads[reader].append(buffer)

    def try_move(self, ats: Sequence[int], window: int) -> bool:
        """Return whether units fit under an all-to-all within the limit; if so, record the move.

        ``ats`` are indices of units; ``window`` is the index of the all-to-all in ``all_to_alls``.
        """
        start = self._all_to_alls[window]
        nodes = [node for at in ats for node in self._units[at].nodes]
        touched = {buffer for node in nodes for buffer in self._reads[node]} | set(nodes)
        buffers = [buffer for buffer in touched if self._live.num_bytes[buffer]]
        place, alive, transient = self._place.copy(), self._alive.copy(), self._transient.copy()
        for node in nodes:
            place[node] = start
        before = {buffer: self._lifetime(buffer, self._place) for buffer in buffers}
        after = {buffer: self._lifetime(buffer, place) for buffer in buffers}
        for lifetimes, sign in ((before, -1), (after, 1)):
            for buffer, (first, end) in lifetimes.items():
                for at in range(first, end):
                    alive[at] += sign * self._live.num_bytes[buffer]
        made = sum(self._live.num_bytes[node] for node in nodes)
        freed = sum(self._live.num_bytes[each] for each in buffers if after[each][1] == start + 1)
        moves = [*self._moves.get(start, ()), (made, freed)]
        transient[start] = _most_bytes(moves)
        # Check ``start`` and positions where a buffer has become alive: bytes grow nowhere else.
        grown = [
            alive[at] + transient[at]
            for buffer, (first, end) in after.items()
            for at in range(first, end)
            if not before[buffer][0] <= at < before[buffer][1]
        ]
        if max(alive[start] + transient[start], *grown, 0) > self._limit:
            return False
        self._place, self._alive, self._transient = place, alive, transient
        self._moves[start] = moves
        return True

    def _lifetime(self, buffer: int, place: Sequence[int]) -> tuple[int, int]:
        """Return positions ``[first, end)`` at which a buffer is alive, if nodes run at ``place``.

        The result of a moved node counts from the position after its all-to-all on. At the position
        of the all-to-all it is part of ``_transient``.
        """
        made = 0 if self._is_input[buffer] else place[buffer]
        first = made + (place[buffer] != buffer)
        last = max((place[reader] for reader in self._live.readers[buffer]), default=made)
        return first, max(first, last + 1)


def _most_bytes(moves: Sequence[tuple[int, int]]) -> int:
    """Return the peak of bytes over successive moves, each a pair (bytes allocated, bytes freed).

    Example: moves (30, 10) and (20, 40) give 40: 0, then 30, then 20, then 40, then 0.
    """
    most = current = 0
    for made, freed in moves:
        most = max(most, current + made)
        current += made - freed
    return most


@dataclass(frozen=True, kw_only=True)
class OrderReport:
    """Predicted times and memory of a graph in its own order and in the order of the passes."""

    windows: dict[str, tuple[str, ...]]  # names of GEMMs under each all-to-all, in the new order
    time_before: GraphTime  # in the graph's own order
    time_after: GraphTime  # in the new order
    peak_before: int  # most live bytes in the graph's own order
    peak_after: int  # most live bytes in the new order
    # Paths of the modules of all-to-alls and GEMMs, by name of the node.
    modules: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    spans_before: tuple[Span, ...] = field(default=(), repr=False)  # one per node that takes time
    spans_after: tuple[Span, ...] = field(default=(), repr=False)
    predicted: tuple[str, ...] = ()  # profile keys of operations that have no measured time
    sm_margins: tuple[int, int] = (0, 0)  # SMs that dense and grouped GEMMs leave free
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
    only_with_gemm: bool = False,
) -> list[int]:
    """Return a node order with weight-gradient GEMMs under all-to-alls, or the graph's own order.

    The order is legal. Live bytes are at most ``max_bytes``, or the order is that of the graph.

    Args:
        inside: nodes whose results stay inside of a kernel, for ``LiveBytes``.
        only_with_gemm: move only units that have a GEMM; passed to ``find_units``.
    """
    all_to_alls = analysis.find_collectives("all_to_all")
    identity = list(range(len(analysis.nodes)))
    if not all_to_alls:
        return identity
    timed = operations(analysis, cost)
    movable = find_movable(analysis, all_to_alls)
    units = find_units(analysis, movable, cost=cost, only_with_gemm=only_with_gemm)
    # Under contention, an all-to-all takes ``comm`` times as long as alone, and GEMMs take
    # ``compute`` times as long. Unit durations are not scaled, so scale all-to-alls by the ratio.
    scale = contention.comm / contention.compute
    times_us = [time_us * scale for time_us in _exposed_us(timed, units, all_to_alls)]
    # Inductor fuses a light node into the kernel that computes its operands, so run it early. A
    # node without operands, such as the zeros of a gradient, would only occupy memory longer.
    in_units = {index for unit in units for index in unit.nodes}
    light = [index for index in movable if index not in in_units and analysis.needs[index]]
    early = sorted(light) if only_with_gemm else []
    live = LiveBytes(analysis, sizes, inside=inside)
    limit = max_bytes
    for _ in range(_MAX_TRIES):
        budget = MemoryBudget(analysis, live, units=units, all_to_alls=all_to_alls, limit=limit)
        assigned, _ = assign(units, times_us, try_move=budget.try_move)
        windows = dict(zip(all_to_alls, assigned, strict=True))
        order = build_order(analysis, units, windows, early=early)
        order = place_reductions(analysis, timed, order)
        peak = live.peak(order)
        if peak <= max_bytes:
            return order
        limit -= peak - max_bytes
    return identity


def _exposed_us(
    timed: Sequence[Operation], units: Sequence[Unit], all_to_alls: Sequence[int]
) -> list[float]:
    """Predict the exposed time of each all-to-all in us, as if ``units`` took no time."""
    moved = {index for unit in units for index in unit.nodes}
    stays = [
        replace(each, duration_us=0.0) if index in moved else each
        for index, each in enumerate(timed)
    ]
    spans = graph_spans(stays, range(len(stays)))
    compute = [span for span in spans if span.stream == "compute"]
    own = {span.name: span for span in spans if span.stream == "comm"}
    found = [own.get(timed[index].name) for index in all_to_alls]
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
    """Predict time and memory of a graph twice: in its own order, and in ``order``."""
    timed, live = operations(analysis, cost), LiveBytes(analysis, sizes, inside=inside)
    identity = range(len(analysis.nodes))
    shown = [analysis.nodes[index] for index in analysis.find_collectives("all_to_all")]
    shown += filter(is_gemm, analysis.nodes)
    before, after = (graph_spans(timed, each, contention) for each in (identity, order))
    return OrderReport(
        windows=hidden_gemms(analysis, order),
        modules={node.name: module_of(node) for node in shown},
        time_before=time_of(before),
        time_after=time_of(after),
        peak_before=live.peak(identity),
        peak_after=live.peak(order),
        spans_before=tuple(before),
        spans_after=tuple(after),
    )


def hidden_gemms(analysis: GraphAnalysis, order: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Return, by all-to-all, the names of GEMMs between its start and first wait in ``order``."""
    found: dict[str, tuple[str, ...]] = {}
    place = {index: at for at, index in enumerate(order)}
    for start in analysis.find_collectives("all_to_all"):
        ends = [place[wait] for wait in analysis.find_waits(start)]
        between = order[place[start] + 1 : min(ends, default=len(order))]
        nodes = [analysis.nodes[index] for index in between]
        found[analysis.nodes[start].name] = tuple(node.name for node in nodes if is_gemm(node))
    return found
