"""Times of nodes: predicted by hand, read from a table, measured once."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import halley.ops.traceable_routing  # noqa: F401
from halley.compiler.fusion import find_boundaries
from halley.compiler.graph_analysis import GraphAnalysis
from halley.compiler.node_cost import (
    ProfiledCost,
    example_arguments,
    host_us,
    is_read,
    node_key,
    operations,
)
from halley.compiler.sizes import Sizes, without_values
from halley.cost.hardware import Hardware, Predictor
from halley.cost.measure import measure_us
from halley.cost.profiles import Curve, Environment, ProfileTable
from halley.cost.simulate import Contention
from tests.compiler.gpu_attention import GPU_ATTENTIONS, operator_of
from tests.compiler.graph_case import GROUP, GraphBuilder, aten, c10d, find, two_layers


SIZES = Sizes(1)
HERE = Environment(device="cpu", versions="torch 1")
ALL_TO_ALL = "_c10d_functional::all_to_all_single"
ROUND = Predictor(
    Hardware(
        name="round",
        gemm_flops_per_s=1e9,
        peak_flops_per_s=None,
        memory_bytes_per_s=1e9,
        fused_bytes_per_s=1e9,
        link_bytes_per_s=1e7,
        link_latency_us=20.0,
        launch_us=5.0,
        graph_us=0.0,
        call_us=0.0,
        collective_us=0.0,
        kernel_us=1.0,
        split_sum_us=0.0,
        read_us=2.0,
    )
)


def _gemms() -> GraphAnalysis:
    b = GraphBuilder()
    x, w = b.input("x", 40, 50), b.input("w", 50, 60)
    stacked, weights = b.input("stacked", 3, 20, 30), b.input("weights", 3, 30, 10)
    product = b.mm(x, w, name="mm")
    batched = b.call(aten.bmm.default, stacked, weights, name="bmm")
    added = b.call(aten.addmm.default, b.input("bias", 60), x, w, name="addmm")
    square = b.mm(weights_2d := b.input("square", 64, 64), weights_2d, name="mm_square")
    return b.done(product, batched, added, square)


def test_gemms_are_predicted_by_their_arithmetic() -> None:
    analysis, cost = _gemms(), ProfiledCost(ROUND, sizes=SIZES)
    want_us = {
        "mm": 2 * 40 * 50 * 60 / 1e3 + 1.0,
        "bmm": 2 * 3 * 20 * 30 * 10 / 1e3 + 1.0,
        "addmm": 2 * 40 * 50 * 60 / 1e3 + 1.0,
        "mm_square": 2 * 64**3 / 1e3 + 1.0,
    }
    for name, duration_us in want_us.items():
        assert abs(cost(analysis.nodes[find(analysis, name)]) - duration_us) < 1e-9, name


def test_other_nodes_are_predicted_by_their_bytes_and_views_are_free() -> None:
    b = GraphBuilder()
    x = b.input("x", 1000)
    neg = b.call(aten.neg.default, x, name="neg")
    b.call(aten.view.default, neg, [10, 100], name="view")
    b.all_to_all(neg, "a2a")
    analysis = b.done(neg)
    times = {
        each.name: each.duration_us
        for each in operations(analysis, ProfiledCost(ROUND, sizes=SIZES))
    }
    # 8000 bytes at 1000 a microsecond; 4000 over a link of 10 a microsecond, after 20.
    assert times == {"x": 0, "neg": 8.0, "view": 0, "a2a": 420.0, "wait_a2a": 0, "output": 0}


def test_collectives_are_predicted_by_what_crosses_the_wire() -> None:
    """4000 bytes of each of 4 ranks, 10 a microsecond after 20."""
    b, cost = GraphBuilder(), ProfiledCost(ROUND, sizes=SIZES)
    x = b.input("x", 1000)
    reduced, _ = b.all_reduce(x, "reduced")
    scattered = b.call(c10d.reduce_scatter_tensor.default, x, "sum", 4, GROUP)
    all_gathered = b.call(c10d.all_gather_into_tensor.default, x, 4, GROUP)
    all_gathered.meta["val"] = torch.empty(4000)
    exchanged, _ = b.all_to_all(x, "exchanged")
    times_us = [cost(node) for node in (exchanged, scattered, all_gathered, reduced)]
    assert times_us == [420.0, 420.0, 1620.0, 820.0]


def test_table_is_asked_first_and_what_it_lacks_is_noted(tmp_path: Path) -> None:
    analysis = _gemms()
    node, other = analysis.nodes[find(analysis, "mm")], analysis.nodes[find(analysis, "bmm")]
    path = tmp_path / "profiles.jsonl"
    ProfileTable(path, HERE).add_time(node_key(node, SIZES), 7.0)
    ProfileTable(path, HERE).add_curve(ALL_TO_ALL, Curve(((64, 3.0), (256, 9.0))))
    cost = ProfiledCost(ROUND, sizes=SIZES, table=ProfileTable(path, HERE, offline=True))
    assert cost(node) == 7.0
    assert cost.predicted == set()
    assert cost(other) == 37.0
    assert cost.predicted == {"aten.bmm.default(float32[3,20,30], float32[3,30,10])"}
    _, layers = two_layers()
    assert abs(cost(layers.nodes[find(layers, "a2a_0")]) - 9.0) < 1e-9  # 256 bytes


def test_operators_are_measured_once_and_collectives_never() -> None:
    analysis = _gemms()
    node = analysis.nodes[find(analysis, "mm")]
    table = ProfileTable(None, HERE)
    cost = ProfiledCost(ROUND, sizes=SIZES, table=table, device=torch.device("cpu"))
    first = cost(node)
    assert first == cost(node) == table.time_us(node_key(node, SIZES))
    assert cost.predicted == set()
    _, layers = two_layers()
    assert abs(cost(layers.nodes[find(layers, "a2a_0")]) - 45.6) < 1e-9  # 20, and 256 bytes


def test_operators_are_measured_with_values_where_a_compiler_traces_without() -> None:
    b = GraphBuilder()
    x = b.input("x", 1024, 1024)
    analysis = b.done(b.mm(x, x, name="mm"))
    table = ProfileTable(None, HERE)
    cost = ProfiledCost(ROUND, sizes=SIZES, table=table, device=torch.device("cpu"))
    with without_values():
        measured_us = cost(analysis.nodes[find(analysis, "mm")])
    assert measured_us > 2 * 1024**3 / 4e6  # no CPU here makes 4 TFLOP/s
    product = torch.ones(1024, 1024)
    alone_us = measure_us(lambda: product @ product, device=torch.device("cpu"))
    assert alone_us / 5 < measured_us < alone_us * 5


def test_attention_is_predicted_by_its_gemms() -> None:
    """Two of 16 x 16 pairs and 8 columns for each of 2 * 3 heads, five backward; half if causal."""
    b, cost = GraphBuilder(), ProfiledCost(ROUND, sizes=SIZES)
    q, k, v, out, grad = (b.input(each, 2, 3, 16, 8) for each in ("q", "k", "v", "out", "grad"))
    sums = b.input("sums", 2, 3, 16)
    forward, backward = (
        getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{name}").default
        for name in ("", "_backward")
    )
    for is_causal, share in ((False, 1.0), (True, 0.5)):
        ahead = b.graph.call_function(forward, (q, k, v, 0.0, is_causal))
        back = b.graph.call_function(backward, (grad, q, k, v, out, sums, 0.0, is_causal))
        gemm_us = 2 * 2 * 3 * 16 * 16 * 8 / 1e3
        assert cost(ahead) == pytest.approx(share * 2 * gemm_us + 1.0)
        assert cost(back) == pytest.approx(share * 5 * gemm_us + 1.0)


@pytest.mark.parametrize("name", GPU_ATTENTIONS)
def test_attention_has_one_key_wherever_it_is_traced(name: str) -> None:
    b = GraphBuilder()
    q, k, v = (b.input(each, 2, 3, 16, 8) for each in "qkv")
    here = b.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, True)
    operator = operator_of(name)
    names = [argument.name for argument in operator._schema.arguments[:7]]
    values = dict(zip(names, (q, k, v), strict=False), dropout_p=0.0, is_causal=True)
    values |= {"attn_bias": None, "compute_log_sumexp": True}
    there = b.graph.call_function(operator, tuple(values.get(each, False) for each in names))
    other = b.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, False)
    key = "attention(float32[2,3,16,8], float32[2,3,16,8], float32[2,3,16,8]) True"
    assert node_key(here, SIZES) == node_key(there, SIZES) == key
    assert node_key(other, SIZES) != key


def test_operator_that_refuses_examples_is_predicted_after_a_warning() -> None:
    b = GraphBuilder()
    analysis = b.done(b.call(aten.linalg_cholesky.default, b.input("x", 40, 50, 50), name="root"))
    node, table = analysis.nodes[find(analysis, "root")], ProfileTable(None, HERE)
    cost = ProfiledCost(ROUND, sizes=SIZES, table=table, device=torch.device("cpu"))
    key = "aten.linalg_cholesky.default(float32[40,50,50])"
    with pytest.warns(UserWarning, match=r"halley predicts aten.linalg_cholesky.default\(float32"):
        first = cost(node)
    assert first == cost(node) == 2 * 40 * 50 * 50 * 4 / 1e3  # bytes in and out; nothing warns now
    assert cost.predicted == {key}
    assert table.time_us(key) is None


def test_places_of_examples_are_spread_over_the_table() -> None:
    b = GraphBuilder()
    table, rows = b.input("table", 50, 8), b.input("rows", 20, 8)
    places = b.input("places", 20)
    places.meta["val"] = places.meta["val"].to(torch.int64)
    nodes = (
        b.call(aten.embedding.default, table, places, name="embedding"),
        b.graph.call_function(aten.index.Tensor, (table, [places])),
        b.graph.call_function(aten.index_put.default, (table, [places], rows, True)),
    )
    for node in nodes:
        (_, given, *_), _ = example_arguments(node, torch.device("cpu"), SIZES)
        (found,) = given if isinstance(given, tuple | list) else (given,)
        assert found.unique().numel() == 20
        assert 0 <= found.min() <= found.max() < 50
    sums = b.graph.call_function(aten.scatter_add.default, (table, 0, places, rows))
    assert not example_arguments(sums, torch.device("cpu"), SIZES)[0][2].any()


def test_host_takes_longer_for_calls_than_for_kernels_and_waits_for_what_it_reads() -> None:
    fast = dataclasses.replace(ROUND.hardware, call_us=30.0, collective_us=100.0)
    b = GraphBuilder()
    x, w = b.input("x", 40, 50), b.input("w", 50, 60)
    product, sine = b.mm(x, w, name="mm"), b.call(aten.sin.default, x, name="sin")
    start, _ = b.all_to_all(sine, "a2a")
    analysis = b.done(product, start)
    cost = ProfiledCost(Predictor(fast), sizes=SIZES)
    assert [host_us(node, cost) for node in (product, sine, start)] == [30.0, 30.0, 100.0]
    cost.boundaries = find_boundaries(b.graph, SIZES)
    assert [host_us(node, cost) for node in (product, sine, start)] == [30.0, 10.0, 100.0]
    assert [each.host_us for each in operations(analysis, cost) if each.role == "free"] == [0.0] * 3
    assert host_us(product, lambda node: 1.0) == 0.0
    called = ProfiledCost(Predictor(dataclasses.replace(fast, graph_us=700.0)), sizes=SIZES)
    firsts = [each.host_us for each in operations(analysis, called) if each.duration_us]
    assert firsts == [730.0, 30.0, 100.0]  # once, before the first

    with FakeTensorMode():
        read = b.graph.call_function(aten._to_copy.default, (x,))
        x.meta["val"], read.meta["val"] = torch.empty(4, device="cuda"), torch.empty(4)
        sine.meta["val"] = torch.empty(4, device="cuda")
    assert is_read(read)
    assert not is_read(sine)
    assert cost(read) == 2.0


def test_counts_are_read_where_no_device_says_so() -> None:
    b = GraphBuilder()
    counts = b.input("counts", 2, 3)
    read = b.graph.call_function(torch.ops.halley.read_counts.default, (counts, counts))
    read.meta["val"] = (torch.empty(2), torch.empty(2))
    assert is_read(read)
    assert ProfiledCost(ROUND, sizes=SIZES)(read) == 2.0


def test_contention_is_read_from_the_table(tmp_path: Path) -> None:
    path = tmp_path / "profiles.jsonl"
    assert ProfiledCost(ROUND, sizes=SIZES).contention == Contention()
    ProfileTable(path, HERE).add_contention(Contention(compute=1.25, comm=1.5))
    other = Environment(device="cpu", versions="torch 2")
    ProfileTable(path, other).add_contention(Contention(compute=9.0))
    cost = ProfiledCost(ROUND, sizes=SIZES, table=ProfileTable(path, HERE, offline=True))
    assert cost.contention == Contention(compute=1.25, comm=1.5)


def test_fused_operators_take_the_longer_of_gemm_and_wire() -> None:
    importlib.import_module("halley.fused.op")  # defines the operators
    halley = torch.ops.halley
    b = GraphBuilder()
    x, up, down = b.input("x", 10, 40), b.input("up", 4, 60, 40), b.input("down", 4, 40, 1000)
    idx, plan = b.input("idx", 10, 3), b.input("plan", 16)
    h, dy = b.input("h", 30, 1000), b.input("dy", 10, 40)

    def call(target: Any, name: str, *args: Any) -> fx.Node:
        node = b.graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = torch.empty(10, 40, device="meta")
        return node

    both = call(halley.fused_experts.default, "both", x, idx, up, down, idx, True, True, "", 0)
    back = call(
        halley.fused_experts_backward.default, "back", dy, h, plan, h, up, down, idx, plan,
        True, True, "all", 0,
    )  # fmt: skip
    analysis, cost = b.done(both, back), ProfiledCost(ROUND, sizes=SIZES)
    times_us = {name: cost(analysis.nodes[find(analysis, name)]) for name in ("both", "back")}
    # 30 rows of 40 float32 travel in 20 + 480 us. GEMMs: 30 x 40 x 60 in 144 us, x 1000 in
    # 2400. A launch is 5.
    assert times_us == pytest.approx({"both": 2905.0, "back": 2905.0})
