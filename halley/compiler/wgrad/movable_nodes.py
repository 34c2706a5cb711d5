"""Find the weight-gradient nodes that may move under all-to-alls, and assign them to all-to-alls.

Rule numbers are those of docs/lancet.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from halley.compiler.graph_analysis import GraphAnalysis, NodeKind, is_gemm, mask_of
from halley.compiler.node_cost import NodeCost


TryMove = Callable[[Sequence[int], int], bool]  # the type of ``MemoryBudget.try_move``
_MAX_EXCESS = 2.0  # each unit but the first takes at most this many times the unfilled time


@dataclass(kw_only=True)
class Unit:
    """Graph nodes that move together: at most one weight-gradient GEMM, and light (non-GEMM) nodes.

    A sum for a bias gradient, for example, is a unit without a GEMM.
    """

    nodes: list[int]  # indices of nodes, in the order in which they run
    is_gemm: bool  # whether a GEMM is among the nodes
    windows: frozenset[int]  # indices of the overlap windows in which the unit may run
    needs: set[int] = field(default_factory=set[int])  # indices of units that must run before
    duration_us: float = 0.0


def find_movable(analysis: GraphAnalysis, all_to_alls: Sequence[int]) -> dict[int, frozenset[int]]:
    """Return, by index of each movable node, the indices of overlap windows in which it may run.

    Overlap window i is that of node ``all_to_alls[i]``.
    """
    ordered = mask_of(analysis.find_collectives("all_to_all", "gather", "fused"))
    reductions = mask_of(analysis.find_collectives("reduce"))
    movable = [
        index
        for index in analysis.find(NodeKind.COMPUTE, NodeKind.VIEW)
        if not analysis.descendants[index] & ordered  # rule 1
        and not analysis.ancestors[index] & reductions
        and _is_ordered_by_data_alone(analysis, index)  # rule 2
    ]
    gemms = mask_of(index for index, node in enumerate(analysis.nodes) if is_gemm(node))
    fixed_gemms = gemms & ~mask_of(movable)
    window_ends = [*all_to_alls[1:], len(analysis.nodes)]
    found: dict[int, frozenset[int]] = {}
    for index in movable:
        ancestors = analysis.ancestors[index]
        last_gemm = (ancestors & fixed_gemms).bit_length() - 1
        windows = frozenset(
            window
            for window, (start, end) in enumerate(zip(all_to_alls, window_ends, strict=True))
            if not ancestors >> start & 1 and last_gemm < end  # rules 3 and 4
        )
        if windows:
            found[index] = windows
    return found


def find_units(
    analysis: GraphAnalysis,
    movable: dict[int, frozenset[int]],
    *,
    cost: NodeCost,
    only_with_gemm: bool = False,
) -> list[Unit]:
    """Group the nodes of ``find_movable`` into units that move together, and time them by ``cost``.

    The units follow rule 5 of docs/lancet.md. With ``only_with_gemm``, return only units with a
    GEMM: Inductor fuses sums for bias and norm gradients into kernels that compute their operands.
    """
    units: list[Unit] = []
    unit_of: dict[int, int] = {}
    readers = _readers(analysis)
    for index, windows in movable.items():
        starts_unit = is_gemm(analysis.nodes[index])
        sources = {unit_of[need] for need in analysis.needs[index] if need in unit_of}
        own = max(sources, default=-1)
        if starts_unit or own < 0 or units[own].windows != windows:
            units.append(Unit(nodes=[], is_gemm=starts_unit, windows=windows))
            own = len(units) - 1
        units[own].nodes.append(index)
        unit_of[index] = own
        units[own].needs |= sources - {own}
        if starts_unit:
            _absorb_operands(units, own, unit_of=unit_of, readers=readers)
    kept = [
        at for at, unit in enumerate(units) if unit.nodes and (unit.is_gemm or not only_with_gemm)
    ]
    renumbered = {old: new for new, old in enumerate(kept)}
    for at in kept:
        unit = units[at]
        unit.needs = {renumbered[need] for need in unit.needs if need in renumbered}
        unit.duration_us = sum(
            cost(analysis.nodes[index])
            for index in unit.nodes
            if analysis.kinds[index] is NodeKind.COMPUTE
        )
    return [units[at] for at in kept]


def _absorb_operands(
    units: list[Unit], own: int, *, unit_of: dict[int, int], readers: list[list[int]]
) -> None:
    """Merge into GEMM unit ``own`` each light unit that only ``own`` reads, if windows allow."""
    unit = units[own]
    for at in sorted(unit.needs, reverse=True):
        light = units[at]
        is_shared = any(
            unit_of.get(reader) not in (at, own) for node in light.nodes for reader in readers[node]
        )
        if light.is_gemm or is_shared or not unit.windows <= light.windows:
            continue
        unit.nodes = sorted(light.nodes + unit.nodes)
        unit.needs = (unit.needs | light.needs) - {at}
        unit_of |= dict.fromkeys(light.nodes, own)
        light.nodes = []


@final
@dataclass(eq=False)
class _Windows:
    """State of ``assign``: the units that it has placed into each overlap window so far."""

    units: Sequence[Unit]
    try_move: TryMove
    windows: list[list[int]]
    window_of: dict[int, int] = field(default_factory=dict[int, int])

    def candidates(self, window: int, refused: set[int]) -> list[int]:
        """Return unplaced units to try in a window: units with a GEMM if any, else all others."""
        found = [
            at
            for at, unit in enumerate(self.units)
            if at not in self.window_of and at not in refused
            if window in unit.windows and unit.duration_us > 0.0
            # Skip a unit that needs an unplaced GEMM. Other needed units are placed along with it.
            if not any(self.units[need].is_gemm for need in self._unplaced_needs(at))
        ]
        return [at for at in found if self.units[at].is_gemm] or found

    def allowed(self, at: int) -> list[int]:
        """Return windows in which an unplaced unit may run, none before the units that it needs."""
        first = max(
            (
                self.window_of[need]
                for each in (*self._unplaced_needs(at), at)
                for need in self.units[each].needs
                if need in self.window_of
            ),
            default=0,
        )
        return [window for window in self.units[at].windows if window >= first]

    def place(self, at: int, window: int) -> float | None:
        """Place a unit and its unplaced ``needs`` in a window; return their time in us, or None.

        If live bytes would be above the limit, nothing is placed, and the result is None.
        """
        units = [*self._unplaced_needs(at), at]
        if not self.try_move(units, window):
            return None
        self.windows[window] += units
        self.window_of |= dict.fromkeys(units, window)
        return sum(self.units[each].duration_us for each in units)

    def _unplaced_needs(self, at: int) -> list[int]:
        found: list[int] = []
        for need in sorted(self.units[at].needs - self.window_of.keys()):
            found += [each for each in (*self._unplaced_needs(need), need) if each not in found]
        return found


def assign(
    units: Sequence[Unit],
    times_us: Sequence[float],
    *,
    try_move: TryMove = lambda units, window: True,
) -> tuple[list[list[int]], list[float]]:
    """Choose units to run under each all-to-all; return them and the all-to-alls' unhidden times.

    The problem is a generalised assignment problem, which is NP-hard. This is a greedy best fit
    (rules 7 to 10 of docs/lancet.md). The units of an all-to-all are indices, in running order.

    Args:
        times_us: exposed time of each all-to-all, which the units are to hide.
        try_move: called with a unit and the unplaced units that it needs; False refuses them.

    Source: Lancet (arXiv:2404.19429), section 4.2. Lancet places all remaining GEMMs into their
    last window. The GEMM of a large output embedding is longer than any all-to-all: there it would
    leave all earlier all-to-alls exposed. Rule 10 avoids this.
    """
    state = _Windows(units, try_move, windows=[[] for _ in times_us])
    left_us: list[float] = []
    for window, left in enumerate(times_us):
        refused: set[int] = set()
        while left > 0.0 and (candidates := state.candidates(window, refused)):
            misfit_us = {at: abs(left - units[at].duration_us) for at in candidates}
            best = min(candidates, key=misfit_us.__getitem__)  # the best fit (rule 7)
            if state.windows[window] and units[best].duration_us > _MAX_EXCESS * left:  # rule 8
                break
            placed_us = state.place(best, window)
            left -= placed_us or 0.0
            if placed_us is None:  # live bytes above the limit (rule 9)
                refused.add(best)
        left_us.append(max(0.0, left))
    _place_remaining_gemms(state, left_us)
    return state.windows, left_us


def _place_remaining_gemms(state: _Windows, left_us: list[float]) -> None:
    """Place the remaining GEMMs by rule 10 of docs/lancet.md; reduce ``left_us`` by their times."""
    units = state.units
    remaining = [at for at, unit in enumerate(units) if unit.is_gemm and at not in state.window_of]
    for at in sorted(remaining, key=lambda at: -units[at].duration_us):
        if at in state.window_of:  # placed together with another unit that needs this one
            continue
        hidden_us = {each: min(left_us[each], units[at].duration_us) for each in state.allowed(at)}
        # Try first the windows that hide most of the GEMM; of equal ones the last, as in Lancet.
        for window in sorted(hidden_us, key=lambda each: (hidden_us[each], each), reverse=True):
            placed_us = state.place(at, window)
            if placed_us is not None:
                left_us[window] = max(0.0, left_us[window] - placed_us)
                break


def _is_ordered_by_data_alone(analysis: GraphAnalysis, index: int) -> bool:
    data = set(analysis.nodes[index].all_input_nodes)
    return all(analysis.nodes[need] in data for need in analysis.needs[index])


def _readers(analysis: GraphAnalysis) -> list[list[int]]:
    readers: list[list[int]] = [[] for _ in analysis.nodes]
    for index, needs in enumerate(analysis.needs):
        if analysis.kinds[index] is not NodeKind.OUTPUT:
            for need in needs:
                readers[need].append(index)
    return readers
