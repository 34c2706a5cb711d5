"""Schedules of hand-made items: the order, the switch of lanes, and moved weight gradients."""

import json
import time
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from torch import fx

from halley.core.timeline import Span
from halley.core.validation import build
from halley.cost.hardware import CPU, Predictor
from halley.cost.simulate import Contention
from halley.lanes.cut import Item, Kind, Lanes
from halley.lanes.executor import check_order, one_after_another
from halley.lanes.item_clock import ItemClock, item_name, span_item
from halley.lanes.lane_schedule import LanePlan, plan_lanes, schedules
from halley.lanes.lane_times import find_memory_shares, measured_durations, predict


def _items(*described: tuple[Kind, *tuple[int, ...]]) -> list[Item]:
    """Return items by their kinds and the items that they need; all waits are for rows."""
    return [
        Item(kind=kind, needs=tuple(needs), has_rows=kind == "wait") for kind, *needs in described
    ]


def _chain(num_exchanges: int) -> tuple[list[Item], list[float]]:
    """Return segments of 10 us with an exchange of 8 us after each but the last one."""
    items, durations_us = _items(("segment",)), [10.0]
    for _ in range(num_exchanges):
        last = len(items) - 1
        items += _items(("start", last), ("wait", last + 1), ("segment", last + 2))
        durations_us += [8.0, 0.0, 10.0]
    return items, durations_us


def test_two_lanes_hide_exchanges_under_each_other() -> None:
    items, durations_us = _chain(num_exchanges=3)
    plan = plan_lanes(items, durations_us, num_microbatches=2, max_lanes=2)
    # One after another: 2 * (4 * 10 + 3 * 8) us. In lanes, no exchange is exposed.
    assert plan.time_before.makespan_us == pytest.approx(128.0)
    assert plan.time_before.exposed_us == pytest.approx(48.0)
    assert plan.time.makespan_us == pytest.approx(80.0)
    assert plan.time.exposed_us == pytest.approx(0.0)
    assert plan.num_lanes == 2
    assert plan.order[:4] == ((0, 0), (0, 1), (1, 0), (1, 1))


def test_contention_lengthens_segments_beside_exchanges_and_reserves_sms() -> None:
    items, durations_us = _chain(num_exchanges=1)
    contention = Contention(compute=2.0, sm_margin=4, grouped_sm_margin=8)
    make_plan = partial(plan_lanes, items, durations_us, num_microbatches=2, contention=contention)
    plan = make_plan(max_lanes=2)
    # Segments: 10 us alone; 8 us beside an exchange for 4 us of its work, then 6 us; the same; 10.
    assert plan.time.makespan_us == pytest.approx(48.0)
    assert plan.sm_margins == (4, 8)
    alone = make_plan(max_lanes=1)
    assert alone.time.makespan_us == pytest.approx(56.0)
    assert alone.sm_margins == (0, 0)


def test_exchanges_are_slower_beside_segments_that_memory_limits() -> None:
    items, durations_us = _chain(num_exchanges=1)
    contention = Contention(memory_comm=2.0)
    plan = partial(plan_lanes, items, durations_us, num_microbatches=2, max_lanes=2)
    assert plan(contention=contention).time.makespan_us == pytest.approx(40.0)
    # The first exchange takes 16 us: 10 beside the second segment, of which 5 are its work, then
    # its last 3 alone. The second exchange runs for 10 us beside a segment, then for 3 alone.
    slow = plan(contention=contention, memory_shares=[1.0] * len(items))
    assert slow.time.makespan_us == pytest.approx(46.0)


def test_memory_limits_what_arithmetic_does_not_explain() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(100, 100, device="meta")
    product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    product.meta["val"] = torch.empty(100, 100, device="meta")
    predictor = Predictor(replace(CPU, gemm_flops_per_s=1e12))  # 2 us for 2 million FLOPs
    gemm = Item(kind="segment", code=graph, is_static=True)
    items = [gemm, replace(gemm, is_static=False), Item(kind="wait")]
    assert find_memory_shares(items, [8.0, 8.0, 0.0], predictor) == [0.75, 0.0, 0.0]
    assert find_memory_shares(items, [1.0, 8.0, 0.0], predictor) == [0.0, 0.0, 0.0]


def test_lanes_that_gain_less_than_five_percent_are_not_used() -> None:
    items, durations_us = _chain(num_exchanges=1)
    for exchange_us, num_lanes in ((0.9, 1), (1.3, 2)):
        durations_us[1] = exchange_us  # of 2 * (10 + 10) us of segments
        plan = plan_lanes(items, durations_us, num_microbatches=2, max_lanes=2)
        assert plan.num_lanes == num_lanes
        assert (plan.time == plan.time_before) == (num_lanes == 1)


