"""Times of nodes: predicted (worked out by hand), read from a table, or measured once."""

import dataclasses
import importlib
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import halley.moe.head_loss
import halley.ops.traceable_routing  # noqa: F401
from halley.compiler.fusion import find_boundaries
from halley.compiler.graph_analysis import GraphAnalysis, Sizes, without_values
from halley.compiler.node_cost import ProfiledCost, example_arguments, is_read, node_key, operations
from halley.cost.hardware import CPU, Environment, Predictor
from halley.cost.profiles import Curve, ProfileTable, measure_us
from halley.cost.simulate import NO_CONTENTION, Contention
from tests.compiler.graph_case import GROUP, GraphBuilder, aten, c10d, find, three_layers


SIZES = Sizes(1)
HERE = Environment(device="cpu", versions="torch 1")
ALL_TO_ALL = "_c10d_functional::all_to_all_single"
RATES = {"gemm_flops_per_s": 1e9, "memory_bytes_per_s": 1e9, "link_bytes_per_s": 1e7}
TIMES_US = {"link_latency_us": 20.0, "launch_us": 5.0, "kernel_us": 1.0, "read_us": 2.0}
ROUND = Predictor(dataclasses.replace(CPU, **RATES, **TIMES_US))


def _gemms() -> GraphAnalysis:
    b = GraphBuilder()
    x, w = b.input("x", 40, 50), b.input("w", 50, 60)
    stacked, weights = b.input("stacked", 3, 20, 30), b.input("weights", 3, 30, 10)
    gemm = b.mm(x, w, name="mm")
    batched = b.call(aten.bmm.default, stacked, weights, name="bmm")
    added = b.call(aten.addmm.default, b.input("bias", 60), x, w, name="addmm")
    square = b.mm(weights_2d := b.input("square", 64, 64), weights_2d, name="mm_square")
    return b.done(gemm, batched, added, square)


def test_gemms_are_predicted_by_their_arithmetic() -> None:
    analysis, cost = _gemms(), ProfiledCost(ROUND, sizes=SIZES)
    flops = {"mm": 2 * 40 * 50 * 60, "bmm": 2 * 3 * 20 * 30 * 10, "mm_square": 2 * 64**3}
    for name, num_flops in (*flops.items(), ("addmm", flops["mm"])):
        node = analysis.nodes[find(analysis, name)]
        assert cost(node) == pytest.approx(num_flops / 1e3 + 1.0), name


def test_other_nodes_are_predicted_by_their_bytes_and_views_are_free() -> None:
    b = GraphBuilder()
    neg = b.call(aten.neg.default, b.input("x", 1000), name="neg")
    b.call(aten.view.default, neg, [10, 100], name="view")
    b.all_to_all(neg, "a2a")
    analysis = b.done(neg)
    timed = operations(analysis, ProfiledCost(ROUND, sizes=SIZES))
    times = {each.name: each.duration_us for each in timed}
    # 8000 bytes at 1000 bytes in 1 us. 4000 bytes on a link of 10 bytes in 1 us, after 20 us.
    assert times == {"x": 0, "neg": 8.0, "view": 0, "a2a": 420.0, "wait_a2a": 0, "output": 0}


def test_collectives_are_predicted_by_the_bytes_on_the_link() -> None:
    """Each of 4 ranks sends 4000 bytes, at 10 bytes in 1 us, after a latency of 20 us."""
    b, cost = GraphBuilder(), ProfiledCost(ROUND, sizes=SIZES)
    x = b.input("x", 1000)
    reduced, _ = b.all_reduce(x, "reduced")
    scattered = b.call(c10d.reduce_scatter_tensor.default, x, "sum", 4, GROUP)
    from_all_gather = b.opaque(c10d.all_gather_into_tensor.default, x, 4, GROUP, shape=(4000,))
    exchanged, _ = b.all_to_all(x, "exchanged")
    times_us = [cost(node) for node in (exchanged, scattered, from_all_gather, reduced)]
    assert times_us == [420.0, 420.0, 1620.0, 820.0]


