"""Test the lowering of in-place concat: equal bits, and no copy where a GEMM can write in place."""

from collections import Counter
from typing import Any

import torch
from torch import fx

from halley.compiler.graph_analysis import is_buffer_write
from halley.compiler.partition.divide import divide
from halley.compiler.partition.segment import Segment, find_segment
from halley.compiler.sizes import Sizes
from halley.compiler.writes import lower_writes
from halley.ops.sm_carveout import gemm_into
from tests.compiler.captured_case import Captured, compute_nodes


ATEN = torch.ops.aten
NUM_PARTS = 3


def _find_gemms(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target in (ATEN.addmm.default, ATEN.mm.default)]


def _lower(rank: int, num_ranks: int) -> tuple[list[bool], Counter[str], dict[str, int]]:
    """Return which outputs are equal, the number of calls of each operator, and of GEMMs."""
    case = Captured("switch")
    want = case.run(case.graph())
    graph = case.graph()
    flow = case.flow(graph)
    segment = find_segment(flow, compute_nodes(graph))
    assert isinstance(segment, Segment), segment
    divide(graph, flow, [(segment, NUM_PARTS)], sizes=Sizes(64))
    before = _find_gemms(graph)
    num_written = sum(any(map(is_buffer_write, node.users)) for node in before)
    lower_writes(graph, Sizes(64))
    found: list[Any] = case.run(graph)
    same = [
        torch.equal(a, b) and a.stride() == b.stride() if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(found, want, strict=True)
    ]
    gemms = {"before": len(before), "written": num_written, "after": len(_find_gemms(graph))}
    return same, Counter(str(node.target) for node in graph.nodes), gemms


def test_microbatches_are_written_in_place(run_ranks) -> None:
    ((same, calls, gemms),) = run_ranks(_lower, 1, timeout_s=120.0)
    assert all(same)
    assert calls["halley.write_slice.default"] == calls["halley.write_rows.default"] == 0
    assert calls["aten.index_put_.default"] > 0
    assert calls["aten.copy_.default"] > 0
    # GEMMs write into the full tensor, and are not computed a second time.
    assert gemms["written"] > 0
    assert calls[str(gemm_into)] == gemms["written"]
    assert gemms["after"] == gemms["before"] - gemms["written"]


def test_later_readers_read_the_full_tensor() -> None:
    """The microbatch is then not in memory twice. Readers in its own kernel keep reading it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    full = graph.call_function(ATEN.new_empty_strided.default, (x, (4, 2), (2, 1)))
    part = graph.call_function(ATEN.exp.default, (x,))
    early = graph.call_function(ATEN.mm.default, (part, x))
    write = graph.call_function(torch.ops.halley.write_slice.default, (full, part, 0, 2))
    beside = graph.call_function(ATEN.sin.default, (part,))
    late = graph.call_function(ATEN.mm.default, (part, x))
    behind = graph.call_function(ATEN.add.Tensor, (late, part))
    graph.output((early, beside, late, behind, write))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4 if node in (full, write) else 2, 2)
    lower_writes(graph, Sizes(64))
    (copy,) = graph.find_nodes(op="call_function", target=ATEN.copy_.default)
    place, copied = copy.args
    assert copied is part
    assert [node.args for node in (early, beside)] == [(part, x), (part,)]
    assert [node.args for node in (late, behind)] == [(place, x), (late, place)]
    given = torch.ones(2, 2)
    _, _, ran_late, ran_behind, ran_full = fx.GraphModule({}, graph)(given)
    assert torch.equal(ran_late, given.exp() @ given)
    assert torch.equal(ran_behind, ran_late + given.exp())
    assert torch.equal(ran_full[2:], given.exp())


def _gemm() -> tuple[fx.Graph, fx.Node, fx.Node]:
    """Return a graph, its first input, and a GEMM of its inputs with shape (2, 3)."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    gemm = graph.call_function(ATEN.mm.default, (x, w))
    for node, shape in ((x, (2, 4)), (w, (4, 3)), (gemm, (2, 3))):
        node.meta["val"] = torch.empty(shape)
    return graph, x, gemm


def test_gemm_with_earlier_readers_runs_once() -> None:
    """The buffer is allocated before the GEMM, which writes into it."""
    graph, x, gemm = _gemm()
    early = graph.call_function(ATEN.sin.default, (gemm,))
    early.meta["val"] = torch.empty(2, 3)
    full = graph.call_function(ATEN.new_empty_strided.default, (x, (4, 3), (3, 1)))
    full.meta["val"] = torch.empty(4, 3)
    write = graph.call_function(torch.ops.halley.write_slice.default, (full, gemm, 0, 2))
    graph.output((early, write))
    lower_writes(graph, Sizes(64))
    assert _find_gemms(graph) == []
    assert len(graph.find_nodes(op="call_function", target=gemm_into)) == 1
    inputs = torch.ones(2, 4), torch.randn(4, 3)
    ran_early, ran_full = fx.GraphModule({}, graph)(*inputs)
    assert torch.equal(ran_full[2:], torch.mm(*inputs))
    assert torch.equal(ran_early, torch.mm(*inputs).sin())


def test_gemm_before_the_size_of_its_buffer_is_known_is_copied() -> None:
    graph, _, gemm = _gemm()
    size = graph.call_function(ATEN.sym_size.int, (gemm, 0))
    size.meta["val"] = 2
    full = graph.call_function(ATEN.empty_strided.default, ((size, 3), (3, 1)))
    full.meta["val"] = torch.empty(2, 3)
    graph.output(graph.call_function(torch.ops.halley.write_slice.default, (full, gemm, 0, 0)))
    lower_writes(graph, Sizes(64))
    assert len(_find_gemms(graph)) == 1
    assert graph.find_nodes(op="call_function", target=gemm_into) == []
    inputs = torch.ones(2, 4), torch.randn(4, 3)
    assert torch.equal(fx.GraphModule({}, graph)(*inputs), torch.mm(*inputs))
