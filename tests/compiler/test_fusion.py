"""Prices of nodes that Inductor fuses: bytes across the borders of kernels, by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from halley.compiler.fusion import WHOLE, find_boundaries, inside_kernels, is_fused
from halley.compiler.graph_analysis import GraphAnalysis
from halley.compiler.graph_memory import LiveBytes
from halley.compiler.node_cost import ProfiledCost, operations
from halley.compiler.partition.divide import divide
from halley.compiler.partition.pipeline_cost import PipelineCost
from halley.compiler.partition.region import Region, find_region
from halley.compiler.sizes import Sizes
from halley.cost.hardware import Predictor
from halley.cost.profiles import Environment, ProfileTable
from halley.cost.simulate import graph_time
from tests.compiler.captured_case import BATCH_SIZE, SLOW, Captured, compute_nodes
from tests.compiler.gpt2_model import SEQ_LEN
from tests.compiler.graph_case import GraphBuilder, aten


SIZES = Sizes(1)


def _cost(analysis: GraphAnalysis, *, fuses: bool = True) -> ProfiledCost:
    cost = ProfiledCost(Predictor(SLOW), sizes=SIZES)
    if fuses:
        cost.boundaries = find_boundaries(analysis.nodes[0].graph, SIZES)
    return cost


def _times(analysis: GraphAnalysis, *, fuses: bool = True) -> dict[str, float]:
    works = operations(analysis, _cost(analysis, fuses=fuses))
    return {work.name: work.duration_us for work in works if work.duration_us}


def _layer() -> GraphAnalysis:
    """Return mm, add of a bias, gelu, mm, and the residual: the first product's result again."""
    b = GraphBuilder()
    x, w, bias = b.input("x", 100, 10), b.input("w", 10, 10), b.input("bias", 10)
    first = b.mm(x, w, name="first")
    wide = b.call(aten.expand.default, bias, [100, 10], name="wide")
    added = b.call(aten.add.Tensor, first, wide, name="added")
    gelu = b.call(aten.gelu.default, added, name="gelu")
    second = b.mm(gelu, w, name="second")
    return b.done(b.call(aten.add.Tensor, second, added, name="residual"))


def test_chain_moves_the_bytes_that_cross_its_boundary() -> None:
    analysis = _layer()
    times = _times(analysis)
    # 4000 bytes a tensor. added reads one and 40 bytes of the bias, and writes: the residual comes
    # behind a product, and so from memory. gelu writes alone. The residual reads two and writes.
    assert times["added"] == pytest.approx(8.04)
    assert times["gelu"] == pytest.approx(4.0)
    assert times["residual"] == pytest.approx(12.0)


def test_without_boundaries_each_operator_is_a_kernel() -> None:
    times, fused = _times(_layer(), fuses=False), _times(_layer())
    assert times["added"] == pytest.approx(12.0)
    assert times["gelu"] == pytest.approx(8.0)
    assert times["residual"] == pytest.approx(12.0)
    assert times["first"] == fused["first"] > 0.0
    assert times["second"] == fused["second"] > 0.0


def _chain(length: int, rows: int = 1000) -> GraphAnalysis:
    b = GraphBuilder()
    node = b.input("x", rows)
    for _ in range(length):
        node = b.call(aten.neg.default, node)
    return b.done(node)


def test_ten_fused_operators_cost_less_than_two_alone() -> None:
    assert sum(_times(_chain(10)).values()) == pytest.approx(8.0)
    assert sum(_times(_chain(1)).values()) == pytest.approx(8.0)
    assert sum(_times(_chain(2), fuses=False).values()) == pytest.approx(16.0)
    assert sum(_times(_chain(10, rows=1)).values()) == pytest.approx(
        0.504
    )  # a launch, and 4 bytes of reading


def test_operand_of_two_nodes_of_a_kernel_is_read_once_and_its_halves_each() -> None:
    b = GraphBuilder()
    x = b.input("x", 1000)
    flat = b.call(aten.view.default, x, [10, 100])
    also = b.call(aten.view.default, x, [10, 100])
    neg, exp = b.call(aten.neg.default, flat, name="neg"), b.call(aten.exp.default, also)
    both = b.call(aten.add.Tensor, neg, exp, name="both")
    left, right = (b.call(aten.slice.Tensor, x, 0, at, at + 500) for at in (0, 500))
    product = b.call(aten.mul.Tensor, left, right, name="product")
    assert _times(b.done(both, product)) == pytest.approx({"neg": 4.0, "both": 4.0, "product": 6.0})


def test_gather_reads_what_it_returns_and_join_copies_what_kernels_did_not_write() -> None:
    b = GraphBuilder()
    table, x, w = b.input("table", 1000, 10), b.input("x", 10, 10), b.input("w", 10, 10)
    rows = b.call(aten.arange.default, 10, name="rows")
    taken = b.call(aten.embedding.default, table, rows, name="taken")
    product = b.call(aten.bmm.default, *(b.call(aten.unsqueeze.default, y, 0) for y in (x, w)))
    flat = b.call(aten.squeeze.dim, product, 0)
    joined = b.graph.call_function(aten.cat.default, ([taken, flat],), name="joined")
    joined.meta["val"] = torch.empty(20, 10, device="meta")
    times = _times(b.done(joined))
    assert times["taken"] == pytest.approx(0.8)  # 400 bytes of the table, 400 into the join
    assert times["joined"] == pytest.approx(0.8)  # the product's 400 bytes, in and out
    assert "rows" not in times


