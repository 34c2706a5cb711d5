"""Kinds, dependencies, legal orders and signatures of graphs made by hand."""

import importlib
import operator
import types
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import fx

from halley.compiler.graph_analysis import NodeKind, is_gemm
from halley.compiler.graph_collectives import (
    first_difference,
    graph_groups,
    remove_repeated_waits,
    signature,
)
from halley.compiler.wgrad.movable_nodes import find_movable
from tests.compiler.graph_case import GraphBuilder, aten, c10d, find


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


def test_all_to_alls_and_fused_layers_keep_their_order_and_a_weight_gradient_moves() -> None:
    importlib.import_module("halley.fused.op")  # defines the operators
    halley = torch.ops.halley
    b = GraphBuilder()
    rows, plan = b.input("rows", 6, 8), b.input("plan", 16)
    call = partial(b.opaque, shape=(6, 8))
    first = call(halley.fused_experts.default, *[rows] * 5, True, True, "all", 0, name="first")
    b.all_to_all(rows, "a2a")
    b.all_to_all(rows, "last_a2a")
    gradient = call(halley.weight_gemm.default, rows, rows, plan, plan, 2, 0, name="gradient")
    second = call(
        halley.fused_experts_backward.default, *[rows] * 7, plan, True, True, "all", 0,
        name="second",
    )  # fmt: skip
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


def test_signature_ignores_group_names_and_numbers_of_rows() -> None:
    def build(rows: int, columns: int, group: str) -> fx.Graph:
        b = GraphBuilder()
        x = b.input("x", rows, columns)
        b.done(b.call(c10d.all_to_all_single.default, x, [1, 1], [1, 1], group))
        return b.graph

    assert signature(build(4, 8, "0")) == signature(build(6, 8, "7"))
    assert signature(build(4, 8, "0")) != signature(build(4, 9, "0"))
    assert graph_groups(build(4, 8, "7")) == ["7"]


@pytest.mark.parametrize(
    ("index", "others"), [(0, 40), (7, 40), (8, 40), (21, 40), (21, 23), (39, 40)]
)
def test_first_difference_is_among_eight_nodes(index: int, others: int) -> None:
    """Compare 40 nodes in a row with ``others`` nodes in a row, of which one differs."""

    def build(length: int, changed: int) -> str:
        b = GraphBuilder()
        x = b.input("x", 4)
        for at in range(1, length):
            x = b.call(aten.neg.default if at == changed else aten.abs.default, x)
        b.done(x)
        return signature(b.graph).structure

    wanted = max(index, 1)  # node 0 is the input
    at = first_difference(build(40, -1), build(others, wanted))
    assert wanted in at
    assert len(at) == 8
