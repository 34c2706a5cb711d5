"""Parts written by operators that Inductor takes: the same bits, where they belong at once."""

from collections import Counter
from typing import Any

import torch
from torch import fx

from halley.compiler.graph_analysis import fills
from halley.compiler.partition.divide import divide
from halley.compiler.partition.region import Region, find_region
from halley.compiler.sizes import Sizes
from halley.compiler.writes import write_parts
from halley.ops.sm_carveout import gemm_into
from tests.compiler.captured_case import Captured, compute_nodes


ATEN = torch.ops.aten
NUM_PARTS = 3


def _find_gemms(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target in (ATEN.addmm.default, ATEN.mm.default)]


def _written(rank: int, num_ranks: int) -> tuple[list[bool], Counter[str], dict[str, int]]:
    """Return which outputs are equal, how often each operator is called, and products."""
    case = Captured("switch")
    want = case.run(case.graph())
    graph = case.graph()
    flow = case.flow(graph)
    region = find_region(flow, compute_nodes(graph))
    assert isinstance(region, Region), region
    divide(graph, flow, [(region, NUM_PARTS)], sizes=Sizes(64))
    before = _find_gemms(graph)
    num_filled = sum(any(map(fills, node.users)) for node in before)
    write_parts(graph, Sizes(64))
    found: list[Any] = case.run(graph)
    same = [
        torch.equal(a, b) and a.stride() == b.stride() if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(found, want, strict=True)
    ]
    gemms = {"before": len(before), "filled": num_filled, "after": len(_find_gemms(graph))}
    return same, Counter(str(node.target) for node in graph.nodes), gemms


def test_parts_are_written_where_they_belong(run_ranks) -> None:
    ((same, calls, gemms),) = run_ranks(_written, 1, timeout_s=120.0)
    assert all(same)
    assert calls["halley.write_slice.default"] == calls["halley.write_rows.default"] == 0
    assert calls["aten.index_put_.default"] > 0
    assert calls["aten.copy_.default"] > 0
    # Products go right into the whole, and nowhere else.
    assert gemms["filled"] > 0
    assert calls[str(gemm_into)] == gemms["filled"]
    assert gemms["after"] == gemms["before"] - gemms["filled"]


def test_what_follows_reads_the_whole() -> None:
    """So that a part which others read, too, is not in memory twice.

    What Inductor computes in the kernel that makes the part reads it there.
    """
    graph = fx.Graph()
    x = graph.placeholder("x")
    whole = graph.call_function(ATEN.new_empty_strided.default, (x, (4, 2), (2, 1)))
    part = graph.call_function(ATEN.exp.default, (x,))
    early = graph.call_function(ATEN.mm.default, (part, x))
    fill = graph.call_function(torch.ops.halley.write_slice.default, (whole, part, 0, 2))
    beside = graph.call_function(ATEN.sin.default, (part,))
    late = graph.call_function(ATEN.mm.default, (part, x))
    behind = graph.call_function(ATEN.add.Tensor, (late, part))
    graph.output((early, beside, late, behind, fill))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4 if node in (whole, fill) else 2, 2)
    write_parts(graph, Sizes(64))
    (copy,) = graph.find_nodes(op="call_function", target=ATEN.copy_.default)
    place, copied = copy.args
    assert copied is part
    assert [node.args for node in (early, beside)] == [(part, x), (part,)]
    assert [node.args for node in (late, behind)] == [(place, x), (late, place)]
    given = torch.ones(2, 2)
    _, _, ran_late, ran_behind, ran_whole = fx.GraphModule({}, graph)(given)
    assert torch.equal(ran_late, given.exp() @ given)
    assert torch.equal(ran_behind, ran_late + given.exp())
    assert torch.equal(ran_whole[2:], given.exp())


def test_gemm_that_others_read_first_runs_once() -> None:
    """It is computed where it belongs, in a buffer that is made before it."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"], w.meta["val"] = torch.ones(2, 4), torch.ones(4, 3)
    part = graph.call_function(ATEN.mm.default, (x, w))
    early = graph.call_function(ATEN.sin.default, (part,))
    for node in (part, early):
        node.meta["val"] = torch.empty(2, 3)
    whole = graph.call_function(ATEN.new_empty_strided.default, (x, (4, 3), (3, 1)))
    whole.meta["val"] = torch.empty(4, 3)
    fill = graph.call_function(torch.ops.halley.write_slice.default, (whole, part, 0, 2))
    graph.output((early, fill))
    write_parts(graph, Sizes(64))
    assert _find_gemms(graph) == []
    assert len(graph.find_nodes(op="call_function", target=gemm_into)) == 1
    inputs = torch.ones(2, 4), torch.randn(4, 3)
    ran_early, ran_whole = fx.GraphModule({}, graph)(*inputs)
    assert torch.equal(ran_whole[2:], torch.mm(*inputs))
    assert torch.equal(ran_early, torch.mm(*inputs).sin())


def test_part_ahead_of_what_its_buffer_needs_is_copied() -> None:
    """A size that is read behind a product: no product is told where to write, or runs twice."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"], w.meta["val"] = torch.ones(2, 4), torch.ones(4, 3)
    part = graph.call_function(ATEN.mm.default, (x, w))
    part.meta["val"] = torch.empty(2, 3)
    size = graph.call_function(ATEN.sym_size.int, (part, 0))
    size.meta["val"] = 2
    whole = graph.call_function(ATEN.empty_strided.default, ((size, 3), (3, 1)))
    whole.meta["val"] = torch.empty(2, 3)
    fill = graph.call_function(torch.ops.halley.write_slice.default, (whole, part, 0, 0))
    graph.output(fill)
    write_parts(graph, Sizes(64))
    assert len(_find_gemms(graph)) == 1
    assert graph.find_nodes(op="call_function", target=gemm_into) == []
    inputs = torch.ones(2, 4), torch.randn(4, 3)
    assert torch.equal(fx.GraphModule({}, graph)(*inputs), torch.mm(*inputs))
