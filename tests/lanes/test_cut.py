"""Graphs are cut at collectives; equal layers give items of equal code; weight gradients move."""

import pytest
import torch
from torch import fx

from halley.lanes.capture import StepGraphs
from halley.lanes.cut import Item, cut_step
from halley.lanes.segment_compiler import SegmentCompiler, hash_code
from tests.compiler.graph_case import GraphBuilder, aten


def _layers(num_layers: int, *, tied: bool = False) -> tuple[Item, ...]:
    """Return the items of linear layers, each with an all-to-all; if ``tied``, with one weight."""
    forward = GraphBuilder()
    x = forward.input("x", 4, 4)
    weights = [forward.input(f"w{layer}", 4, 4) for layer in range(1 if tied else num_layers)]
    saved = [x]
    for layer in range(num_layers):
        rows = forward.mm(saved[-1], weights[0 if tied else layer], name=f"mm{layer}")
        saved.append(forward.all_to_all(rows, f"a{layer}")[1])
    loss = forward.call(aten.sum.default, saved[-1], name="loss")
    forward.done(loss, *saved[:-1], *weights)

    backward = GraphBuilder()
    inputs = {node.name: backward.input(node.name, 4, 4) for node in (*saved[:-1], *weights)}
    gradient = backward.call(aten.expand.default, backward.input("tangents_1"), [4, 4])
    found: dict[str, fx.Node] = {}
    for layer in reversed(range(num_layers)):
        rows = backward.all_to_all(backward.call(aten.clone.default, gradient), f"b{layer}")[1]
        source, weight = inputs[saved[layer].name], weights[0 if tied else layer].name
        own = backward.mm(backward.t(source), rows, name=f"dw{layer}")
        if weight in found:
            own = backward.call(aten.add.Tensor, found[weight], own, name="add")
        found[weight] = own
        gradient = backward.mm(rows, backward.t(inputs[weight]), name=f"dx{layer}")
    backward.done(gradient, *(found[weight.name] for weight in weights))
    root = torch.nn.Module()
    return cut_step(
        StepGraphs(
            forward=fx.GraphModule(root, forward.graph),
            backward=fx.GraphModule(root, backward.graph),
        )
    )


def test_graph_is_cut_at_starts_and_waits() -> None:
    kinds = [item.kind for item in _layers(2)]
    assert kinds == [
        *("segment", "start", "wait", "segment", "start", "wait", "segment"),  # forward
        *("segment", "start", "wait", "segment", "unit", "start", "wait", "unit", "unit"),
    ]


def test_items_need_the_items_that_produce_their_inputs() -> None:
    items = _layers(1)
    producers = {name: at for at, item in enumerate(items) for name in item.outputs}
    for at, item in enumerate(items):
        assert set(item.needs) == {producers[name] for name in item.inputs if name in producers}
        assert all(need < at for need in item.needs)
    wait, start = next((item, items[item.needs[0]]) for item in items if item.kind == "wait")
    assert start.kind == "start"
    assert wait.has_rows


def test_each_gradient_belongs_to_the_item_that_computes_it() -> None:
    gradients = {
        position: (item.kind, name) for item in _layers(2) for name, position in item.gradients
    }
    assert gradients == {
        0: ("unit", "b:dx0"), 1: ("unit", "b:dw0"), 2: ("unit", "b:dw1"),
    }  # fmt: skip


def test_number_of_distinct_items_does_not_grow_with_layers() -> None:
    numbers = []
    for num_layers in (4, 8):
        compiler = SegmentCompiler("eager")
        for item in _layers(num_layers):
            compiler.compile(item)
        numbers.append(len(compiler.calls))
    assert numbers[0] == numbers[1]


def test_unit_may_read_a_unit_of_another_segment() -> None:
    items = _layers(2, tied=True)
    units = [at for at, item in enumerate(items) if item.kind == "unit"]
    first, second, _ = units  # the last one is the gradient of the input
    assert first in items[second].needs
    assert items[second].gradients == (("b:add", 1),)


def test_lane_waits_for_others_late_unless_a_collective_needs_their_sum() -> None:
    forward = GraphBuilder()
    x = forward.input("x", 4, 4)
    add_lanes = torch.ops.halley.sum_over_lanes.default
    early = forward.call(add_lanes, x, True, name="early")
    needed = forward.call(add_lanes, x, False, name="needed")
    late = forward.call(add_lanes, x, False, name="late")
    balance = forward.call(aten.sum.default, late, name="balance")
    rows = forward.call(aten.add.Tensor, early, needed, name="rows")
    loss = forward.call(aten.sum.default, forward.all_to_all(rows, "a")[1], name="loss")
    forward.done(forward.call(aten.add.Tensor, loss, balance, name="total"), x)
    backward = GraphBuilder()
    tangent, x = backward.input("tangents_1"), backward.input("x", 4, 4)
    backward.done(backward.call(aten.mul.Tensor, x, tangent))
    modules = [fx.GraphModule(torch.nn.Module(), each.graph) for each in (forward, backward)]
    items = cut_step(StepGraphs(forward=modules[0], backward=modules[1]))
    assert [(item.kind, item.lanes) for item in items] == [
        ("sum", "earlier"),
        ("sum", "all"),
        *((kind, "own") for kind in ("segment", "start", "wait", "segment")),
        ("sum", "all"),
        *(("segment", "own"),) * 2,  # the balance loss and the total; backward
    ]
    assert items[6].outputs == ("f:late",)
    assert items[6].all_needs(0, 2) == []  # ``x`` is an input
    assert items[2].all_needs(1, 2) == [(1, 0), (1, 1)]


@pytest.mark.parametrize("change", ["operator", "shape", "argument"])
def test_hash_tells_different_code_apart(change: str) -> None:
    def build(changed: str) -> fx.Graph:
        builder = GraphBuilder()
        x = builder.input("x", 4, 8 if changed == "shape" else 4)
        operator = aten.amax.default if changed == "operator" else aten.sum.dim_IntList
        y = builder.call(operator, x, [0 if changed == "argument" else 1])
        builder.done(y)
        return builder.graph

    assert hash_code("segment", build("")) == hash_code("segment", build(""))
    assert hash_code("segment", build("")) != hash_code("segment", build(change))
    assert hash_code("segment", build("")) != hash_code("unit", build(""))