def test_table_has_priority_and_missing_keys_are_reported(tmp_path: Path) -> None:
    analysis, (_, layers) = _gemms(), three_layers()
    node, other = analysis.nodes[find(analysis, "mm")], analysis.nodes[find(analysis, "bmm")]
    path = tmp_path / "profiles.jsonl"
    table = ProfileTable(path, HERE)
    table.add_time(node_key(node, SIZES), 7.0)
    table.add_curve(ALL_TO_ALL, Curve(((64, 3.0), (256, 9.0))))
    table.add_contention(Contention(compute=1.25, comm=1.5))
    cost = ProfiledCost(ROUND, sizes=SIZES, table=ProfileTable(path, HERE, offline=True))
    assert cost(node) == 7.0
    assert cost(layers.nodes[find(layers, "a2a_0")]) == pytest.approx(9.0)  # 256 bytes
    assert cost.contention == Contention(compute=1.25, comm=1.5)
    assert cost.predicted == set()
    assert cost(other) == 37.0
    assert cost.predicted == {"aten.bmm.default(float32[3,20,30], float32[3,30,10])"}
    assert ProfiledCost(ROUND, sizes=SIZES).contention == NO_CONTENTION


def test_operators_are_measured_once_with_values_and_collectives_never() -> None:
    b = GraphBuilder()
    x = b.input("x", 512, 512)
    node, table = b.mm(x, x), ProfileTable(None, HERE)
    cost = ProfiledCost(ROUND, sizes=SIZES, table=table, device=torch.device("cpu"))
    with without_values():  # a compiler traces without values around the call
        measured_us = cost(node)
    ones = torch.ones(512, 512)
    alone_us = measure_us(lambda: ones @ ones, device=torch.device("cpu"))
    assert alone_us / 5 < measured_us < alone_us * 5
    assert measured_us == cost(node) == table.time_us(node_key(node, SIZES))
    assert cost.predicted == set()
    _, layers = three_layers()
    assert abs(cost(layers.nodes[find(layers, "a2a_0")]) - 45.6) < 1e-9  # 20 us, and 256 bytes


def test_attention_is_predicted_by_its_gemms() -> None:
    """Two GEMMs of 16 x 16 x 8 for each of 2 * 3 heads, five in backward; half of it if causal."""
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


def test_head_is_predicted_by_its_gemms() -> None:
    b, cost = GraphBuilder(), ProfiledCost(ROUND, sizes=SIZES)
    hidden, weight = b.input("hidden", 40, 50), b.input("weight", 60, 50)
    targets = b.call(aten.argmax.default, hidden, 1, name="targets")
    head = torch.ops.halley.head_loss.default
    for with_gradients, num_gemms in ((False, 1), (True, 3)):
        loss = b.call(head, hidden, weight, targets, 16, with_gradients, name="loss")
        assert cost(loss) == pytest.approx(num_gemms * 2 * 40 * 50 * 60 / 1e3 + 1.0)


def test_attention_has_one_key_on_all_devices() -> None:
    b = GraphBuilder()
    q, k, v = (b.input(each, 2, 3, 16, 8) for each in "qkv")
    on_cpu = [
        b.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, is_causal)
        for is_causal in (False, True)
    ]
    key = "attention(float32[2,3,16,8], float32[2,3,16,8], float32[2,3,16,8])"
    assert [node_key(node, SIZES) for node in on_cpu] == [f"{key} False", f"{key} True"]
    values = {"query": q, "key": k, "value": v, "dropout_p": 0.0, "is_causal": True}
    values |= {"attn_bias": None, "compute_log_sumexp": True}
    for name in ("flash", "efficient", "cudnn"):
        operator = getattr(aten, f"_scaled_dot_product_{name}_attention").default
        arguments = [values.get(each.name, False) for each in operator._schema.arguments[:7]]
        on_gpu = b.graph.call_function(operator, tuple(arguments))
        assert node_key(on_gpu, SIZES) == f"{key} True", operator


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


