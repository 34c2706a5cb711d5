"""How much more a graph may hold while gradients are late: live bytes, updated move by move."""

from collections.abc import Sequence
from typing import final

from halley.compiler.graph_analysis import GraphAnalysis, NodeKind
from halley.compiler.graph_memory import LiveBytes
from halley.compiler.wgrad.movable_nodes import Unit


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
