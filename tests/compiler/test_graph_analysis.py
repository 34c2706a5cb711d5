"""Kinds, dependencies, legal orders and signatures of graphs made by hand."""

import importlib
import operator
import types
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import fx

from halley.compiler.graph_analysis import (
    NodeKind,
    apply_order,
    bits,
    is_gemm,
    mask_of,
)
from halley.compiler.graph_collectives import (
    graph_groups,
    remove_repeated_waits,
    signature,
    unknown_collectives,
)
from halley.compiler.wgrad.movable_nodes import find_movable
from tests.compiler.graph_case import GraphBuilder, aten, c10d, find, names, three_layers


def test_bits_and_masks_are_inverse() -> None:
    assert list(bits(0b101001)) == [0, 3, 5]
    assert list(bits(0)) == []
    assert mask_of([5, 0, 3]) == 0b101001


def test_kinds_of_nodes() -> None:
    b = GraphBuilder()
    x = b.input("x", 4, 4)
    _, wait = b.all_to_all(x, "a2a")
    split = b.call(aten.split.Tensor, wait, 2, name="split")
    part = b.call(operator.getitem, split, 0, name="part")
    b.call(aten.sym_size.int, wait, 0, name="size")
    summed = b.call(aten.sum.default, part, name="summed")
    copied = b.call(aten.clone.default, part, name="copied")
    analysis = b.done(summed, b.call(aten.view.default, copied, [8], name="view"))
    views = dict.fromkeys(("split", "part", "size", "view"), NodeKind.VIEW)
    assert {node.name: kind for node, kind in zip(analysis.nodes, analysis.kinds, strict=True)} == {
        "x": NodeKind.INPUT,
        "a2a": NodeKind.START,
        "wait_a2a": NodeKind.WAIT,
        "summed": NodeKind.COMPUTE,
        "copied": NodeKind.COMPUTE,
        "output": NodeKind.OUTPUT,
    } | views


def test_second_wait_for_a_collective_is_removed() -> None:
    b = GraphBuilder()
    _, wait = b.all_to_all(b.input("x", 4, 4), "a2a")
    again = b.call(c10d.wait_tensor.default, b.call(c10d.wait_tensor.default, wait))
    b.done(b.call(aten.neg.default, again, name="neg"))
    remove_repeated_waits(b.graph)
    assert [node.name for node in b.graph.nodes] == [
        "x", "a2a", "wait_a2a", "neg", "output",
    ]  # fmt: skip


def test_ancestors_and_descendants() -> None:
    _, analysis = three_layers()
    a2a = find(analysis, "a2a_1")
    above = names(analysis, bits(analysis.ancestors[a2a]))
    assert above == ["tangents_1", "primals_0", "primals_1", "dx_0", "a2a_0", "wait_a2a_0", "dx_1"]
    below = names(analysis, bits(analysis.descendants[a2a]))
    assert below == ["wait_a2a_1", "t_2", "dw_2", "out_2", "dx_2", "output"]


def test_illegal_orders_are_refused() -> None:
    _, analysis = three_layers()
    order = list(range(len(analysis.nodes)))
    analysis.check_order(order)
    dx, a2a = find(analysis, "dx_0"), find(analysis, "a2a_0")
    swapped = order.copy()
    swapped[dx], swapped[a2a] = a2a, dx
    with pytest.raises(RuntimeError, match=r"a2a_0 must come after \['dx_0'\]"):
        analysis.check_order(swapped)
    for wrong in (order[:-1], [*order[:-1], order[0]]):
        with pytest.raises(RuntimeError, match="each node of its graph once"):
            analysis.check_order(wrong)
    with pytest.raises(RuntimeError, match="inputs must come first"):
        analysis.check_order([order[1], order[0], *order[2:]])


def test_all_to_alls_and_fused_layers_keep_their_order_and_a_weight_gradient_moves() -> None:
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
    b.all_to_all(rows, "last_a2a")
    gradient = call(halley.weight_gemm.default, "gradient", rows, rows, plan, plan, 2, 0)
    second = call(
        halley.fused_experts_backward.default, "second", *[rows] * 7, plan, True, True, "all", 0
    )
    analysis = b.done(first, gradient, second)
    kinds = {node.name: kind for node, kind in zip(analysis.nodes, analysis.kinds, strict=True)}
    assert kinds["first"] is kinds["second"] is NodeKind.FUSED
    assert is_gemm(analysis.nodes[find(analysis, "gradient")])
    ordered = [find(analysis, name) for name in ("first", "a2a", "last_a2a", "second")]
    for before, after in pairwise(ordered):
        assert analysis.ancestors[after] >> before & 1
    assert find_movable(analysis, ordered[1:3]) == {find(analysis, "gradient"): {0, 1}}
    assert len(signature(b.graph).collectives) == 4


def test_group_may_be_an_object_with_a_name() -> None:
    b = GraphBuilder()
    x = b.input("x", 4)
    module = torch.nn.Module()
    module.__dict__["group"] = types.SimpleNamespace(group_name="ep")
    b.graph.owning_module = module  # pyright: ignore[reportAttributeAccessIssue]
    group = b.graph.create_node("get_attr", "group")
    b.graph.call_function(c10d.all_to_all_single.default, (x, [1, 1], [1, 1], group))
    assert graph_groups(b.graph) == ["ep"]


def test_mutations_and_random_operators_keep_their_order() -> None:
    b = GraphBuilder()
    x, y = b.input("x", 4), b.input("y", 4)
    before = b.call(aten.neg.default, x)
    written = b.call(aten.copy_.default, x, y)
    after = b.call(aten.abs.default, y)
    drawn = [b.call(aten.rand_like.default, y) for _ in range(2)]
    analysis = b.done(before, after, *drawn)
    for first, second in ((before, written), (written, after), drawn):
        ancestors = analysis.ancestors[find(analysis, second.name)]
        assert ancestors >> find(analysis, first.name) & 1, second


def test_apply_order_only_moves_nodes() -> None:
    b, analysis = three_layers()
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
    assert unknown_collectives(three_layers()[0].graph) == []


def test_signature_ignores_group_names_and_numbers_of_rows() -> None:
    def build(rows: int, columns: int, group: str) -> fx.Graph:
        b = GraphBuilder()
        x = b.input("x", rows, columns)
        b.done(b.call(c10d.all_to_all_single.default, x, [1, 1], [1, 1], group))
        return b.graph

    assert signature(build(4, 8, "0")) == signature(build(6, 8, "7"))
    assert signature(build(4, 8, "0")) != signature(build(4, 9, "0"))
    assert graph_groups(build(4, 8, "7")) == ["7"]


def test_signature_separates_computation_from_collectives() -> None:
    plain, _ = three_layers()
    other, analysis = three_layers()
    with other.graph.inserting_before(analysis.nodes[-1]):
        extra = other.graph.call_function(aten.neg.default, (analysis.nodes[0],))
    analysis.nodes[-1].args = ((extra,),)
    first, second = signature(plain.graph), signature(other.graph)
    assert first.collectives == second.collectives
    assert len(first.collectives) == 2
    assert first.structure != second.structure
