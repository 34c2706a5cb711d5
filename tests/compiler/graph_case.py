"""Build graphs by hand, like those of aot_autograd, with results on the meta device."""

from typing import Any, final

import torch
from torch import fx

from halley.compiler.graph_analysis import GraphAnalysis


aten = torch.ops.aten
c10d = torch.ops._c10d_functional
GROUP = "0"


@final
class GraphBuilder:
    """Add nodes to a new graph, with the shapes of their results."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, name: str, *shape: int) -> fx.Node:
        """Add an input, a float32 tensor."""
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    def call(self, target: Any, *args: Any, name: str | None = None) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        values = fx.map_arg(args, lambda arg: arg.meta["val"])
        communicates = str(target).startswith("_c10d_functional")
        node.meta["val"] = torch.empty_like(values[0]) if communicates else target(*values)
        return node

    def opaque(self, target: Any, *args: Any, shape: tuple[int, ...], name: str = "") -> fx.Node:
        """Add the call of an operator that cannot run on the meta device, or has a list."""
        node = self.graph.create_node("call_function", target, args, name=name or None)
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    def mm(self, left: fx.Node, right: fx.Node, name: str | None = None) -> fx.Node:
        return self.call(aten.mm.default, left, right, name=name)

    def t(self, x: fx.Node, name: str | None = None) -> fx.Node:
        return self.call(aten.t.default, x, name=name)  # a view

    def all_to_all(self, x: fx.Node, name: str) -> tuple[fx.Node, fx.Node]:
        """Add an equal all-to-all; return its start, and its wait directly after it."""
        start = self.call(c10d.all_to_all_single.default, x, [1, 1], [1, 1], GROUP, name=name)
        return start, self.call(c10d.wait_tensor.default, start, name=f"wait_{name}")

    def all_reduce(self, x: fx.Node, name: str) -> tuple[fx.Node, fx.Node]:
        """Add an all-reduce; return its start and its wait."""
        start = self.call(c10d.all_reduce.default, x, "sum", GROUP, name=name)
        return start, self.call(c10d.wait_tensor.default, start, name=f"wait_{name}")

    def done(self, *outputs: fx.Node) -> GraphAnalysis:
        """Add the output; return the analysis of the graph."""
        self.graph.output(tuple(outputs))
        self.graph.lint()
        return GraphAnalysis(self.graph)


def find(analysis: GraphAnalysis, name: str) -> int:
    return next(index for index, node in enumerate(analysis.nodes) if node.name == name)


def names(analysis: GraphAnalysis, indices: Any) -> list[str]:
    return [analysis.nodes[index].name for index in indices]


def three_layers(size: int = 8) -> tuple[GraphBuilder, GraphAnalysis]:
    """Return backward of three linear layers with an all-to-all between two layers.

    Nodes are in the order of autograd: the weight gradient of a layer comes before the data
    gradient, and a wait directly after its start.
    """
    b = GraphBuilder()
    grad = b.input("tangents_1", size, size)
    weights = [b.input(f"primals_{i}", size, size) for i in range(3)]
    inputs = [b.input(f"x_{i}", size, size) for i in range(3)]
    made: list[fx.Node] = []
    for layer in range(3):
        dw = b.mm(b.t(grad, name=f"t_{layer}"), inputs[layer], name=f"dw_{layer}")
        made.append(b.t(dw, name=f"out_{layer}"))
        dx = b.mm(grad, weights[layer], name=f"dx_{layer}")
        if layer < 2:
            _, grad = b.all_to_all(dx, name=f"a2a_{layer}")
        else:
            made.append(dx)
    return b, b.done(*made)
