"""Rewrite a graph so that its segments run in microbatches.

Nodes outside of the segments, and the backward graph, read the same full-batch values as before.
"""

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import fx

from halley.compiler.graph_collectives import collective_kind
from halley.compiler.partition.concat import CONCAT_OPERATORS, Concatenator, is_symbolic
from halley.compiler.partition.propagation import Batch, BatchFlow, Division
from halley.compiler.partition.segment import Segment
from halley.compiler.sizes import Sizes, trace_result


_ATEN = torch.ops.aten
# Metadata that describes the arguments and results of one node; a copy of the node has its own.
_OWN_META = ("val", "tensor_meta", "eager_input_vals", "unbacked_bindings")


def divide(
    graph: fx.Graph,
    flow: BatchFlow,
    segments: Sequence[tuple[Segment, int]],
    *,
    sizes: Sizes,
) -> None:
    """Run segments of a graph in microbatches, in place.

    Contract: a divided operator runs once per microbatch, in the order of the pipeline, and again
    on the full batch where its full-batch value cannot be concatenated. All other operators run
    once, in a legal order. Outputs keep shapes, strides and dtypes. They keep every bit if the
    operators compute each row independently of the other rows.

    Args:
        graph: graph to change.
        flow: batch-dim propagation over the graph.
        segments: in order, not overlapping, each with its number of microbatches.
        sizes: learns which symbolic sizes belong to a microbatch.

    Raises:
        ValueError: the number of microbatches does not divide the batch.
    """
    for _, num_parts in segments:
        if num_parts < 2 or flow.batch_size % num_parts:
            raise ValueError(
                f"num_parts ({num_parts}) must be at least 2 and divide the batch "
                f"({flow.batch_size})"
            )
    before = Counter(str(node.target) for node in graph.nodes)
    outputs = _describe_outputs(graph)
    divider = _Divider(graph, flow, sizes)
    for segment, num_parts in segments:
        divider.run(segment, num_parts)
    graph.lint()
    assert _describe_outputs(graph) == outputs, "outputs changed shape, stride or dtype"
    _check_calls(before, graph, segments)


