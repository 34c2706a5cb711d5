"""The weight-gradient pass: gradients that nobody waits for run while all-to-alls travel.

Backward emits a layer's weight gradients ahead of what the next all-to-all waits for. This pass
finds them, gives each to an all-to-all that it neither needs nor feeds, and emits it behind that
one's start; the wait goes to where its result is first read.

Source: Lancet (arXiv:2404.19429), section 4 and algorithm 1; the deadline rule and the bound on
what is too long stand in its code alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from halley.compiler.graph_analysis import GraphAnalysis, NodeKind, is_gemm
from halley.compiler.node_cost import NodeCost


# Whether units may run behind the all-to-all at a position among all; if so they will.
Fits = Callable[[Sequence[int], int], bool]
_TOO_LONG = 2.0  # times what is left to hide: a second gradient longer than that stays out


@dataclass(kw_only=True)
class Unit:
    """Nodes that move together: a weight gradient, with what prepares it and what follows it.

    Attributes:
        nodes: ascending, in which order they are emitted.
        is_gemm: whether a matrix product is among them. Others, sums of biases and norms, are
            fillers of last resort.
        hides: bit mask over the graph's all-to-alls: those that this may run behind.
        needs: indices of units, all smaller, that must stand before.
        duration_us: of all nodes.
    """

    nodes: list[int]
    is_gemm: bool
    hides: int
    needs: set[int] = field(default_factory=set[int])
    duration_us: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which units run behind which all-to-all.

    Attributes:
        windows: indices of units, by position of the all-to-all among all of the graph, in the
            order in which they are emitted.
        left_us: of each all-to-all, what no unit hides.
    """

    windows: tuple[tuple[int, ...], ...]
    left_us: tuple[float, ...]


def label(analysis: GraphAnalysis, all_to_alls: Sequence[int]) -> dict[int, int]:
    """Return the movable nodes, each with the mask of all-to-alls that it may run behind.

    Movable is computation that feeds no collective that ranks meet in, that some all-to-all does
    not feed, and that needs no reduced gradient: what does is the optimizer's. It may run behind an
    all-to-all if no product that it needs comes after the next one, which would have to wait for
    that.

    Args:
        analysis: of the graph.
        all_to_alls: indices of nodes, ascending.
    """
    met = sum(1 << index for index in analysis.find_collectives("all_to_all", "gather", "fused"))
    reduced = sum(1 << index for index in analysis.find_collectives("reduce"))
    movable = [
        index
        for index in analysis.find(NodeKind.COMPUTE, NodeKind.VIEW)
        if not (analysis.descendants[index] & met or analysis.ancestors[index] & reduced)
        and not _stays(analysis, index)
    ]
    gemms = sum(1 << index for index, node in enumerate(analysis.nodes) if is_gemm(node))
    gemms &= ~sum(1 << index for index in movable)
    ends = [*all_to_alls[1:], len(analysis.nodes)]
    found: dict[int, int] = {}
    for index in movable:
        ancestors = analysis.ancestors[index]
        latest = (ancestors & gemms).bit_length() - 1
        mask = sum(
            1 << at
            for at, (a2a, end) in enumerate(zip(all_to_alls, ends, strict=True))
            if not ancestors >> a2a & 1 and latest < end
        )
        if mask:
            found[index] = mask
    return found


def find_units(
    analysis: GraphAnalysis, labels: dict[int, int], *, cost: NodeCost, gemms_alone: bool = False
) -> list[Unit]:
    """Return the movable nodes in units.

    A node that reads a gradient and may run where it may joins it (a transpose, a cast, a sum with
    another gradient); what only a gradient reads joins it too. Two gradients never share a unit.

    Args:
        analysis: of the graph.
        labels: as ``label`` returns them.
        cost: microseconds of a node that computes.
        gemms_alone: whether units without a product stay: Inductor computes sums of biases and
            norms in the kernels that make what they add up.
    """
    units: list[Unit] = []
    owner: dict[int, int] = {}
    readers = _readers(analysis)
    for index, hides in labels.items():
        product = is_gemm(analysis.nodes[index])
        above = {owner[need] for need in analysis.needs[index] if need in owner}
        home = max(above, default=-1)
        if product or home < 0 or units[home].hides != hides:
            units.append(Unit(nodes=[], is_gemm=product, hides=hides))
            home = len(units) - 1
        units[home].nodes.append(index)
        owner[index] = home
        units[home].needs |= above - {home}
        if product:
            _absorb(units, home, owner=owner, readers=readers)
    kept = [at for at, unit in enumerate(units) if unit.nodes and (unit.is_gemm or not gemms_alone)]
    renamed = {old: new for new, old in enumerate(kept)}
    for at in kept:
        unit = units[at]
        unit.needs = {renamed[need] for need in unit.needs if need in renamed}
        unit.duration_us = sum(
            cost(analysis.nodes[index])
            for index in unit.nodes
            if analysis.kinds[index] is NodeKind.COMPUTE
        )
    return [units[at] for at in kept]


def _absorb(
    units: list[Unit], home: int, *, owner: dict[int, int], readers: list[list[int]]
) -> None:
    """Move into a product's unit the light units that it alone reads."""
    for at in sorted(units[home].needs, reverse=True):
        light = units[at]
        others = (reader for node in light.nodes for reader in readers[node])
        if light.is_gemm or any(owner.get(reader) not in (at, home) for reader in others):
            continue
        if units[home].hides & ~light.hides:
            continue
        units[home].nodes = sorted(light.nodes + units[home].nodes)
        units[home].needs = (units[home].needs | light.needs) - {at}
        for node in light.nodes:
            owner[node] = home
        light.nodes = []


