"""Plans of the partition pass on graphs by hand: against all divisions, alike layers, reasons."""

import dataclasses
import json
import math
import random
from collections.abc import Callable
from itertools import pairwise

from torch import fx

from halley.compiler.node_cost import NodeCost
from halley.compiler.partition.axes import find_axes
from halley.compiler.partition.choose import (
    LAYERS_A_RANGE,
    PartitionPlan,
    plan_partition,
    read_plan,
)
from halley.compiler.partition.pipeline_cost import PipelineCost
from halley.compiler.partition.ranges import group_nodes, has_exchange
from halley.compiler.partition.region import Region, find_region
from halley.compiler.partition.rules import all_rules
from halley.compiler.sizes import Sizes
from tests.compiler.forward_case import ForwardCase, build_forward


NUM_GRAPHS = 200
SIZES = Sizes(64)


def _cost(*, launch_us: float, latency_us: float, us_per_kib: float) -> NodeCost:
    """Return a cost by bytes: of computation, and sixteen times as much of all-to-alls."""

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
    """Return the least cost of all divisions of items into ranges, tried one by one."""
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
        flow = find_axes(b.graph, [batch], all_rules({}))
        price = PipelineCost(flow, cost=cost, sizes=SIZES)
        nodes = list(b.graph.nodes)
        groups = group_nodes(flow, nodes, price.as_is)
        layers = [at for at, group in enumerate(groups) if has_exchange(nodes, group)]
        steps = [after - before for before, after in pairwise(layers)]
        max_items = LAYERS_A_RANGE * max(steps, default=len(groups))
        planned = {(first, end): num_parts for first, end, num_parts in plan.ranges}
        best: dict[tuple[int, int], float] = {}
        chosen: dict[tuple[int, int], float] = {}
        for first in range(len(groups)):
            for end in range(first + 1, min(len(groups), first + max_items) + 1):
                span = groups[first][0], groups[end - 1][1]
                region = find_region(flow, nodes[slice(*span)])
                as_is_us = price.as_is(nodes[slice(*span)])
                prices_us = {1: as_is_us}
                if isinstance(region, Region):
                    numbers = (n for n in range(2, 9) if case.batch_size % n == 0)
                    prices_us |= {n: price.in_parts(region, n, defers_merges=True) for n in numbers}
                best[first, end] = min(prices_us.values())
                overlaps = any(a < span[1] and span[0] < z for a, z in planned)
                chosen[first, end] = math.inf if overlaps else as_is_us
                if span in planned:
                    chosen[first, end] = prices_us[planned[span]]
        want_us = _cheapest(len(groups), max_items, lambda i, n: best[i, n])  # noqa: B023
        found_us = _cheapest(len(groups), max_items, lambda i, n: chosen[i, n])  # noqa: B023
        assert math.isclose(found_us, want_us, rel_tol=1e-9), f"seed {seed}"
        num_divided += bool(planned)
    assert NUM_GRAPHS // 4 < num_divided < NUM_GRAPHS


def test_layers_that_are_alike_are_priced_once() -> None:
    priced = []

    def cost(node: fx.Node) -> float:
        priced.append(node)
        return FAST_LAUNCH(node)

    counts = []
    for num_layers in (2, 4, 8):
        priced.clear()
        plan = _plan(ForwardCase(widths=((16,),) * (num_layers + 1)), cost)
        assert len(plan.ranges) == num_layers // LAYERS_A_RANGE
        assert len({(each.num_parts, each.after_us) for each in plan.reports[1:-1]}) <= 1
        # What is left for each layer is its time as it is, by which nodes are grouped.
        counts.append(len({node for node in priced if "part" not in node.name}) / num_layers)
    assert counts[2] < counts[1] < counts[0]


def test_given_number_of_parts_divides_every_layer() -> None:
    slow = _cost(launch_us=1000.0, latency_us=1000.0, us_per_kib=1.0)
    assert _plan(ForwardCase(), slow).ranges == ()
    (first, end, num_parts), *more = _plan(ForwardCase(), slow, num_parts=2).ranges
    assert (more, num_parts) == ([], 2)
    assert end - first > 20


def test_plan_says_why_layers_stay_whole() -> None:
    slow = _cost(launch_us=1000.0, latency_us=1000.0, us_per_kib=1.0)
    (reason,) = _plan(ForwardCase(), slow).skipped
    assert reason.endswith("no range around it is predicted to be faster in parts")
    (reason,) = _plan(ForwardCase(batch_size=11)).skipped
    assert reason == "a batch of 11 has no equal parts of 2 to 8"
    (reason,) = _plan(ForwardCase(), num_parts=3).skipped
    assert reason == "a batch of 4 has no equal parts of the number that is given"
    (reason,) = _plan(ForwardCase(by_weight=True)).skipped
    assert "begins no earlier: take_slots_by_weight_default" in reason
    assert "ranks the tokens of the whole batch" in reason


def test_plan_needs_inputs_with_a_batch() -> None:
    b, _ = build_forward(ForwardCase())
    plan = plan_partition(b.graph, batch_inputs=[], rules={}, cost=FAST_LAUNCH, sizes=SIZES)
    assert plan.ranges == ()
    assert plan.skipped


def test_plan_travels_as_json() -> None:
    plan = _plan(ForwardCase())
    assert plan.ranges
    assert read_plan(json.loads(json.dumps(dataclasses.asdict(plan)))) == plan


def test_parts_divide_time_by_hand() -> None:
    """Four parts: what computes runs in quarters behind the all-to-alls, which take as long."""
    b, batch = build_forward(ForwardCase(widths=((), ())))
    flow = find_axes(b.graph, [batch], all_rules({}))
    cost = _cost(launch_us=0.0, latency_us=0.0, us_per_kib=1.0)
    price = PipelineCost(flow, cost=cost, sizes=SIZES)
    nodes = [node for node in b.graph.nodes if node.op == "call_function"]
    region = find_region(flow, nodes)
    assert isinstance(region, Region)
    exchanges = [node for node in nodes if "all_to_all" in str(node.target)]
    comm_us = sum(map(cost, exchanges))
    whole_us, parts_us = price.as_is(nodes), price.in_parts(region, 4)
    # Counts are as large in each part; rows are a quarter.
    more_us = 3 * cost(exchanges[0])
    assert comm_us + more_us < parts_us < whole_us