@final
class _Divider:
    """Adds the microbatches of segments behind their nodes, and removes the original nodes."""

    def __init__(self, graph: fx.Graph, flow: BatchFlow, sizes: Sizes) -> None:
        self._graph = graph
        self._sizes = sizes
        self._calls = flow.calls
        self._batch_size = flow.batch_size
        self._axes = dict(flow.axes)
        self._replaced: dict[fx.Node, fx.Node] = {}  # removed nodes and their full-batch values
        self._num_parts = 1
        self._results: list[dict[fx.Node, fx.Node]] = []  # per microbatch, the copies of nodes
        self._slices: dict[tuple[fx.Node, Batch], list[fx.Node]] = {}

    def run(self, segment: Segment, num_parts: int) -> None:
        """Divide one segment; the segments before it are divided already."""
        self._num_parts = num_parts
        self._results = [{} for _ in range(num_parts)]
        self._slices = {}
        divided = [node for stage in segment.stages for node in stage]
        concatenator = Concatenator(
            segment,
            self._results,
            axes=self._axes,
            add=self._add,
            compute_early=lambda node: self._compute_early(node, set(divided)),
        )
        # fx orders nodes by their place in the graph, so ``end`` is the node behind the segment.
        end = max((*segment.before, *divided, *(node for _, node in segment.after))).next
        with self._graph.inserting_before(end):
            for node, microbatch in segment.steps(num_parts):
                if node not in self._results[microbatch]:  # else it was computed early
                    self._results[microbatch][node] = self._copy(node, microbatch)
                concatenator.write(node, microbatch)
        removed = set(divided) - {node for epilogue, node in segment.after if epilogue == "rerun"}
        for epilogue, node in segment.after:
            if epilogue == "concat":
                with self._graph.inserting_before(end):
                    full = concatenator.concat(node)
                self._replaced[node], self._axes[full] = full, self._axes[node]
                # Nodes that will be removed keep the old operand, which is erased after them.
                node.replace_all_uses_with(full, lambda user: user not in removed)
            else:
                # Its operands are new nodes with new symbolic sizes: move it behind them, and trace
                # it again.
                end.prepend(node)
                trace_result(node)
        for node in reversed(divided):
            if node in removed:
                self._graph.erase_node(node)

    def _add(
        self,
        target: Any,
        args: tuple[Any, ...],
        *,
        like: fx.Node,
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> fx.Node:
        """Add a call with the metadata of ``like``, such as its module and stack trace."""
        node = self._graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta = {key: value for key, value in like.meta.items() if key not in _OWN_META}
        trace_result(node)
        return node

    def _copy(self, node: fx.Node, microbatch: int) -> fx.Node:
        """Add the copy of a node that runs on one microbatch."""
        call = self._calls[node]
        assert isinstance(call, Division)
        # An operand may come from an earlier segment, which has replaced it.
        splits = {self._replaced.get(full, full): axis for full, axis in call.splits.items()}

        def operand(source: fx.Node) -> fx.Node:
            if source in self._results[microbatch]:
                return self._results[microbatch][source]
            axis = splits.get(source, self._axes.get(source))
            return self._slice(source, axis)[microbatch] if isinstance(axis, Batch) else source

        args = list(cast(tuple[Any, ...], fx.map_arg(node.args, operand)))
        if call.sizes is not None and isinstance(call.result, Batch):
            sizes, dim = list(args[call.sizes]), call.result.dim
            if isinstance(sizes[dim], int) and sizes[dim] > 0:  # -1 infers the size
                sizes[dim] //= self._num_parts
            args[call.sizes] = sizes
        if call.carry is not None and microbatch > 0:
            argument, result = call.carry
            previous = self._results[microbatch - 1][node]
            args[argument] = self._add(operator.getitem, (previous, result), like=node)
        kwargs = cast(dict[str, Any], fx.map_arg(node.kwargs, operand))
        name = f"{node.name}_part{microbatch}"
        copy = self._add(node.target, tuple(args), like=node, kwargs=kwargs, name=name)
        if isinstance(size := copy.meta["val"], torch.SymInt):
            self._sizes.note_part(size, id(self._results[microbatch]), num_parts=self._num_parts)
        return copy

    def _compute_early(self, node: fx.Node, divided: Collection[fx.Node]) -> bool:
        """Add the copies of a node and of all that it needs now, in all microbatches.

        Returns:
            Whether the copies exist. They do not if one of them is an all-to-all, which must keep
            its place in the pipeline.
        """
        missing = [_find_missing(node, copies, divided) for copies in self._results]
        if any(collective_kind(each) for nodes in missing for each in nodes):
            return False
        for microbatch, nodes in enumerate(missing):
            for each in nodes:
                self._results[microbatch][each] = self._copy(each, microbatch)
        return True

    def _slice(self, source: fx.Node, axis: Batch) -> list[fx.Node]:
        """Return the slices of a full-batch value, one per microbatch."""
        if (source, axis) not in self._slices:
            size = self._batch_size // self._num_parts * axis.unit
            split = self._add(_ATEN.split.Tensor, (source, size, axis.dim), like=source)
            self._slices[source, axis] = [
                self._add(operator.getitem, (split, microbatch), like=source)
                for microbatch in range(self._num_parts)
            ]
        return self._slices[source, axis]


def _find_missing(
    node: fx.Node, copies: Mapping[fx.Node, fx.Node], divided: Collection[fx.Node]
) -> list[fx.Node]:
    """Return, in order, the nodes to copy so that a microbatch has a copy of ``node``."""
    found, pending = {node} - copies.keys(), [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source in divided and source not in copies and source not in found:
                found.add(source)
                pending.append(source)
    return sorted(found)


def _describe_outputs(graph: fx.Graph) -> list[object]:
    """Return dtypes, shapes and strides of a graph's outputs, with "?" for symbolic sizes."""
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
    before: Counter[str], graph: fx.Graph, segments: Sequence[tuple[Segment, int]]
) -> None:
    """Check how often each operator runs, except for those that slice or concatenate."""
    expected = Counter(before)
    for segment, num_parts in segments:
        divided = Counter(str(node.target) for stage in segment.stages for node in stage)
        expected.update({name: (num_parts - 1) * count for name, count in divided.items()})
        expected.update(str(node.target) for epilogue, node in segment.after if epilogue == "rerun")
    unchecked = {*map(str, CONCAT_OPERATORS), str(_ATEN.split.Tensor), str(operator.getitem)}
    found = Counter(str(node.target) for node in graph.nodes)
    wrong = {
        name: (found[name], expected[name])
        for name in (found | expected).keys() - unchecked
        if found[name] != expected[name]
    }
    assert not wrong, f"operators run too often or too rarely (found, expected): {wrong}"
