"""Test which GEMMs leave SMs free: those in an overlap window, or all."""

import pytest
import torch
from torch import fx

from halley.compiler.reserved_sms import reserve_sms
from halley.ops.sm_carveout import gemm_into, gemm_with_carveout
from tests.compiler.graph_case import GraphBuilder, aten


def _build() -> GraphBuilder:
    """Return a graph with GEMMs before, inside and after the overlap window of an all-to-all."""
    b = GraphBuilder()
    x, w, bias = b.input("x", 8, 8), b.input("w", 8, 8), b.input("bias", 8)
    ahead = b.mm(x, w, name="ahead")
    _, wait = b.all_to_all(ahead, "rows")
    with b.graph.inserting_before(wait):
        beside = b.mm(x, w, name="beside")
        biased = b.call(aten.addmm.default, bias, x, w, name="biased")
        other = b.call(aten.mul.Tensor, x, w, name="other")
        out = b.call(aten.empty.memory_format, [8, 8], name="out")
        b.call(gemm_into, out, None, x, w, 0, name="into")
    behind = b.mm(wait, w, name="behind")
    b.done(beside, biased, other, out, behind)
    return b


def _margins(graph: fx.Graph) -> dict[str, object]:
    """Return the number of reserved SMs of GEMMs by name."""
    gemms = [n for n in graph.nodes if n.target in (gemm_with_carveout, gemm_into)]
    return {node.name: node.args[-1] for node in gemms}


def test_gemms_in_the_window_are_replaced_in_place() -> None:
    b = _build()
    order = [node.name for node in b.graph.nodes]
    reserve_sms(b.graph, (12, 0))
    assert _margins(b.graph) == {"beside": 12, "biased": 12, "into": 12}
    assert [node.name for node in b.graph.nodes] == order
    args = {node.name: [getattr(arg, "name", arg) for arg in node.args] for node in b.graph.nodes}
    assert args["beside"] == [None, "x", "w", None, 12]
    assert args["biased"] == ["bias", "x", "w", None, 12]


def test_all_gemms_are_replaced_on_request() -> None:
    b = _build()
    reserve_sms(b.graph, (12, 0), in_all=True)
    assert _margins(b.graph).keys() == {"ahead", "beside", "biased", "into", "behind"}


def test_no_margin_changes_nothing() -> None:
    b = _build()
    before = str(b.graph)
    reserve_sms(b.graph, (0, 16), in_all=True)
    assert str(b.graph) == before


def _grouped(operator: object, left: torch.Tensor, right: torch.Tensor, *rest: object) -> fx.Graph:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("left", "right", "ends")]
    for node, value in zip(nodes, (left, right, torch.empty(3, dtype=torch.int32)), strict=True):
        node.meta["val"] = value
    gemm = graph.call_function(operator, (*nodes, *rest))  # pyright: ignore[reportArgumentType]
    graph.output(gemm)
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
        torch.ops.aten._grouped_mm.default,
        torch.empty(12, 32),
        torch.empty(3, 32, 16),
        torch.empty(16),
    )
    reserve_sms(graph, (4, 8), in_all=True)
    assert _margins(graph) == {}
