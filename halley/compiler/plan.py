"""The weight-gradient pass's decisions for one graph, within its memory, and what they change."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from halley.compiler.graph import GraphFacts, NodeKind, is_product
from halley.compiler.memory import LiveBytes
from halley.compiler.node_cost import NodeCost, operations
from halley.compiler.order import build_order, place_reductions
from halley.compiler.partition.plan import RangeReport
from halley.compiler.sizes import Sizes
from halley.compiler.wgrad import Unit, assign, find_units, label
from halley.cost.graph_cost import GraphTime, Operation, graph_time


@dataclass(frozen=True, kw_only=True)
class OrderReport:
    """What an order of a graph does, as predicted.

    Attributes:
        windows: names of the matrix products behind each all-to-all, by name of that.
        time_before, time_after: of the graph.
        peak_before, peak_after: bytes alive at the worst moment.
        ranges: that run in parts.
        skipped: why others do not.
    """

    windows: dict[str, tuple[str, ...]]
    time_before: GraphTime
    time_after: GraphTime
    peak_before: int
    peak_after: int
    ranges: tuple[RangeReport, ...] = ()
    skipped: tuple[str, ...] = ()


def plan_wgrad(
    facts: GraphFacts, *, cost: NodeCost, sizes: Sizes, memory_margin: float
) -> list[int]:
    """Return the order of the weight-gradient pass.

    Args:
        facts: of the graph.
        cost: microseconds of a node.
        sizes: of what nodes return.
        memory_margin: by what share the peak of live bytes may rise.

    Contract: the same nodes in another order, one that is legal. All-to-alls, gathers and fused
    operators keep their order. Peak of live bytes at most ``1 + memory_margin`` of before.
    """
    all_to_alls = facts.find_collectives("all_to_all")
    identity = list(range(len(facts.nodes)))
    if not all_to_alls:
        return identity
    works = operations(facts, cost)
    units = find_units(facts, label(facts, all_to_alls), cost=cost)
    assignment = assign(units, [works[index].duration_us for index in all_to_alls])
    windows = [list(window) for window in assignment.windows]
    live = LiveBytes(facts, sizes)
    guard = _MemoryGuard(live, units, all_to_alls, windows)
    limit = (1.0 + memory_margin) * live.peak(identity)[0]
    while True:
        order = _order(facts, works, units, dict(zip(all_to_alls, windows, strict=True)))
        peak, where = live.peak(order)
        if peak <= limit:
            return order
        if not guard.demote(order, where):
            return identity


def report_order(
    facts: GraphFacts, order: Sequence[int], *, cost: NodeCost, sizes: Sizes
) -> OrderReport:
    """Return what an order does to a graph.

    Args:
        facts: of the graph as it was.
        order: of all of its nodes.
        cost: microseconds of a node.
        sizes: of what nodes return.
    """
    works, live = operations(facts, cost), LiveBytes(facts, sizes)
    identity = range(len(facts.nodes))
    return OrderReport(
        windows=hidden_products(facts, order),
        time_before=graph_time(works, identity),
        time_after=graph_time(works, order),
        peak_before=live.peak(identity)[0],
        peak_after=live.peak(order)[0],
    )


def hidden_products(facts: GraphFacts, order: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Return the matrix products between start and wait of each all-to-all, by names."""
    found: dict[str, tuple[str, ...]] = {}
    place = {index: at for at, index in enumerate(order)}
    waits = facts.find(NodeKind.WAIT)
    for start in facts.find_collectives("all_to_all"):
        ends = [place[wait] for wait in waits if facts.ancestors[wait] >> start & 1]
        between = order[place[start] + 1 : min(ends, default=len(order))]
        nodes = [facts.nodes[index] for index in between]
        found[facts.nodes[start].name] = tuple(node.name for node in nodes if is_product(node))
    return found


def _order(
    facts: GraphFacts,
    works: Sequence[Operation],
    units: Sequence[Unit],
    windows: dict[int, list[int]],
) -> list[int]:
    return place_reductions(facts, works, build_order(facts, units, windows))


@final
class _MemoryGuard:
    """Brings gradients forward, one after another, until memory suffices.

    Args:
        live: counts the bytes of the graph.
        units: of the graph.
        all_to_alls: indices of nodes.
        windows: units behind each, changed by ``demote``.
    """

    def __init__(
        self,
        live: LiveBytes,
        units: Sequence[Unit],
        all_to_alls: Sequence[int],
        windows: list[list[int]],
    ) -> None:
        self._units = units
        self._all_to_alls = all_to_alls
        self._windows = windows
        self._held_bytes = [live.input_bytes(unit.nodes) for unit in units]

    def demote(self, order: Sequence[int], where: int) -> bool:
        """Bring forward the gradient that holds most at a position of the order.

        It goes to the first all-to-all that starts behind its own place in the graph, which emits
        it right after what is needed at once; if it stands there, back to its own place.

        Returns:
            Whether there was one.
        """
        place = {index: at for at, index in enumerate(order)}
        held: list[tuple[bool, int, int, int]] = []
        for window, units in enumerate(self._windows):
            for at in units:
                nodes = self._units[at].nodes
                holds = place[nodes[0]] > where and nodes[-1] < order[where]
                held.append((holds, self._held_bytes[at], at, window))
        if not held:
            return False
        _, _, at, window = max(held)
        self._windows[window].remove(at)
        first = self._first_window(at)
        if first is not None and first < window:
            self._windows[first].append(at)
            self._windows[first].sort()  # units come after those that they need
        return True

    def _first_window(self, at: int) -> int | None:
        unit = self._units[at]
        return next(
            (
                window
                for window, start in enumerate(self._all_to_alls)
                if unit.hides >> window & 1 and start > unit.nodes[0]
            ),
            None,
        )