def test_hill_climbing_finds_a_faster_order() -> None:
    items, _ = _chain(num_exchanges=4)
    items += _items(("unit", 0), ("unit", 0), ("unit", 0))
    segments_us, exchanges_us = [5.0, 7.0, 3.0, 2.0, 6.0], [4.0, 3.0, 3.0, 7.0]
    durations_us = [segments_us[0]]
    for exchange_us, segment_us in zip(exchanges_us, segments_us[1:], strict=True):
        durations_us += [exchange_us, 0.0, segment_us]
    durations_us += [6.0, 5.0, 6.0]  # the units
    greedy = min(
        predict(items, durations_us, order).makespan_us
        for *_, order in schedules(items, durations_us, num_microbatches=3, max_lanes=2)
    )
    plan = plan_lanes(items, durations_us, num_microbatches=3, max_lanes=2)
    # Three microbatches have 40 us of computation each, so no order takes less than 120 us.
    assert 120.0 < plan.time.makespan_us < 0.96 * greedy
    check_order(items, plan.order)


def test_max_lanes_limits_the_microbatches_in_flight() -> None:
    items, durations_us = _chain(num_exchanges=2)
    plan = plan_lanes(items, durations_us, num_microbatches=4, max_lanes=2)
    started: set[int] = set()
    finished: set[int] = set()
    for microbatch, index in plan.order:
        started.add(microbatch)
        assert len(started - finished) <= 2
        if index == len(items) - 1:
            finished.add(microbatch)
    assert finished == {0, 1, 2, 3}
    alone = plan_lanes(items, durations_us, num_microbatches=4, max_lanes=1)
    assert list(alone.order) == one_after_another(items, num_microbatches=4)


def test_forward_runs_beside_backward_of_another_microbatch_if_that_is_faster() -> None:
    # Forward is mostly communication, backward mostly computation.
    items, _ = _chain(num_exchanges=6)
    durations_us = [
        0.0 if item.kind == "wait" else 10.0 if (item.kind == "start") == (at < 10) else 1.0
        for at, item in enumerate(items)
    ]
    plan = plan_lanes(items, durations_us, num_microbatches=6, max_lanes=2)
    place, half = {each: at for at, each in enumerate(plan.order)}, len(items) // 2
    assert place[0, half] < place[1, 0] < place[0, len(items) - 1]
    assert place[1, half] < place[2, 0] < place[1, len(items) - 1]
    together = next(
        predict(items, durations_us, order)
        for lanes, _, order in schedules(items, durations_us, num_microbatches=6, max_lanes=2)
        if lanes == 2 and order.index((1, 0)) < order.index((0, 4))
    )
    assert plan.time.makespan_us < 0.8 * together.makespan_us


def test_units_move_into_waits_of_a_single_microbatch() -> None:
    # 1 and 2 are weight gradients of item 0; the exchange needs item 0 only.
    items = _items(
        ("segment",), ("unit", 0), ("unit", 0), ("start", 0), ("wait", 3), ("segment", 4)
    )
    plan = plan_lanes(items, [10.0, 6.0, 1.0, 7.0, 0.0, 10.0], num_microbatches=1, max_lanes=2)
    assert plan.order == ((0, 0), (0, 3), (0, 1), (0, 2), (0, 4), (0, 5))
    assert plan.moves_units
    assert plan.time_before.makespan_us == pytest.approx(34.0)
    assert plan.time.makespan_us == pytest.approx(27.0)


def test_unit_much_longer_than_the_wait_stays_behind_it() -> None:
    items = _items(("segment",), ("unit", 0), ("start", 0), ("wait", 2))
    items += _items(("segment", 3), ("start", 4), ("wait", 5), ("segment", 6))
    durations_us = [10.0, 50.0, 5.0, 0.0, 10.0, 45.0, 0.0, 10.0]
    plan = plan_lanes(items, durations_us, num_microbatches=1, max_lanes=1)
    # The first exchange is done long before the unit would be; the second one is long enough.
    assert plan.order.index((0, 1)) == plan.order.index((0, 5)) + 1


