"""Plans of the partition pass on hand-made graphs, compared with a brute-force search."""

import dataclasses
import json
import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from torch import fx

from halley.compiler.node_cost import NodeCost
from halley.compiler.partition.partition_plan import (
    LAYERS_PER_SEGMENT,
    PartitionPlan,
    plan_partition,
    read_plan,
)
from halley.compiler.partition.pipeline_cost import PipelineCost
from halley.compiler.partition.propagation import propagate_batch
from halley.compiler.partition.rules import all_rules
from halley.compiler.partition.segment import Segment, find_segment
from halley.compiler.partition.segment_search import (
    Choice,
    ChosenSegment,
    choose_num_parts,
    choose_segments,
    group_nodes,
    has_exchange,
)
from halley.compiler.sizes import Sizes
from tests.compiler.forward_case import ForwardCase, build_forward


NUM_GRAPHS = 40
SIZES = Sizes(64)


def _cost(*, launch_us: float, latency_us: float, us_per_kib: float) -> NodeCost:
    """Return a cost by the bytes that a node moves; all-to-alls cost sixteen times as much."""

    def cost(node: fx.Node) -> float:
        inputs = [source.meta.get("val") for source in node.all_input_nodes]
        if "all_to_all" in str(node.target):
            return latency_us + SIZES.num_bytes(inputs[0]) / 1024 * us_per_kib * 16
        moved = sum(map(SIZES.num_bytes, inputs)) + SIZES.num_bytes(node.meta.get("val"))
        return launch_us + moved / 1024 * us_per_kib

    return cost


FAST_LAUNCH = _cost(launch_us=0.1, latency_us=1.0, us_per_kib=20.0)


def _plan(
    case: ForwardCase,
    cost: NodeCost = FAST_LAUNCH,
    num_parts: int = 0,
) -> PartitionPlan:
    b, batch = build_forward(case)
    return plan_partition(
        b.graph,
        batch_inputs=[batch],
        rules={},
        cost=cost,
        sizes=SIZES,
        num_parts=num_parts,
    )


def _cheapest(num_items: int, max_items: int, price: Callable[[int, int], float]) -> float:
    """Return the least cost of all divisions of items into segments, by trying each."""
    if num_items == 0:
        return 0.0
    return min(
        _cheapest(first, max_items, price) + price(first, num_items)
        for first in range(max(0, num_items - max_items), num_items)
    )


def _random_case(seed: int) -> tuple[ForwardCase, NodeCost]:
    draw = random.Random(seed)
    num_layers = draw.choice((1, 1, 1, 2))
    widths = tuple(
        tuple(draw.choice((8, 32, 64)) for _ in range(draw.randint(0, 1)))
        for _ in range(num_layers + 1)
    )
    case = ForwardCase(
        batch_size=draw.choice((2, 4, 6)),
        seq_len=draw.choice((2, 16)),
        widths=widths,
        by_weight=draw.random() < 0.2,
    )
    cost = _cost(
        launch_us=draw.choice((0.1, 1.0, 10.0)),
        latency_us=draw.choice((1.0, 30.0)),
        us_per_kib=draw.uniform(5.0, 40.0),
    )
    return case, cost


def test_plan_equals_brute_force_on_random_graphs() -> None:
    num_divided = 0
    for seed in range(NUM_GRAPHS):
        case, cost = _random_case(seed)
        b, batch = build_forward(case)
        plan = _plan(case, cost)
        flow = propagate_batch(b.graph, [batch], all_rules({}))
        price = PipelineCost(flow, cost=cost, sizes=SIZES)
        nodes = list(b.graph.nodes)
        groups = group_nodes(flow, nodes, price.full_batch_us)
        layers = [at for at, group in enumerate(groups) if has_exchange(nodes, group)]
        steps = [after - before for before, after in pairwise(layers)]
        max_groups = LAYERS_PER_SEGMENT * max(steps, default=len(groups))
        planned = {(first, end): num_parts for first, end, num_parts in plan.ranges}
        best: dict[tuple[int, int], float] = {}
        chosen: dict[tuple[int, int], float] = {}
        for first in range(len(groups)):
            for end in range(first + 1, min(len(groups), first + max_groups) + 1):
                indices = groups[first][0], groups[end - 1][1]
                inside = nodes[slice(*indices)]
                segment = find_segment(flow, inside)
                times_us = {1: price.full_batch_us(inside)}
                if isinstance(segment, Segment):
                    for n in range(2, 9):
                        if case.batch_size % n == 0:
                            times_us[n] = price.pipeline_us(segment, n, defers_concats=True)
                best[first, end] = min(times_us.values())
                overlaps = any(a < indices[1] and indices[0] < z for a, z in planned)
                chosen[first, end] = math.inf if overlaps else times_us[1]
                if indices in planned:
                    chosen[first, end] = times_us[planned[indices]]
        expected_us = _cheapest(len(groups), max_groups, lambda i, n: best[i, n])  # noqa: B023
        found_us = _cheapest(len(groups), max_groups, lambda i, n: chosen[i, n])  # noqa: B023
        assert math.isclose(found_us, expected_us, rel_tol=1e-9), f"seed {seed}"
        num_divided += bool(planned)
    assert NUM_GRAPHS // 4 < num_divided < NUM_GRAPHS


