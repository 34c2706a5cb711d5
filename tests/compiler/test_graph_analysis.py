"""Facts of graphs made by hand: kinds, what reaches what, and which orders are legal."""

import importlib
import operator
import types
from typing import Any

import pytest
import torch
from torch import fx

from halley.compiler.graph_analysis import GraphAnalysis, NodeKind, apply_order, bits, is_gemm
from halley.compiler.graph_collectives import (
    graph_groups,
    merge_waits,
    signature,
    unknown_collectives,
)
from halley.compiler.wgrad.movable_nodes import label
from tests.compiler.graph_case import GraphBuilder, aten, c10d, find, names, two_layers


def test_bits_ascend() -> None:
    assert list(bits(0b101001)) == [0, 3, 5]
    assert list(bits(0)) == []


def test_kinds_of_nodes() -> None:
    b = GraphBuilder()
    x = b.input("x", 4, 4)
    start, wait = b.all_to_all(x, "a2a")
    parts = b.call(aten.split.Tensor, wait, 2)
    part = b.call(operator.getitem, parts, 0)
    size = b.call(aten.sym_size.int, wait, 0)
    summed = b.call(aten.sum.default, part)
    copied = b.call(aten.view.default, b.call(aten.clone.default, part), [8])
    analysis = b.done(summed, copied)
    kinds = dict(zip(names(analysis, range(len(analysis.nodes))), analysis.kinds, strict=True))
    assert kinds == {
        "x": NodeKind.INPUT,
        start.name: NodeKind.START,
        wait.name: NodeKind.WAIT,
        parts.name: NodeKind.VIEW,
        part.name: NodeKind.VIEW,
        size.name: NodeKind.VIEW,
        summed.name: NodeKind.COMPUTE,
        "clone_default": NodeKind.COMPUTE,
        copied.name: NodeKind.VIEW,
        "output": NodeKind.OUTPUT,
    }


def test_what_was_waited_for_is_not_waited_for_again() -> None:
    b = GraphBuilder()
    _, wait = b.all_to_all(b.input("x", 4, 4), "a2a")
    again = b.call(c10d.wait_tensor.default, b.call(c10d.wait_tensor.default, wait))
    b.done(b.call(aten.neg.default, again, name="neg"))
    merge_waits(b.graph)
    assert [node.name for node in b.graph.nodes] == [
        "x", "a2a", "wait_a2a", "neg", "output",
    ]  # fmt: skip


def test_ancestors_and_descendants() -> None:
    _, analysis = two_layers()
    a2a = find(analysis, "a2a_1")
    above = names(analysis, bits(analysis.ancestors[a2a]))
    assert above == ["tangents_1", "primals_0", "primals_1", "dx_0", "a2a_0", "wait_a2a_0", "dx_1"]
    below = names(analysis, bits(analysis.descendants[a2a]))
    assert below == ["wait_a2a_1", "t_2", "dw_2", "out_2", "dx_2", "output"]


def test_graph_order_is_legal_and_others_are_named() -> None:
    _, analysis = two_layers()
    order = list(range(len(analysis.nodes)))
    analysis.check_order(order)
    dx, a2a = find(analysis, "dx_0"), find(analysis, "a2a_0")
    swapped = order.copy()
    swapped[dx], swapped[a2a] = a2a, dx
    with pytest.raises(RuntimeError, match=r"a2a_0 must come after \['dx_0'\]"):
        analysis.check_order(swapped)
    with pytest.raises(RuntimeError, match="each node of its graph once"):
        analysis.check_order(order[:-1])
    with pytest.raises(RuntimeError, match="each node of its graph once"):
        analysis.check_order([*order[:-1], order[0]])
    with pytest.raises(RuntimeError, match="inputs must come first"):
        analysis.check_order([order[1], order[0], *order[2:]])


def test_collectives_that_ranks_meet_in_keep_their_order() -> None:
    b = GraphBuilder()
    x, y = b.input("x", 4), b.input("y", 4)
    b.all_to_all(x, "first")
    b.all_to_all(y, "second")
    analysis = b.done(x)
    first, second = find(analysis, "first"), find(analysis, "second")
    assert analysis.ancestors[second] >> first & 1
    swapped = [0, 1, second, second + 1, first, first + 1, len(analysis.nodes) - 1]
    with pytest.raises(RuntimeError, match=r"second must come after \['first'\]"):
        analysis.check_order(swapped)


