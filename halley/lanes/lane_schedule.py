"""Schedule the items of several microbatches in one stream, and predict the step's time.

A lane is a microbatch that runs beside others. Two lanes (0 and 1) share the compute stream. The
order switches to the other lane before each wait for rows. Units (w) of weight-gradient GEMMs run
in waits that no other lane hides:

    compute | a0 | a1 | e0 | e1 | b0 | b1 | ...  b0 | b1 | w0 | d0 | w1 | ...
    link         |= D0 =|= D1 =|= C0 =|= C1 =|      |= B0 =|= B1 =|
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random
from typing import TypeVar, final

from halley.cost.simulate import NO_CONTENTION, Contention, GraphTime
from halley.lanes.action import Order
from halley.lanes.cut import Item
from halley.lanes.executor import find_missing
from halley.lanes.lane_memory import MemoryRecord, predict_memory, predict_peak
from halley.lanes.lane_times import overlapped, predict


_T = TypeVar("_T")
_Make = Callable[..., "_ListScheduler"]
# Predicted time of one microbatch after another over that of lanes; lanes with less are not used,
# because predictions of steps err by as much.
_MIN_GAIN = 1.05
# Predicted memory that counts as equal: the predicted pool grows in steps of 1/256.
_MEMORY_MARGIN = 1.005
_NUM_TRIALS = 300  # of hill climbing
_MAX_OPTIONS = 8  # of a choice, that trials distinguish
_NO_RECORD = MemoryRecord()
_MAX_EXCESS = 2.0  # longest unit in a wait, in multiples of the remaining wait (Lancet, section 4)


@dataclass(frozen=True, kw_only=True)
class LanePlan:
    """The order in which a step runs the items of its microbatches; predicted times and memory.

    The peaks are bytes of the values between items on rank 0, as ``predict_peak`` counts them.
    """

    order: tuple[tuple[int, int], ...]  # pairs of a microbatch and the index of an item
    num_lanes: int  # microbatches that run side by side
    moves_units: bool  # whether weight-gradient GEMMs move under collectives
    time: GraphTime  # predicted for this order
    time_before: GraphTime  # predicted for one microbatch after another
    sm_margins: tuple[int, int] = (0, 0)  # SMs that dense and grouped GEMMs leave free
    peak_bytes: int = 0  # predicted for this order
    peak_bytes_before: int = 0  # predicted for one microbatch after another
    graph_bytes: int = 0  # of the memory of CUDA graphs, predicted by ``predict_memory``
    total_bytes: int = 0  # of all memory, predicted by ``predict_memory``


def plan_lanes(
    items: Sequence[Item],
    durations_us: Sequence[float],
    *,
    num_microbatches: int,
    max_lanes: int,
    memory: MemoryRecord = _NO_RECORD,
    max_bytes: int | None = None,
    saves_memory: bool = False,
    contention: Contention = NO_CONTENTION,
    memory_shares: Sequence[float] | None = None,
) -> LanePlan:
    """Simulate several orders of the items of a step, and return the plan with the fastest order.

    Args:
        durations_us: time of each item; for a start, that of its collective; for a wait, 0.
        max_lanes: most microbatches that may be unfinished at a time.
        memory: recorded in an earlier step.
        max_bytes: most bytes of the values between items; None for no limit.
        saves_memory: whether units run later only if their operands then need no more memory.
        contention: of computation and transfers.
        memory_shares: result of ``find_memory_shares``; None for no item that memory limits.

    Raises:
        ValueError: each order needs more than ``max_bytes``.
    """
    shares = memory_shares or [0.0] * len(items)
    overlapping_us = overlapped(items, durations_us, shares, contention)
    choose = partial(_light_units, items, memory) if saves_memory else None
    makers = [*_schedulers(items, overlapping_us, num_microbatches, max_lanes, choose)]
    orders: list[Order] = [make().run() for make in makers]
    times = [predict(items, durations_us, order, contention, shares) for order in orders]
    fastest = min(range(len(orders)), key=lambda at: times[at].makespan_us)
    improved = _improve(makers[fastest])
    if not saves_memory or _fits(improved, items, memory, _limit(orders[fastest], items, memory)):
        makers.append(makers[fastest])
        orders.append(improved)
        times.append(predict(items, durations_us, improved, contention, shares))
    peaks = [predict_peak(items, memory.storages, order, memory.captured) for order in orders]
    allowed = [at for at, peak in enumerate(peaks) if max_bytes is None or peak <= max_bytes]
    if not allowed:
        raise ValueError(
            f"max_bytes ({max_bytes}) must be at least {min(peaks)}, the least predicted peak"
        )
    best = min(allowed, key=lambda at: times[at].makespan_us)
    if 0 in allowed and times[0].makespan_us < _MIN_GAIN * times[best].makespan_us:
        best = 0
    scheduler = makers[best]()
    return LanePlan(
        order=tuple(orders[best]),
        num_lanes=scheduler.num_lanes,
        moves_units=bool(scheduler.movable),
        time=times[best],
        time_before=times[0],
        sm_margins=(contention.sm_margin, contention.grouped_sm_margin) if best else (0, 0),
        peak_bytes=peaks[best],
        peak_bytes_before=peaks[0],
        **predict_memory(items, memory, orders[best])._asdict(),
    )


def schedules(
    items: Sequence[Item],
    durations_us: Sequence[float],
    *,
    num_microbatches: int,
    max_lanes: int,
) -> Iterator[tuple[int, bool, list[tuple[int, int]]]]:
    """Yield (number of lanes, whether weight-gradient units may run later, order of all items).

    The first order runs one microbatch after another. Arguments as for ``plan_lanes``.
    """
    for make in _schedulers(items, durations_us, num_microbatches, max_lanes):
        scheduler = make()
        yield scheduler.num_lanes, bool(scheduler.movable), scheduler.run()


def _schedulers(
    items: Sequence[Item],
    durations_us: Sequence[float],
    num_microbatches: int,
    max_lanes: int,
    choose: Callable[[_Make], frozenset[int]] | None = None,
) -> Iterator[_Make]:
    """Yield functions that make the schedulers; the first one runs microbatches in turn.

    ``choose`` returns the units that may run later; without it, all may.
    """
    units = frozenset(index for index, item in enumerate(items) if item.kind == "unit")
    for num_lanes in range(1, min(max_lanes, num_microbatches) + 1):
        for lag in (0, len(items) // num_lanes) if num_lanes > 1 else (0,):
            make = partial(
                _ListScheduler,
                items,
                durations_us,
                num_lanes=num_lanes,
                lag=lag,
                num_microbatches=num_microbatches,
            )
            yield make
            if movable := units if choose is None else choose(make):
                yield partial(make, movable=movable)


def _light_units(items: Sequence[Item], memory: MemoryRecord, make: _Make) -> frozenset[int]:
    """Return the units that may run later so that a scheduler's order needs no more memory.

    These are all units, or all but those with the largest operands.
    """
    most_bytes = _limit(make().run(), items, memory)
    operand_bytes = {
        index: sum(memory.input_bytes.get((0, index), ()))
        for index, item in enumerate(items)
        if item.kind == "unit"
    }
    for most in sorted({*operand_bytes.values()}, reverse=True):
        movable = frozenset(index for index, each in operand_bytes.items() if each <= most)
        if _fits(make(movable=movable).run(), items, memory, most_bytes):
            return movable
    return frozenset()


def _limit(order: Order, items: Sequence[Item], memory: MemoryRecord) -> float:
    """Return the most bytes of orders that need about as much memory as this one."""
    return _MEMORY_MARGIN * predict_memory(items, memory, order).total_bytes


def _fits(order: Order, items: Sequence[Item], memory: MemoryRecord, most_bytes: float) -> bool:
    return predict_memory(items, memory, order, most_bytes=most_bytes).total_bytes <= most_bytes


def _improve(make: _Make) -> Order:
    """Return the order of a scheduler, improved by hill climbing over its choices.

    Each trial makes a few choices other than the scheduler would. It is kept if it ends no later.
    """
    best, exceptions, rng = make(), dict[int, int](), Random(0)
    best.run()
    for _ in range(_NUM_TRIALS if best.num_choices else 0):
        changed = dict(exceptions)
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(best.num_choices)
            if at in changed and rng.random() < 0.5:
                del changed[at]
            else:
                changed[at] = rng.randrange(_MAX_OPTIONS)
        trial = make(exceptions=changed)
        trial.run()
        if trial.clock_us <= best.clock_us:
            best, exceptions = trial, changed
    return best.order


@final
@dataclass(eq=False)
class _ListScheduler:
    """Orders the items of all microbatches by simulating when the rows of each collective arrive.

    Waits for counts are short and do not switch the lane: otherwise both lanes would wait for rows
    at the same time. ``lag`` is the number of items by which a microbatch stays behind the one
    before it. With 0, forwards run side by side, then backwards. With half of the items and two
    lanes, forward of one microbatch runs beside backward of the one before it, as in 1F1B.
    """

    items: Sequence[Item]
    durations_us: Sequence[float]
    num_lanes: int
    lag: int
    num_microbatches: int
    movable: frozenset[int] = frozenset()  # indices of the units that may run later
    # For a choice between several lanes or units, by its number: the option to take instead.
    exceptions: Mapping[int, int] = field(default_factory=dict)
    num_choices: int = 0
    position: list[int] = field(init=False)  # index of the next item of each microbatch
    # When the next item of each microbatch can run without a wait.
    due_us: list[float] = field(init=False)
    clock_us: float = 0.0
    link_free_us: float = 0.0
    order: list[tuple[int, int]] = field(default_factory=list)
    # When each started collective ends, by the microbatch and the index of its "start" item.
    arrival_us: dict[tuple[int, int], float] = field(default_factory=dict)
    units: list[tuple[int, int]] = field(default_factory=list)  # deferred units, oldest first

    def __post_init__(self) -> None:
        self.position = [0] * self.num_microbatches
        self.due_us = [0.0] * self.num_microbatches

    def run(self) -> list[tuple[int, int]]:
        while True:
            lanes = self._lanes()
            gap_us = min((self.due_us[lane] for lane in lanes), default=inf) - self.clock_us
            if gap_us > 0 and (unit := self._choose_unit(gap_us)):
                self._issue(*unit)
            elif lanes:
                self._advance(self._choose_lane(lanes))
            else:
                return self.order

    def _lanes(self) -> list[int]:
        """Return the microbatches whose next item may run: at most ``num_lanes``, oldest first.

        A microbatch that waits at a sum over lanes does not count.
        """
        with_units = {microbatch for microbatch, _ in self.units}
        num_items = len(self.items)
        unfinished = [
            microbatch
            for microbatch, position in enumerate(self.position)
            if position < num_items or microbatch in with_units
        ]
        free = [microbatch for microbatch in unfinished if not self._is_blocked(microbatch)]
        return [
            microbatch
            for microbatch in free[: self.num_lanes]
            if self.position[microbatch] < num_items
            if microbatch == free[0] or self.position[microbatch - 1] >= self.lag
        ]

    def _is_blocked(self, lane: int) -> bool:
        """Return whether a lane's next item needs items of other lanes that have not run."""
        at = self.position[lane]
        return at < len(self.items) and bool(find_missing(self.items[at], lane, self.position))

    def _choose_unit(self, gap_us: float) -> tuple[int, int] | None:
        fitting = [each for each in self.units if self._unit_us(each) <= gap_us]
        near = [each for each in self.units if self._unit_us(each) <= _MAX_EXCESS * gap_us]
        if fitting:
            unit = max(fitting, key=self._unit_us)
        else:
            unit = min(near, key=self._unit_us, default=None)
        if gap_us == inf:  # no lane is left
            return unit
        return self._choose(unit, [None, *self.units]) if self.units else None

    def _unit_us(self, unit: tuple[int, int]) -> float:
        return self.durations_us[unit[1]]

    def _choose_lane(self, lanes: list[int]) -> int:
        ready = [lane for lane in lanes if self.due_us[lane] <= self.clock_us]
        if not ready:
            return min(lanes, key=self.due_us.__getitem__)
        lane = min(ready, key=lambda lane: self.position[lane] + lane * self.lag)
        return self._choose(lane, ready) if len(ready) > 1 else lane

    def _choose(self, default: _T, options: Sequence[_T]) -> _T:
        """Count a choice; return the default, or the option of ``exceptions``."""
        self.num_choices += 1
        exception = self.exceptions.get(self.num_choices - 1)
        return default if exception is None else options[exception % len(options)]

    def _advance(self, lane: int) -> None:
        """Issue a lane's items up to its next wait for rows; defer ``movable`` units."""
        first = self.position[lane]
        for index in range(first, len(self.items)):
            item = self.items[index]
            if item.kind == "wait" and item.has_rows and index > first:
                self.due_us[lane] = self._arrival_of(lane, item)
                return
            if self._is_blocked(lane):
                return
            if index in self.movable:
                self.units.append((lane, index))
            else:
                self._issue(lane, index)
            self.position[lane] = index + 1

    def _issue(self, lane: int, index: int) -> None:
        """Append an item to the order, after deferred units that it needs; advance the clock."""
        item, duration_us = self.items[index], self.durations_us[index]
        for need in item.needs:
            if (lane, need) in self.units:
                self._issue(lane, need)
        if (lane, index) in self.units:
            self.units.remove((lane, index))
        if item.kind == "start":
            self.link_free_us = max(self.clock_us, self.link_free_us) + duration_us
            self.arrival_us[lane, index] = self.link_free_us
        elif item.kind == "wait":
            self.clock_us = max(self.clock_us, self._arrival_of(lane, item))
        else:
            self.clock_us += duration_us
        self.order.append((lane, index))

    def _arrival_of(self, lane: int, wait: Item) -> float:
        starts = (need for need in wait.needs if (lane, need) in self.arrival_us)
        return max((self.arrival_us[lane, need] for need in starts), default=0.0)