@pytest.mark.parametrize(
    ("times_us", "expected"),
    [
        ({2: 80.0, 4: 70.0, 8: 90.0}, Choice(4, 70.0)),
        ({2: 110.0, 4: 120.0, 8: 10.0}, Choice(1, 100.0)),  # 8 is not tried: 4 is slower than 2
        ({2: 120.0, 4: 90.0}, Choice(4, 90.0)),  # 2 is slower than the full batch, but 4 is tried
        ({2: 100.0}, Choice(1, 100.0)),  # of equal times, the full batch wins
        ({}, Choice(1, 100.0)),
    ],
)
def test_search_for_the_number_of_microbatches_ends_at_the_first_slower_one(
    times_us: dict[int, float], expected: Choice
) -> None:
    assert choose_num_parts(100.0, times_us, times_us.__getitem__) == expected


def test_segments_by_hand() -> None:
    # Four items of 10 us. Items 1 and 2 take 12 us in two microbatches, items 0 to 2 24 us in four.
    choices = {(1, 3): Choice(2, 12.0), (0, 3): Choice(4, 24.0), (0, 4): Choice(8, 1.0)}

    def choose(first: int, end: int) -> Choice:
        return choices.get((first, end), Choice(1, 10.0 * (end - first)))

    assert choose_segments(4, max_items=3, choose=choose) == [ChosenSegment(1, 3, 2)]
    assert choose_segments(4, max_items=4, choose=choose) == [ChosenSegment(0, 4, 8)]
    assert choose_segments(4, max_items=1, choose=choose) == []
    assert choose_segments(0, max_items=3, choose=choose) == []


def test_layers_that_are_alike_are_priced_once() -> None:
    priced = []

    def cost(node: fx.Node) -> float:
        priced.append(node)
        return FAST_LAUNCH(node)

    counts = []
    for num_layers in (2, 4, 8):
        priced.clear()
        plan = _plan(ForwardCase(widths=((16,),) * (num_layers + 1)), cost)
        assert len(plan.ranges) == num_layers // LAYERS_PER_SEGMENT
        assert len({(each.num_parts, each.after_us) for each in plan.reports[1:-1]}) <= 1
        # Each layer still needs its time on the full batch, by which nodes are grouped.
        counts.append(len({node for node in priced if "part" not in node.name}) / num_layers)
    assert counts[2] < counts[1] < counts[0]


def test_given_number_of_microbatches_divides_every_layer() -> None:
    slow = _cost(launch_us=1000.0, latency_us=1000.0, us_per_kib=1.0)
    assert _plan(ForwardCase(), slow).ranges == ()
    (first, end, num_parts), *more = _plan(ForwardCase(), slow, num_parts=2).ranges
    assert (more, num_parts) == ([], 2)
    assert end - first > 20


def test_plan_gives_the_reason_for_each_layer_on_the_full_batch() -> None:
    slow = _cost(launch_us=1000.0, latency_us=1000.0, us_per_kib=1.0)
    (reason,) = _plan(ForwardCase(), slow).skipped
    assert reason.endswith("no segment around it is predicted to be faster in microbatches")
    (reason,) = _plan(ForwardCase(batch_size=11)).skipped
    assert reason == "a batch of 11 has no 2 to 8 equal microbatches"
    (reason,) = _plan(ForwardCase(), num_parts=3).skipped
    assert reason == "a batch of 4 has no 3 equal microbatches"
    (reason,) = _plan(ForwardCase(by_weight=True)).skipped
    assert "cannot begin earlier: take_slots_by_weight_default" in reason
    assert "ranks the tokens of the full batch" in reason


def test_plan_needs_inputs_with_a_batch() -> None:
    b, _ = build_forward(ForwardCase())
    plan = plan_partition(b.graph, batch_inputs=[], rules={}, cost=FAST_LAUNCH, sizes=SIZES)
    assert plan.ranges == ()
    assert plan.skipped


def test_plan_is_equal_after_json() -> None:
    plan = _plan(ForwardCase())
    assert plan.ranges
    assert read_plan(json.loads(json.dumps(dataclasses.asdict(plan)))) == plan


def test_pipeline_time_is_between_communication_alone_and_the_full_batch() -> None:
    b, batch = build_forward(ForwardCase(widths=((), ())))
    flow = propagate_batch(b.graph, [batch], all_rules({}))
    cost = _cost(launch_us=0.0, latency_us=0.0, us_per_kib=1.0)
    price = PipelineCost(flow, cost=cost, sizes=SIZES)
    nodes = [node for node in b.graph.nodes if node.op == "call_function"]
    segment = find_segment(flow, nodes)
    assert isinstance(segment, Segment)
    exchanges = [node for node in nodes if "all_to_all" in str(node.target)]
    # Four microbatches send a quarter of the rows each, but all counts: 3 more all-to-alls.
    comm_us = sum(map(cost, exchanges)) + 3 * cost(exchanges[0])
    assert comm_us < price.pipeline_us(segment, 4) < price.full_batch_us(nodes)