@pytest.mark.parametrize("lanes", ["earlier", "all"])
def test_lanes_of_a_batch_meet_at_sums(lanes: Lanes) -> None:
    items = _items(("segment",), ("sum", 0), ("start", 0, 1), ("wait", 2), ("segment", 3))
    items[1] = replace(items[1], lanes=lanes)
    durations_us = [10.0, 1.0, 20.0, 0.0, 10.0]
    # The last lane is the first that finds the values of all lanes.
    alone = [(0, 0), (1, 0), (2, 0), *((lane, at) for lane in (2, 0, 1) for at in range(1, 5))]
    if lanes == "earlier":  # no lane needs a later one
        alone = [(lane, at) for lane in range(3) for at in range(5)]
    assert one_after_another(items, num_microbatches=3) == alone
    for max_lanes in (1, 2, 3):
        found = schedules(items, durations_us, num_microbatches=3, max_lanes=max_lanes)
        for _, _, order in found:
            check_order(items, order)
    too_early = sorted(alone, key=lambda each: each[1] if each[0] else -1)  # lane 0 runs first
    if lanes == "all":
        with pytest.raises(RuntimeError, match=r"item 1 of microbatch 0 must come after"):
            check_order(items, too_early)
    plan = plan_lanes(items, durations_us, num_microbatches=3, max_lanes=3)
    assert plan.time.exposed_us < 0.8 * plan.time_before.exposed_us


def test_unit_runs_before_a_segment_that_reads_it() -> None:
    # A tied weight: a later segment adds to the gradient of an earlier unit.
    items = _items(("segment",), ("unit", 0), ("start", 0), ("wait", 2), ("segment", 1, 3))
    durations_us = [1.0, 100.0, 1.0, 0.0, 1.0]
    for _, _, order in schedules(items, durations_us, num_microbatches=2, max_lanes=2):
        check_order(items, order)


def test_lanes_do_not_switch_at_counts() -> None:
    items = _items(("segment",), ("start", 0), ("wait", 1), ("host", 2), ("start", 3))
    items[2] = replace(items[2], has_rows=False)
    items += _items(("wait", 4), ("segment", 5))
    plan = plan_lanes(items, [5.0, 1.0, 0.0, 0.5, 20.0, 0.0, 5.0], num_microbatches=2, max_lanes=2)
    assert plan.order[:5] == tuple((0, index) for index in range(5))


def test_plan_stays_one_after_another_if_nothing_is_faster() -> None:
    items = _items(("segment",), ("segment", 0))
    plan = plan_lanes(items, [1.0, 1.0], num_microbatches=3, max_lanes=2)
    assert list(plan.order) == one_after_another(items, num_microbatches=3)
    assert plan.time == plan.time_before


def test_plan_survives_json() -> None:
    items, durations_us = _chain(num_exchanges=1)
    plan = plan_lanes(items, durations_us, num_microbatches=2, max_lanes=2)
    assert build(LanePlan, json.loads(json.dumps(asdict(plan)))) == plan


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([(0, 1), (0, 0), (0, 2), (0, 3)], "item 1 of microbatch 0 must come after"),
        ([(0, 0), (0, 1), (0, 2)], "each item"),
        ([(0, 0), (0, 1), (0, 2), (0, 3), (0, 3)], "each item"),
    ],
)
def test_illegal_order_is_refused(order: list[tuple[int, int]], message: str) -> None:
    items, _ = _chain(num_exchanges=1)
    with pytest.raises(RuntimeError, match=message):
        check_order(items, order)


def test_durations_are_medians_of_one_step_and_shortest_transfers_of_others() -> None:
    items, _ = _chain(num_exchanges=1)
    keys = ["segment", "start", "wait", "segment"]

    def step(first_us: float, last_us: float, link_us: float) -> list[Span]:
        spans: list[Span] = []
        for index, duration_us in enumerate((first_us, 1.0, link_us - 1.0, last_us)):
            times = {"start_us": spans[-1].end_us if spans else 0.0, "duration_us": duration_us}
            spans.append(Span(name=f"0.{index}.{keys[index]}", rank=0, stream="compute", **times))
        return spans

    found = measured_durations(
        items,
        keys,
        computing=step(5.0, 6.0, 5.0),
        communicating=[step(3.0, 4.0, 9.0), step(3.0, 4.0, 7.0)],
    )
    assert found == pytest.approx([5.5, 7.0, 0.0, 5.5])


def test_clock_keeps_the_shortest_launch_of_each_hash() -> None:
    clock = ItemClock(["a", "b", "a"], torch.device("cpu"))
    for index, seconds in ((0, 0.03), (1, 0.02), (2, 0.01)):
        with clock.span(item_name(0, index, "segment")):
            time.sleep(seconds)
    assert [span_item(span.name) for span in clock.collect()] == [(0, 0), (0, 1), (0, 2)]
    assert 10_000.0 <= clock.launch_us["a"] < 20_000.0 <= clock.launch_us["b"]