def test_example_indices_are_spread_over_the_table() -> None:
    b = GraphBuilder()
    table, rows, places = b.input("table", 50, 8), b.input("rows", 20, 8), b.input("places", 20)
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


def test_host_time_depends_on_how_a_node_is_launched() -> None:
    fast = dataclasses.replace(ROUND.hardware, call_us=30.0, collective_us=100.0)
    b = GraphBuilder()
    x, w = b.input("x", 40, 50), b.input("w", 50, 60)
    gemm, sine = b.mm(x, w, name="mm"), b.call(aten.sin.default, x, name="sin")
    start, _ = b.all_to_all(sine, "a2a")
    analysis = b.done(gemm, start)
    cost = ProfiledCost(Predictor(fast), sizes=SIZES)
    assert [cost.host_us(node) for node in (gemm, sine, start)] == [30.0, 30.0, 100.0]
    cost = ProfiledCost(Predictor(fast), sizes=SIZES, boundaries=find_boundaries(b.graph, SIZES))
    assert [cost.host_us(node) for node in (gemm, sine, start)] == [30.0, 10.0, 100.0]
    assert [each.host_us for each in operations(analysis, cost) if each.role == "free"] == [0.0] * 3
    called = ProfiledCost(Predictor(dataclasses.replace(fast, graph_us=700.0)), sizes=SIZES)
    firsts = [each.host_us for each in operations(analysis, called) if each.duration_us]
    assert firsts == [730.0, 30.0, 100.0]  # once, before the first


def test_copies_to_the_host_are_reads() -> None:
    b = GraphBuilder()
    x, counts = b.input("x", 4), b.input("counts", 2, 3)
    cost = ProfiledCost(ROUND, sizes=SIZES)
    sine = b.call(aten.sin.default, x)
    with FakeTensorMode():
        copied = b.graph.call_function(aten._to_copy.default, (x,))
        x.meta["val"], copied.meta["val"] = torch.empty(4, device="cuda"), torch.empty(4)
        sine.meta["val"] = torch.empty(4, device="cuda")
    # A plan for a GPU that is made on a CPU has no CUDA tensors.
    read = b.graph.call_function(torch.ops.halley.read_counts.default, (counts, counts))
    read.meta["val"] = (torch.empty(2), torch.empty(2))
    assert [is_read(node) for node in (copied, read, sine)] == [True, True, False]
    assert cost(copied) == cost(read) == 2.0


def test_half_of_a_fused_layer_takes_the_longer_of_gemm_and_link() -> None:
    importlib.import_module("halley.fused.op")  # defines the operators
    halley = torch.ops.halley
    b = GraphBuilder()
    x, up, down = b.input("x", 10, 40), b.input("up", 4, 60, 40), b.input("down", 4, 40, 1000)
    idx, plan = b.input("idx", 10, 3), b.input("plan", 16)
    h, dy = b.input("h", 30, 1000), b.input("dy", 10, 40)
    call = partial(b.opaque, shape=(10, 40))
    both = call(halley.fused_experts.default, x, idx, up, down, idx, True, True, "", 0, name="both")
    back = call(
        halley.fused_experts_backward.default, dy, h, plan, h, up, down, idx, plan,
        True, True, "all", 0, name="back",
    )  # fmt: skip
    analysis, cost = b.done(both, back), ProfiledCost(ROUND, sizes=SIZES)
    times_us = {name: cost(analysis.nodes[find(analysis, name)]) for name in ("both", "back")}
    # 30 rows of 40 float32 take 20 + 480 us on the link. GEMMs: 30 x 40 x 60 takes 144 us,
    # 30 x 40 x 1000 takes 2400 us. A launch takes 5 us.
    assert times_us == pytest.approx({"both": 2905.0, "back": 2905.0})
