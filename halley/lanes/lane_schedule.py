"""Schedule the items of several microbatches in one stream, and predict the time of the step.

Two lanes (0 and 1) share the compute stream. The order switches to the other lane before each wait
for rows. Units (w) of weight gradients run in waits that no other lane hides:

    compute | a0 | a1 | e0 | e1 | b0 | b1 | ...  b0 | b1 | w0 | d0 | w1 | ...
    link         |= D0 =|= D1 =|= C0 =|= C1 =|      |= B0 =|= B1 =|
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any, final

from halley.core.timeline import Span
from halley.cost.simulate import GraphTime, Operation, Role, graph_time
from halley.lanes.cut import Item, Kind
from halley.lanes.executor import Order, span_item


_MAX_EXCESS = 2.0  # length of a unit over the rest of a wait (Lancet, section 4)
_ROLES: dict[Kind, Role] = {
    "segment": "compute",
    "unit": "compute",
    "host": "compute",
    "start": "start",
    "wait": "wait",
}


@dataclass(frozen=True, kw_only=True)
class LanePlan:
    """The order of a step, and predicted times.

    Attributes:
        order: pairs of a microbatch and the index of an item.
        num_lanes: microbatches that run side by side.
        moves_units: whether weight gradients move under collectives.
        time: predicted for this order.
        time_before: predicted for one microbatch after another.
    """

    order: tuple[tuple[int, int], ...]
    num_lanes: int
    moves_units: bool
    time: GraphTime
    time_before: GraphTime

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "LanePlan":
        """Return the plan whose ``dataclasses.asdict`` was sent as JSON."""
        return LanePlan(
            order=tuple((microbatch, index) for microbatch, index in fields["order"]),
            num_lanes=fields["num_lanes"],
            moves_units=fields["moves_units"],
            time=GraphTime(**fields["time"]),
            time_before=GraphTime(**fields["time_before"]),
        )


def plan_lanes(
    items: Sequence[Item],
    durations_us: Sequence[float],
    *,
    num_microbatches: int,
    max_lanes: int,
) -> LanePlan:
    """Simulate several schedules of the items of a step, and return the fastest.

    Args:
        items: of a microbatch.
        durations_us: of each item; of a start, that of its collective; of a wait 0.
        num_microbatches: of the step.
        max_lanes: most microbatches that may be unfinished at a time.
    """
    before: GraphTime | None = None
    plans: list[LanePlan] = []
    for num_lanes, moves_units, order in schedules(
        items, durations_us, num_microbatches=num_microbatches, max_lanes=max_lanes
    ):
        time = predict(items, durations_us, order)
        before = before or time  # the first schedule is one microbatch after another
        plans.append(
            LanePlan(
                order=tuple(order),
                num_lanes=num_lanes,
                moves_units=moves_units,
                time=time,
                time_before=before,
            )
        )
    return min(plans, key=lambda plan: plan.time.makespan_us)


def schedules(
    items: Sequence[Item],
    durations_us: Sequence[float],
    *,
    num_microbatches: int,
    max_lanes: int,
) -> Iterator[tuple[int, bool, list[tuple[int, int]]]]:
    """Yield the number of lanes, whether units move, and the order of each schedule.

    The first one runs one microbatch after another. Arguments as for ``plan_lanes``.
    """
    for num_lanes in range(1, min(max_lanes, num_microbatches) + 1):
        for moves_units in (False, True):
            for lag in (0, len(items) // num_lanes) if num_lanes > 1 else (0,):
                scheduler = _ListScheduler(
                    items,
                    durations_us,
                    num_microbatches=num_microbatches,
                    num_lanes=num_lanes,
                    moves_units=moves_units,
                    lag=lag,
                )
                yield num_lanes, moves_units, scheduler.run()


def measured_durations(
    items: Sequence[Item], keys: Sequence[str], steps: Sequence[Sequence[Span]]
) -> list[float]:
    """Return the duration of each item in microseconds, from steps that ran one after another.

    Args:
        items: of a microbatch.
        keys: hash of each item; items of one hash get one duration, their median.
        steps: spans of each step.

    The time of a collective is that from its start to the end of its wait, the shortest of all
    microbatches and steps: longer times contain delays of other ranks.
    """
    times_us: dict[str, list[float]] = defaultdict(list)
    links_us: dict[int, float] = {}
    for spans in steps:
        by_item = {span_item(span.name): span for span in spans}
        for (microbatch, index), span in by_item.items():
            times_us[keys[index]].append(span.duration_us)
            for need in items[index].needs if items[index].kind == "wait" else ():
                if items[need].kind == "start":
                    link_us = span.end_us - by_item[microbatch, need].start_us
                    links_us[need] = min(link_us, links_us.get(need, inf))
    durations_us = [median(times_us[key]) for key in keys]
    for at, item in enumerate(items):
        if item.kind in ("start", "wait"):
            durations_us[at] = links_us.get(at, 0.0)
    return durations_us


def predict(items: Sequence[Item], durations_us: Sequence[float], order: Order) -> GraphTime:
    """Predict the time of a step on one rank; arguments as for ``plan_lanes``."""
    num_microbatches = len({microbatch for microbatch, _ in order})
    operations = [
        Operation(
            name=f"{microbatch}.{index}",
            role=_ROLES[item.kind],
            duration_us=durations_us[index],
            needs=tuple(microbatch * len(items) + need for need in item.needs),
            is_read=item.kind == "host",
        )
        for microbatch in range(num_microbatches)
        for index, item in enumerate(items)
    ]
    flat = [microbatch * len(items) + index for microbatch, index in order]
    return graph_time(operations, flat)


@final
class _ListScheduler:
    """Puts items into an order by simulating when the rows of each collective arrive.

    A microbatch runs up to its next wait for rows. Waits for counts are short and do not switch the
    lane: otherwise both lanes would wait for rows at the same time.

    Args:
        lag: items by which a microbatch stays behind the one before it. With 0, forwards run side
            by side, then backwards. With half of the items and two lanes, forward of one microbatch
            runs beside backward of the one before it, as in 1F1B schedules.
    """

    def __init__(
        self,
        items: Sequence[Item],
        durations_us: Sequence[float],
        *,
        num_microbatches: int,
        num_lanes: int,
        moves_units: bool,
        lag: int,
    ) -> None:
        self._items = items
        self._durations_us = durations_us
        self._num_lanes = num_lanes
        self._moves_units = moves_units
        self._lag = lag
        self._order: list[tuple[int, int]] = []
        self._clock_us = self._link_free_us = 0.0
        self._position = [0] * num_microbatches  # index of the next item of each microbatch
        self._due_us = [0.0] * num_microbatches  # when the next item can run without a wait
        self._arrival_us: dict[tuple[int, int], float] = {}  # by microbatch and start
        self._units: list[tuple[int, int]] = []  # deferred, oldest first

    def run(self) -> list[tuple[int, int]]:
        """Return the order of all items of all microbatches."""
        while True:
            lanes = self._lanes()
            gap_us = min((self._due_us[lane] for lane in lanes), default=inf) - self._clock_us
            if gap_us > 0 and (unit := self._choose_unit(gap_us)):
                self._issue(*unit)
            elif lanes:
                self._advance(self._choose_lane(lanes))
            else:
                return self._order

    def _lanes(self) -> list[int]:
        """Return the microbatches that may run their next item: the oldest and others after it."""
        with_units = {microbatch for microbatch, _ in self._units}
        num_items = len(self._items)
        unfinished = [
            microbatch
            for microbatch, position in enumerate(self._position)
            if position < num_items or microbatch in with_units
        ]
        return [
            microbatch
            for microbatch in unfinished[: self._num_lanes]
            if self._position[microbatch] < num_items
            if microbatch == unfinished[0] or self._position[microbatch - 1] >= self._lag
        ]

    def _choose_unit(self, gap_us: float) -> tuple[int, int] | None:
        """Return a deferred unit to run while all lanes wait for ``gap_us``: the longest that fits.

        If none fits, return one that exceeds the gap a little.
        """
        fitting = [each for each in self._units if self._durations_us[each[1]] <= gap_us]
        if fitting:
            return max(fitting, key=self._unit_us)
        shortest = min(self._units, key=self._unit_us, default=None)
        if shortest is not None and self._unit_us(shortest) <= _MAX_EXCESS * gap_us:
            return shortest
        return None

    def _unit_us(self, unit: tuple[int, int]) -> float:
        return self._durations_us[unit[1]]

    def _choose_lane(self, lanes: list[int]) -> int:
        """Return the microbatch to run next: one with its rows, else the first to get its rows."""
        ready = [lane for lane in lanes if self._due_us[lane] <= self._clock_us]
        if not ready:
            return min(lanes, key=self._due_us.__getitem__)
        return min(ready, key=lambda lane: self._position[lane] + lane * self._lag)

    def _advance(self, lane: int) -> None:
        """Issue the items of a microbatch up to its next wait for rows; defer its units."""
        first = self._position[lane]
        for index in range(first, len(self._items)):
            item = self._items[index]
            if item.kind == "wait" and item.has_rows and index > first:
                self._due_us[lane] = self._arrival_of(lane, item)
                return
            if item.kind == "unit" and self._moves_units:
                self._units.append((lane, index))
            else:
                self._issue(lane, index)
            self._position[lane] = index + 1

    def _issue(self, lane: int, index: int) -> None:
        """Issue an item after the deferred units that it needs, and advance the clock."""
        item, duration_us = self._items[index], self._durations_us[index]
        for need in item.needs:
            if (lane, need) in self._units:
                self._issue(lane, need)
        if (lane, index) in self._units:
            self._units.remove((lane, index))
        if item.kind == "start":
            self._link_free_us = max(self._clock_us, self._link_free_us) + duration_us
            self._arrival_us[lane, index] = self._link_free_us
        elif item.kind == "wait":
            self._clock_us = max(self._clock_us, self._arrival_of(lane, item))
        else:
            self._clock_us += duration_us
        self._order.append((lane, index))

    def _arrival_of(self, lane: int, wait: Item) -> float:
        starts = (need for need in wait.needs if (lane, need) in self._arrival_us)
        return max((self._arrival_us[lane, need] for need in starts), default=0.0)