def test_fused_operators_keep_their_order_and_their_weight_gradient_moves() -> None:
    importlib.import_module("halley.fused.op")  # defines the operators
    halley = torch.ops.halley
    b = GraphBuilder()
    rows, plan = b.input("rows", 6, 8), b.input("plan", 16)

    def call(target: Any, name: str, *args: Any) -> fx.Node:
        node = b.graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = torch.empty(6, 8, device="meta")
        return node

    first = call(halley.fused_experts.default, "first", *[rows] * 5, True, True, "all", 0)
    b.all_to_all(rows, "a2a")
    gradient = call(halley.weight_gemm.default, "gradient", rows, rows, plan, plan, 2, 0)
    second = call(
        halley.fused_experts_backward.default, "second", *[rows] * 7, plan, True, True, "all", 0
    )
    analysis = b.done(first, gradient, second)
    kinds = {node.name: kind for node, kind in zip(analysis.nodes, analysis.kinds, strict=True)}
    assert kinds["first"] is kinds["second"] is NodeKind.FUSED
    assert is_gemm(analysis.nodes[find(analysis, "gradient")])
    met = [find(analysis, name) for name in ("first", "a2a", "second")]
    assert analysis.ancestors[met[1]] >> met[0] & 1
    assert analysis.ancestors[met[2]] >> met[1] & 1
    assert label(analysis, [met[1]]) == {find(analysis, "gradient"): 1}
    assert len(signature(b.graph).collectives) == 3


def test_group_may_be_an_object_with_a_name() -> None:
    b = GraphBuilder()
    x = b.input("x", 4)
    module = torch.nn.Module()
    module.__dict__["group"] = types.SimpleNamespace(group_name="ep")
    b.graph.owning_module = module  # pyright: ignore[reportAttributeAccessIssue]
    group = b.graph.create_node("get_attr", "group")
    b.graph.call_function(c10d.all_to_all_single.default, (x, [1, 1], [1, 1], group))
    assert graph_groups(b.graph) == ["ep"]


def test_writes_and_random_numbers_keep_their_place() -> None:
    b = GraphBuilder()
    x, y = b.input("x", 4), b.input("y", 4)
    before = b.call(aten.neg.default, x)
    b.call(aten.copy_.default, x, y)
    after = b.call(aten.abs.default, y)
    drawn = [b.call(aten.rand_like.default, y) for _ in range(2)]
    analysis = b.done(before, after, *drawn)
    written = find(analysis, "copy__default")
    assert analysis.ancestors[written] >> find(analysis, before.name) & 1
    assert analysis.ancestors[find(analysis, after.name)] >> written & 1
    assert analysis.ancestors[find(analysis, drawn[1].name)] >> find(analysis, drawn[0].name) & 1


def test_apply_order_moves_nodes_and_nothing_else() -> None:
    b, analysis = two_layers()
    before = {node: (node.target, node.args) for node in analysis.nodes}
    dw, a2a = find(analysis, "dw_0"), find(analysis, "a2a_0")
    order = [index for index in range(len(analysis.nodes)) if index not in (dw, dw + 1)]
    order[order.index(a2a) + 1 : order.index(a2a) + 1] = [dw, dw + 1]
    analysis.check_order(order)
    apply_order(b.graph, order)
    b.graph.lint()
    assert list(b.graph.nodes) == [analysis.nodes[index] for index in order]
    assert {node: (node.target, node.args) for node in b.graph.nodes} == before


def test_unknown_collectives_are_named() -> None:
    b = GraphBuilder()
    x = b.input("x", 4)
    b.graph.call_function(torch.ops.symm_mem.one_shot_all_reduce.default, (x, "sum", "0"))
    b.graph.call_function(c10d.isend.default, (x, 0, 0, "0"))
    found = unknown_collectives(b.done(x).nodes[0].graph)
    assert found == ["_c10d_functional::isend", "symm_mem::one_shot_all_reduce"]
    assert unknown_collectives(two_layers()[0].graph) == []


def test_signature_is_that_of_a_group_with_another_name_and_number_of_rows() -> None:
    def build(rows: int, columns: int, group: str) -> GraphAnalysis:
        b = GraphBuilder()
        x = b.input("x", rows, columns)
        start = b.call(c10d.all_to_all_single.default, x, [1, 1], [1, 1], group)
        return b.done(start)

    def sign(*args: int | str) -> object:
        return signature(build(*args).nodes[0].graph)  # pyright: ignore[reportArgumentType]

    assert sign(4, 8, "0") == sign(6, 8, "7")
    assert sign(4, 8, "0") != sign(4, 9, "0")
    assert graph_groups(build(4, 8, "7").nodes[0].graph) == ["7"]


def test_signature_tells_computation_from_collectives() -> None:
    plain, _ = two_layers()
    other, analysis = two_layers()
    with other.graph.inserting_before(analysis.nodes[-1]):
        extra = other.graph.call_function(aten.neg.default, (analysis.nodes[0],))
    analysis.nodes[-1].args = ((extra,),)
    first, second = signature(plain.graph), signature(other.graph)
    assert first.collectives == second.collectives
    assert len(first.collectives) == 2
    assert first.structure != second.structure