def test_sum_over_many_rows_takes_a_second_kernel() -> None:
    """A sum along the columns does not, nor one over few rows."""
    hardware = replace(SLOW, split_sum_us=7.0, call_us=30.0)
    for shape, dims, second in (
        ((2048, 10), [0], True),
        ((2048, 10), [1], False),
        ((100, 10), [0], False),
    ):
        b = GraphBuilder()
        doubled = b.call(aten.mul.Tensor, b.input("x", *shape), 2.0, name="doubled")
        analysis = b.done(b.call(aten.sum.dim_IntList, doubled, dims, name="summed"))
        cost = ProfiledCost(Predictor(hardware), sizes=SIZES)
        cost.boundaries = find_boundaries(analysis.nodes[0].graph, SIZES)
        node = next(node for node in analysis.nodes if node.name == "summed")
        first_us = max(4 * node.meta["val"].numel() / 1000, hardware.kernel_us)
        assert cost(node) == pytest.approx(first_us + 7.0 * second)
        assert cost.host_us(node) == (30.0 if second else 10.0)  # which torch launches


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_part_of_a_batch_moves_its_part_of_the_bytes(num_parts: int) -> None:
    analysis = _layer()
    cost, by_name = _cost(analysis), {node.name: node for node in analysis.nodes}
    parts = fx.Graph()

    def operand(source: fx.Node) -> fx.Node:
        node = parts.placeholder(source.name)
        node.meta = {"val": torch.empty(100 // num_parts, 10, device="meta"), WHOLE: source}
        return node

    for name, want_us in (("added", 8.0 / num_parts + 0.04), ("gelu", 4.0 / num_parts)):
        node = by_name[name]
        part = parts.node_copy(node, operand)
        part.meta = {"val": torch.empty(100 // num_parts, 10, device="meta"), WHOLE: node}
        assert cost(part) == pytest.approx(want_us), name


def test_fused_operators_are_not_measured() -> None:
    analysis, table = _layer(), ProfileTable(None, Environment(device="cpu", versions="torch 1"))
    cost = ProfiledCost(Predictor(SLOW), sizes=SIZES, table=table, device=torch.device("cpu"))
    cost.boundaries = find_boundaries(analysis.nodes[0].graph, SIZES)
    gelu = next(node for node in analysis.nodes if node.name == "gelu")
    assert cost(gelu) == pytest.approx(4.0)
    assert cost.measuring_s == 0.0


def test_what_inductor_calls_as_it_is_stays_out() -> None:
    b = GraphBuilder()
    x = b.input("x", 10, 10)
    calls: list[tuple[Any, tuple[Any, ...], bool]] = [
        (aten._to_copy.default, (), True),
        (aten.sum.dim_IntList, ([0],), True),
        (aten.mm.default, (x,), False),
        (aten.sort.default, (), False),
        (aten.cumsum.default, (0,), False),
        (aten.view.default, ([100],), False),
        (aten.neg_.default, (), False),
    ]
    for target, more, want in calls:
        assert is_fused(b.call(target, x, *more)) is want, target
    start, wait = b.all_to_all(x, "a2a")
    assert not any(map(is_fused, (start, wait, x)))


def _compare(rank: int, num_ranks: int) -> list[tuple[float, float]]:
    """Return, for each number of parts, what was predicted and what the graph takes."""
    case = Captured("dropless")
    found: list[tuple[float, float]] = []
    for num_parts in (2, 4):
        graph = case.graph()
        sizes = Sizes(BATCH_SIZE * SEQ_LEN)
        cost = ProfiledCost(Predictor(SLOW), sizes=sizes)
        cost.boundaries = find_boundaries(graph, sizes)
        flow = case.flow(graph)
        region = find_region(flow, compute_nodes(graph))
        assert isinstance(region, Region), region
        price = PipelineCost(flow, cost=cost, sizes=sizes)
        predicted_us = price.in_parts(region, num_parts)
        divide(graph, flow, [(region, num_parts)], sizes=sizes)
        cost.boundaries = find_boundaries(graph, sizes)
        works = operations(GraphAnalysis(graph), cost)
        found.append((predicted_us, graph_time(works, range(len(works))).makespan_us))
    return found


def test_prediction_is_near_that_of_the_graph_in_parts(run_ranks) -> None:
    (found,) = run_ranks(_compare, 1, timeout_s=120.0)
    for predicted_us, us in found:
        assert predicted_us == pytest.approx(us, rel=0.05)


def test_what_stays_inside_of_a_kernel_takes_no_memory() -> None:
    """sin, cos and their sum are one kernel, which reads x and writes what the product reads."""
    b = GraphBuilder()
    x, w = b.input("tangents_x", 10, 10), b.input("tangents_w", 10, 10)
    first = b.call(aten.sin.default, x)
    last = b.call(aten.cos.default, b.call(aten.t.default, first))
    product = b.call(aten.mm.default, last, w)
    analysis = b.done(product)
    inside = inside_kernels(find_boundaries(b.graph, SIZES))
    assert inside == {first}
    order, size = range(len(analysis.nodes)), 10 * 10 * 4
    # x and w; sin as well, then cos beside x and w: x is let go only where cos has read it.
    assert LiveBytes(analysis, SIZES).alive(order) == [n * size for n in (2, 2, 3, 2, 3, 3, 1)]
    found = LiveBytes(analysis, SIZES, inside=inside).alive(order)
    assert found == [n * size for n in (2, 2, 2, 2, 3, 3, 1)]
