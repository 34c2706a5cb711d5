"""The rewrite of the partition pass: regions of a graph run in parts, what leaves them is whole.

What is outside of the regions, the backward graph with it, reads the same values as before.
"""

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import fx

from halley.compiler.graph_collectives import collective_kind
from halley.compiler.partition.axes import Batch, BatchFlow, Division
from halley.compiler.partition.merge import MERGES, Merger, is_symbolic
from halley.compiler.partition.region import Region
from halley.compiler.sizes import Sizes, trace_result


_ATEN = torch.ops.aten
# What a node's meta says of its own arguments and results.
_OWN = ("val", "tensor_meta", "eager_input_vals", "unbacked_bindings")
# What splits the batch for parts and puts their results together.
_MOVES = MERGES | {_ATEN.split.Tensor, operator.getitem}


def divide(
    graph: fx.Graph,
    flow: BatchFlow,
    regions: Sequence[tuple[Region, int]],
    *,
    sizes: Sizes,
) -> None:
    """Run regions of a graph in parts.

    Args:
        graph: changed.
        flow: of the graph.
        regions: of it, that do not overlap, in order, each with its number of parts.
        sizes: learns which sizes are of parts.

    Contract: an operator of a region runs once for each part in the order of the pipeline, and
    again where its whole is wanted and cannot be put together. All others run as often as before,
    each node after what it needs. Outputs have the same shapes, strides and dtypes, and the same
    values bit for bit where operators give a row the same result whatever rows stand with it.

    Raises:
        ValueError: a number of parts does not divide the batch.
    """
    for _, num_parts in regions:
        if num_parts < 2 or flow.batch_size % num_parts:
            raise ValueError(
                f"num_parts ({num_parts}) must be at least 2 and divide the batch "
                f"({flow.batch_size})"
            )
    before = Counter(str(node.target) for node in graph.nodes)
    outputs = _describe(graph)
    divider = _Divider(graph, flow, sizes)
    for region, num_parts in regions:
        divider.run(region, num_parts)
    graph.lint()
    assert _describe(graph) == outputs, "outputs have other shapes"
    _check_calls(before, graph, regions)


