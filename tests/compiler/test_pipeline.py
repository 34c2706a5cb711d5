"""Test the passes on graphs of one process, the graphs that they keep, and reserved SMs."""

import warnings

import pytest
import torch
from torch import fx

from halley.compiler import node_cost, run
from halley.compiler.options import Options
from halley.compiler.pipeline import reorder, reserve_sms, run_passes
from halley.cost.simulate import Contention
from halley.ops.sm_carveout import gemm_with_carveout
from tests.compiler.graph_case import GraphBuilder, aten, c10d, find, three_layers


ALONE = Options(agree=False, memory_margin=1.0)


def test_weight_gradients_move_under_all_to_alls() -> None:
    b, _ = three_layers()
    module = fx.GraphModule(torch.nn.Module(), b.graph)
    report = run(module, options={"agree": False, "memory_margin": 1.0})
    assert report is not None
    assert report.windows == {"a2a_0": ("dw_0",), "a2a_1": ("dw_1",)}
    assert report.time_after.makespan_us < report.time_before.makespan_us
    code = module.code
    assert code.index("a2a_0 =") < code.index("dw_0 =") < code.index("wait_a2a_0 =")


def test_graph_keeps_its_order_without_collectives_and_without_passes() -> None:
    b, analysis = three_layers()
    assert run_passes(b.graph, Options(passes="none", agree=False)) is None
    assert list(b.graph.nodes) == analysis.nodes
    b = GraphBuilder()
    x = b.input("x", 4, 4)
    analysis = b.done(b.mm(x, b.mm(x, x)))
    assert run(fx.GraphModule(torch.nn.Module(), b.graph)) is None
    assert list(b.graph.nodes) == analysis.nodes


def test_unknown_collective_warns_once_and_changes_nothing() -> None:
    b, analysis = three_layers()
    operator, x = torch.ops.symm_mem.one_shot_all_reduce.default, analysis.nodes[0]
    with b.graph.inserting_before(analysis.nodes[-1]):
        for _ in range(2):
            b.graph.call_function(operator, (x, "sum", "0"))
        b.graph.call_function(c10d.isend.default, (x, 0, 0, "0"))
    before = list(b.graph.nodes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run_passes(b.graph, ALONE) is None
    assert [str(warning.message) for warning in caught] == [
        "halley does not change a graph, because it does not know how these operators "
        "communicate: _c10d_functional::isend, symm_mem::one_shot_all_reduce"
    ]
    assert list(b.graph.nodes) == before


def test_illegal_orders_raise_and_change_nothing() -> None:
    b, analysis = three_layers()
    order = list(range(len(analysis.nodes)))
    dx, a2a = find(analysis, "dx_0"), find(analysis, "a2a_0")
    swapped = order.copy()
    swapped[dx], swapped[a2a] = a2a, dx
    for wrong, message in (
        (swapped, r"a2a_0 must come after \['dx_0'\]"),
        (order[:-1], "each node of its graph once"),
        ([*order[:-1], order[0]], "each node of its graph once"),
        ([order[1], order[0], *order[2:]], "inputs must come first"),
    ):
        with pytest.raises(RuntimeError, match=message):
            reorder(b.graph, analysis, wrong)
        assert list(b.graph.nodes) == analysis.nodes


def test_missing_file_of_profiles_is_an_error() -> None:
    b, analysis = three_layers()
    with pytest.raises(ValueError, match=r"profiles \(/nowhere\) must be a file unless measure is"):
        run_passes(b.graph, Options(agree=False, profiles="/nowhere"))
    assert list(b.graph.nodes) == analysis.nodes


def test_order_that_is_predicted_to_be_slower_is_not_used(monkeypatch) -> None:
    """All-to-alls and GEMMs slow each other down by more than the hidden time."""
    b, analysis = three_layers()
    monkeypatch.setattr(node_cost, "NO_CONTENTION", Contention(compute=4.0, comm=4.0))
    report = run_passes(b.graph, ALONE)
    assert report is not None
    assert list(b.graph.nodes) == analysis.nodes
    assert report.time_after == report.time_before


def _build() -> GraphBuilder:
    """Return a graph with GEMMs before, inside and after the overlap window of an all-to-all."""
    b = GraphBuilder()
    x, w, bias = b.input("x", 8, 8), b.input("w", 8, 8), b.input("bias", 8)
    _, wait = b.all_to_all(b.mm(x, w, name="ahead"), "rows")
    with b.graph.inserting_before(wait):
        beside = b.mm(x, w, name="beside")
        biased = b.call(aten.addmm.default, bias, x, w, name="biased")
        other = b.call(aten.mul.Tensor, x, w, name="other")
    b.done(beside, biased, other, b.mm(wait, w, name="behind"))
    return b


def _margins(graph: fx.Graph) -> dict[str, object]:
    """Return the number of reserved SMs of GEMMs by name."""
    gemms = graph.find_nodes(op="call_function", target=gemm_with_carveout)
    return {node.name: node.args[-1] for node in gemms}


@pytest.mark.parametrize(
    ("margins", "in_all", "changed"),
    [
        ((12, 0), False, ["beside", "biased"]),
        ((12, 0), True, ["ahead", "beside", "biased", "behind"]),
        ((0, 16), True, []),
    ],
)
def test_gemms_in_the_window_or_all_are_replaced_in_place(margins, in_all, changed) -> None:
    b = _build()
    order = [node.name for node in b.graph.nodes]
    reserve_sms(b.graph, margins, in_all=in_all)
    assert _margins(b.graph) == dict.fromkeys(changed, 12)
    assert [node.name for node in b.graph.nodes] == order
    args = {node.name: [getattr(arg, "name", arg) for arg in node.args] for node in b.graph.nodes}
    if changed:
        assert args["beside"] == [None, "x", "w", None, 12]
        assert args["biased"] == ["bias", "x", "w", None, 12]


def _grouped(operator: object, left: torch.Tensor, right: torch.Tensor, *rest: object) -> fx.Graph:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("left", "right", "ends")]
    for node, value in zip(nodes, (left, right, torch.empty(3, dtype=torch.int32)), strict=True):
        node.meta["val"] = value
    graph.output(graph.call_function(operator, (*nodes, *rest)))  # pyright: ignore[reportArgumentType]
    return graph


@pytest.mark.parametrize("name", ["expert_gemm", "expert_weight_gemm", "_grouped_mm"])
def test_grouped_gemms_keep_their_values(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 32, generator=generator)
    other = torch.randn(*((12, 16) if "weight" in name else (3, 32, 16)), generator=generator)
    ends = torch.tensor([5, 5, 12], dtype=torch.int32)
    library = torch.ops.aten if name == "_grouped_mm" else torch.ops.halley
    graph = _grouped(getattr(library, name).default, rows, other)
    want = fx.GraphModule({}, graph)(rows, other, ends)
    reserve_sms(graph, (4, 8), in_all=True)
    assert list(_margins(graph).values()) == [8]
    torch.testing.assert_close(fx.GraphModule({}, graph)(rows, other, ends), want)


def test_gemm_with_other_arguments_is_not_changed() -> None:
    graph = _grouped(
        torch.ops.aten._grouped_mm.default, torch.empty(12, 32), torch.empty(3, 32, 16),
        torch.empty(16),
    )  # fmt: skip
    reserve_sms(graph, (4, 8), in_all=True)
    assert _margins(graph) == {}
