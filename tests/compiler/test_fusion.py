"""Times of nodes that Inductor fuses: bytes across kernel boundaries, worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from halley.compiler.fusion import find_boundaries, inside_kernels, is_fused
from halley.compiler.graph_analysis import GraphAnalysis, Sizes
from halley.compiler.graph_memory import LiveBytes
from halley.compiler.node_cost import ProfiledCost, operations
from halley.cost.hardware import H200, Environment, Predictor
from halley.cost.profiles import ProfileTable
from tests.compiler.graph_case import GraphBuilder, aten, find


SIZES = Sizes(1)
# Memory is so slow that bytes decide, not launches: 1000 bytes in 1 us; a kernel takes 0.5 us.
TIMES_US = {"launch_us": 0.5, "graph_us": 0.0, "kernel_us": 0.5, "split_sum_us": 0.0}
SLOW = replace(H200, memory_bytes_per_s=1e9, fused_bytes_per_s=1e9, **TIMES_US)


def _cost(analysis: GraphAnalysis, *, fuses: bool = True, **arguments: Any) -> ProfiledCost:
    boundaries = find_boundaries(analysis.nodes[0].graph, SIZES) if fuses else None
    predictor = Predictor(arguments.pop("hardware", SLOW))
    return ProfiledCost(predictor, sizes=SIZES, boundaries=boundaries, **arguments)


def _times(analysis: GraphAnalysis, *, fuses: bool = True) -> dict[str, float]:
    timed = operations(analysis, _cost(analysis, fuses=fuses))
    return {each.name: each.duration_us for each in timed if each.duration_us}


def _layer() -> GraphAnalysis:
    """Return a GEMM, the sum with a bias, gelu, a GEMM, and the residual sum; 4000 bytes each."""
    b = GraphBuilder()
    x, w, bias = b.input("x", 100, 10), b.input("w", 10, 10), b.input("bias", 10)
    first = b.mm(x, w, name="first")
    wide = b.call(aten.expand.default, bias, [100, 10], name="wide")
    added = b.call(aten.add.Tensor, first, wide, name="added")
    second = b.mm(b.call(aten.gelu.default, added, name="gelu"), w, name="second")
    return b.done(b.call(aten.add.Tensor, second, added, name="residual"))


def test_fused_nodes_move_the_bytes_that_cross_kernel_boundaries() -> None:
    fused, alone = _times(_layer()), _times(_layer(), fuses=False)
    assert fused["first"] == alone["first"] > 0.0
    assert fused["second"] == alone["second"] > 0.0
    # One tensor and 40 bytes of the bias in, one tensor out: the residual reads it behind a GEMM.
    assert fused["added"] == pytest.approx(8.04)
    assert fused["gelu"] == pytest.approx(4.0)  # out only
    assert fused["residual"] == pytest.approx(12.0)
    # Without fusion, each operator reads and writes memory.
    assert [alone[name] for name in ("added", "gelu", "residual")] == pytest.approx([12, 8, 12])


def test_ten_fused_operators_cost_less_than_two_alone() -> None:
    def chain_us(length: int, *, rows: int = 1000, fuses: bool = True) -> float:
        b = GraphBuilder()
        node = b.input("x", rows)
        for _ in range(length):
            node = b.call(aten.neg.default, node)
        return sum(_times(b.done(node), fuses=fuses).values())

    assert chain_us(10) == chain_us(1) == pytest.approx(8.0)
    assert chain_us(2, fuses=False) == pytest.approx(16.0)
    assert chain_us(10, rows=1) == pytest.approx(0.504)  # the shortest kernel and a load of 4 bytes


def test_kernel_reads_a_shared_operand_once_and_each_slice_of_it() -> None:
    b = GraphBuilder()
    x = b.input("x", 1000)
    views = [b.call(aten.view.default, x, [10, 100]) for _ in range(2)]
    neg, exp = b.call(aten.neg.default, views[0], name="neg"), b.call(aten.exp.default, views[1])
    both = b.call(aten.add.Tensor, neg, exp, name="both")
    left, right = (b.call(aten.slice.Tensor, x, 0, at, at + 500) for at in (0, 500))
    scaled = b.call(aten.mul.Tensor, left, right, name="scaled")
    assert _times(b.done(both, scaled)) == pytest.approx({"neg": 4.0, "both": 4.0, "scaled": 6.0})


def test_gather_reads_its_rows_and_concat_copies_the_inputs_that_kernels_did_not_write() -> None:
    b = GraphBuilder()
    table, x, w = b.input("table", 1000, 10), b.input("x", 10, 10), b.input("w", 10, 10)
    rows = b.call(aten.arange.default, 10, name="rows")
    taken = b.call(aten.embedding.default, table, rows, name="taken")
    batched = b.call(aten.bmm.default, *(b.call(aten.unsqueeze.default, y, 0) for y in (x, w)))
    flat = b.call(aten.squeeze.dim, batched, 0)
    joined = b.opaque(aten.cat.default, [taken, flat], shape=(20, 10), name="joined")
    times = _times(b.done(joined))
    assert times["taken"] == pytest.approx(0.8)  # 400 bytes of the table, 400 into the concat
    assert times["joined"] == pytest.approx(0.8)  # the 400 bytes of the GEMM, in and out
    assert "rows" not in times


@pytest.mark.parametrize(
    ("shape", "dims", "is_split"),
    [((2048, 10), [0], True), ((2048, 10), [1], False), ((100, 10), [0], False)],
)
def test_sum_over_many_rows_takes_a_second_kernel(shape, dims, is_split) -> None:
    b = GraphBuilder()
    doubled = b.call(aten.mul.Tensor, b.input("x", *shape), 2.0)
    summed = b.call(aten.sum.dim_IntList, doubled, dims)
    cost = _cost(b.done(summed), hardware=replace(SLOW, split_sum_us=7.0, call_us=30.0))
    first_us = max(4 * summed.meta["val"].numel() / 1000, 0.5)
    assert cost(summed) == pytest.approx(first_us + 7.0 * is_split)
    assert cost.host_us(summed) == (30.0 if is_split else 10.0)  # the second is a call of PyTorch


def test_fused_operators_are_not_measured() -> None:
    analysis, table = _layer(), ProfileTable(None, Environment(device="cpu", versions="torch 1"))
    cost = _cost(analysis, table=table, device=torch.device("cpu"))
    assert cost(analysis.nodes[find(analysis, "gelu")]) == pytest.approx(4.0)
    assert cost.measuring_s == 0.0


def test_operators_that_inductor_calls_as_they_are_do_not_fuse() -> None:
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
    assert not any(map(is_fused, (*b.all_to_all(x, "a2a"), x)))


def test_results_inside_of_a_kernel_take_no_memory() -> None:
    """One kernel computes sin and cos: it reads x and writes the operand of the GEMM."""
    b = GraphBuilder()
    x, w = b.input("tangents_x", 10, 10), b.input("tangents_w", 10, 10)
    first = b.call(aten.sin.default, x)
    analysis = b.done(b.mm(b.call(aten.cos.default, b.call(aten.t.default, first)), w))
    inside = inside_kernels(find_boundaries(b.graph, SIZES))
    assert inside == {first}
    order, size = range(len(analysis.nodes)), 10 * 10 * 4
    # The nodes are x, w, sin, t, cos, mm and the output. Without sin, x is alive until cos has run.
    assert LiveBytes(analysis, SIZES).alive(order) == [n * size for n in (2, 2, 3, 2, 3, 3, 1)]
    found = LiveBytes(analysis, SIZES, inside=inside).alive(order)
    assert found == [n * size for n in (2, 2, 2, 2, 3, 3, 1)]