@final
class _Divider:
    """Writes regions in parts behind their nodes, and removes the nodes that run in parts alone."""

    def __init__(self, graph: fx.Graph, flow: BatchFlow, sizes: Sizes) -> None:
        self._graph = graph
        self._sizes = sizes
        self._calls = flow.calls
        self._batch_size = flow.batch_size
        self._axes = dict(flow.axes)
        self._wholes: dict[fx.Node, fx.Node] = {}  # what stands for nodes that are removed
        self._num_parts = 1
        self._parts: list[dict[fx.Node, fx.Node]] = []
        self._splits: dict[tuple[fx.Node, Batch], list[fx.Node]] = {}

    def run(self, region: Region, num_parts: int) -> None:
        """Divide one region, behind those that were divided before."""
        self._num_parts = num_parts
        self._parts = [{} for _ in range(num_parts)]
        self._splits = {}
        divided = [node for stage in region.stages for node in stage]
        merger = Merger(
            region,
            self._parts,
            axes=self._axes,
            add=self._call,
            need=lambda node: self._bring_forward(node, set(divided)),
        )
        end = max((*region.before, *divided, *(node for _, node in region.after))).next
        with self._graph.inserting_before(end):
            for node, part in region.steps(num_parts):
                if node not in self._parts[part]:
                    self._parts[part][node] = self._run_part(node, part)
                merger.note(node, part)
        gone = set(divided) - {node for ending, node in region.after if ending == "again"}
        for ending, node in region.after:
            if ending == "merge":
                with self._graph.inserting_before(end):
                    whole = merger.merge(node)
                self._wholes[node], self._axes[whole] = whole, self._axes[node]
                node.replace_all_uses_with(whole, lambda user: user not in gone)
            else:
                end.prepend(node)
                trace_result(node)
        for node in reversed(divided):
            if node in gone:
                self._graph.erase_node(node)

    def _call(
        self,
        target: Any,
        args: tuple[Any, ...],
        *,
        like: fx.Node,
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> fx.Node:
        """Add a call that has the origin of ``like``."""
        node = self._graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta = {name: value for name, value in like.meta.items() if name not in _OWN}
        trace_result(node)
        return node

    def _run_part(self, node: fx.Node, part: int) -> fx.Node:
        call = self._calls[node]
        assert isinstance(call, Division)
        wanted = {self._wholes.get(whole, whole): axis for whole, axis in call.splits.items()}

        def operand(source: fx.Node) -> fx.Node:
            if source in self._parts[part]:
                return self._parts[part][source]
            axis = wanted.get(source, self._axes.get(source))
            return self._range(source, axis)[part] if isinstance(axis, Batch) else source

        args = list(cast(tuple[Any, ...], fx.map_arg(node.args, operand)))
        if call.sizes is not None and isinstance(call.result, Batch):
            sizes, dim = list(args[call.sizes]), call.result.dim
            if isinstance(sizes[dim], int) and sizes[dim] > 0:
                sizes[dim] //= self._num_parts
            args[call.sizes] = sizes
        if call.carry is not None and part > 0:
            argument, result = call.carry
            before = self._parts[part - 1][node]
            args[argument] = self._call(operator.getitem, (before, result), like=node)
        kwargs = cast(dict[str, Any], fx.map_arg(node.kwargs, operand))
        name = f"{node.name}_part{part}"
        result = self._call(node.target, tuple(args), like=node, kwargs=kwargs, name=name)
        if isinstance(size := result.meta["val"], torch.SymInt):
            self._sizes.note_part(size, id(self._parts[part]), num_parts=self._num_parts)
        return result

    def _bring_forward(self, node: fx.Node, divided: Collection[fx.Node]) -> bool:
        """Run a node and what it needs in all parts now, if no all-to-all is among it.

        Returns:
            Whether it stands in all parts.
        """
        missing = [_missing(node, results, divided) for results in self._parts]
        if any(collective_kind(each) for nodes in missing for each in nodes):
            return False
        for part, nodes in enumerate(missing):
            for each in nodes:
                self._parts[part][each] = self._run_part(each, part)
        return True

    def _range(self, source: fx.Node, axis: Batch) -> list[fx.Node]:
        """Return the ranges of a whole that belong to the parts."""
        if (source, axis) not in self._splits:
            size = self._batch_size // self._num_parts * axis.unit
            split = self._call(_ATEN.split.Tensor, (source, size, axis.dim), like=source)
            self._splits[source, axis] = [
                self._call(operator.getitem, (split, part), like=source)
                for part in range(self._num_parts)
            ]
        return self._splits[source, axis]


def _missing(
    node: fx.Node, results: Mapping[fx.Node, fx.Node], divided: Collection[fx.Node]
) -> list[fx.Node]:
    """Return the nodes that must run for a node, itself with them, in order."""
    found, pending = {node} - results.keys(), [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source in divided and source not in results and source not in found:
                found.add(source)
                pending.append(source)
    return sorted(found)


def _describe(graph: fx.Graph) -> list[object]:
    """Return what is known of a graph's outputs before it runs; "?" for sizes that it makes."""
    found: list[object] = []
    for node in graph.output_node().all_input_nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            sizes = (*value.shape, *value.stride())
            found.append((value.dtype, ["?" if is_symbolic(size) else size for size in sizes]))
        else:
            found.append(isinstance(value, torch.SymInt))
    return found


def _check_calls(
    before: Counter[str], graph: fx.Graph, regions: Sequence[tuple[Region, int]]
) -> None:
    """Check that all operators run as often as before and as parts want, but those that move."""
    want = Counter(before)
    for region, num_parts in regions:
        again = [str(node.target) for ending, node in region.after if ending == "again"]
        divided = Counter(str(node.target) for stage in region.stages for node in stage)
        want.update({name: (num_parts - 1) * count for name, count in divided.items()})
        want.update(again)
    moves = {str(target) for target in _MOVES}
    found = Counter(str(node.target) for node in graph.nodes)
    wrong = {
        name: (found[name], want[name])
        for name in set(found) | set(want)
        if name not in moves and found[name] != want[name]
    }
    assert not wrong, f"operators run another number of times than they must: {wrong}"