@final
class _Windows:
    """What has been given to which all-to-all so far."""

    def __init__(self, units: Sequence[Unit], num_windows: int, fits: Fits) -> None:
        self.units = units
        self._fits = fits
        self.windows: list[list[int]] = [[] for _ in range(num_windows)]
        self.placed: dict[int, int] = {}  # window by unit

    def is_available(self, at: int) -> bool:
        """Return whether all products that an unplaced unit needs are placed."""
        return all(
            not self.units[need].is_gemm and self.is_available(need)
            for need in self.units[at].needs - self.placed.keys()
        )

    def allowed(self, at: int) -> list[int]:
        """Return the windows that an unplaced unit may have: none ahead of what it needs."""
        hides, first = self.units[at].hides, self._first(at)
        return [window for window in range(first, len(self.windows)) if hides >> window & 1]

    def _first(self, at: int) -> int:
        placed = self.placed
        needs = self.units[at].needs
        firsts = (placed[need] if need in placed else self._first(need) for need in needs)
        return max(firsts, default=0)

    def place(self, at: int, window: int) -> float | None:
        """Place a unit, before it those that it needs.

        Returns:
            The time of all of them; None if they do not fit and stay where they are.
        """
        units = [*self._unplaced_needs(at), at]
        if not self._fits(units, window):
            return None
        self.windows[window] += units
        self.placed |= dict.fromkeys(units, window)
        return sum(self.units[each].duration_us for each in units)

    def _unplaced_needs(self, at: int) -> list[int]:
        found: list[int] = []
        for need in sorted(self.units[at].needs - self.placed.keys()):
            found += [each for each in (*self._unplaced_needs(need), need) if each not in found]
        return found


def _always_fits(units: Sequence[int], window: int) -> bool:
    return True


def assign(
    units: Sequence[Unit], times_us: Sequence[float], *, fits: Fits = _always_fits
) -> Assignment:
    """Give units to all-to-alls so that as much as possible of their time is hidden.

    Walks the all-to-alls in their order. Each takes, again and again, the unit whose time is
    nearest to what is left to hide, products before others, until nothing is left, or the best is
    more than twice as long as what is left and there is one already. Products that none took, the
    longest first, go where they hide most of what is left, or else behind the last all-to-all that
    they may run behind, whatever their time (the deadline). A unit comes after those that it needs.
    One that does not fit is passed over, here alone.

    Args:
        units: of the graph.
        times_us: of the all-to-alls.
        fits: asked for a unit with those that it needs and that are not placed, in order.

    Source: Lancet (arXiv:2404.19429), section 4.2; best fit for a generalised assignment problem,
    which is NP-hard. There products that none took all go behind their last all-to-all: that of a
    large output embedding, longer than any all-to-all, would leave those ahead bare.
    """
    state = _Windows(units, len(times_us), fits)
    left_us: list[float] = []
    for window, time_us in enumerate(times_us):
        left = time_us
        refused: set[int] = set()
        while left > 0.0:
            candidates = _candidates(state, window, refused)
            if not candidates:
                break
            misfit_us = {at: abs(left - units[at].duration_us) for at in candidates}
            best = min(candidates, key=misfit_us.__getitem__)
            if state.windows[window] and units[best].duration_us > _TOO_LONG * left:
                break
            placed_us = state.place(best, window)
            left -= placed_us or 0.0
            if placed_us is None:
                refused.add(best)
        left_us.append(max(0.0, left))
    _place_late(state, left_us)
    return Assignment(windows=tuple(map(tuple, state.windows)), left_us=tuple(left_us))


def _place_late(state: _Windows, left_us: list[float]) -> None:
    """Give products that none took to the all-to-alls with most left, in place."""
    units = state.units
    late = [at for at, unit in enumerate(units) if unit.is_gemm and at not in state.placed]
    for at in sorted(late, key=lambda at: -units[at].duration_us):
        if at in state.placed:  # along with one that needs it
            continue
        hidden_us = {each: min(left_us[each], units[at].duration_us) for each in state.allowed(at)}
        for window in sorted(hidden_us, key=lambda each: (hidden_us[each], each), reverse=True):
            placed_us = state.place(at, window)
            if placed_us is not None:
                left_us[window] = max(0.0, left_us[window] - placed_us)
                break


def _candidates(state: _Windows, window: int, refused: set[int]) -> list[int]:
    """Return the units that this all-to-all may take now: products, or else what there is."""
    found = [
        at
        for at, unit in enumerate(state.units)
        if at not in state.placed and at not in refused
        if unit.hides >> window & 1 and unit.duration_us > 0.0 and state.is_available(at)
    ]
    return [at for at in found if state.units[at].is_gemm] or found


def _stays(analysis: GraphAnalysis, index: int) -> bool:
    """Return whether others are ordered around a node by more than data."""
    data = set(analysis.nodes[index].all_input_nodes)
    return any(analysis.nodes[need] not in data for need in analysis.needs[index])


def _readers(analysis: GraphAnalysis) -> list[list[int]]:
    readers: list[list[int]] = [[] for _ in analysis.nodes]
    for index, needs in enumerate(analysis.needs):
        if analysis.kinds[index] is not NodeKind.OUTPUT:
            for need in needs:
                readers[need].append(index)
    return readers
