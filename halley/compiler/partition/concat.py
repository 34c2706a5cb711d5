"""Build full-batch values from the results of the microbatches.

Where the shape of the full-batch value is known early, the concat is in place: the buffer is
allocated with the first microbatch, and each microbatch writes its result there at once. The result
can be freed as soon as its readers have run. Otherwise all results live until one ``cat`` at the
end, next to the full-batch value.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import prod
from typing import Any, cast, final

import torch
from torch import fx

from halley.compiler.partition.propagation import Axes, Axis, Batch, Counts, Last, Layout, Rows
from halley.compiler.partition.segment import Segment
from halley.ops.in_place_concat import concat_order, rows_of_microbatch, write_rows, write_slice


_ATEN = torch.ops.aten
# All operators that a concat may add to a graph.
CONCAT_OPERATORS = frozenset(
    {
        _ATEN.cat.default,
        _ATEN.permute.default,
        _ATEN.index.Tensor,
        _ATEN.add.Tensor,
        _ATEN.sym_size.int,
        _ATEN.new_empty.default,
        _ATEN.new_empty_strided.default,
        concat_order,
        rows_of_microbatch,
        write_slice,
        write_rows,
        operator.add,
    }
)
AddNode = Callable[
    ..., fx.Node
]  # (target, args, *, like): adds a call with the metadata of ``like``


@final
class Concatenator:
    """Concatenates the results of one segment's microbatches.

    Args:
        segment: the segment.
        results: for each microbatch, its copy of each node of the segment. The rewrite adds copies
            while it runs.
        axes: axes of the segment's nodes.
        add: adds a node to the graph.
        compute_early: adds the copies of a node in all microbatches now, with all that they need.
            Returns False, and adds nothing, if that includes an all-to-all.
    """

    def __init__(
        self,
        segment: Segment,
        results: Sequence[dict[fx.Node, fx.Node]],
        *,
        axes: dict[fx.Node, Axes],
        add: AddNode,
        compute_early: Callable[[fx.Node], bool],
    ) -> None:
        self._results = results
        self._axes = axes
        self._add = add
        self._compute_early = compute_early
        self._wanted = {node for epilogue, node in segment.after if epilogue == "concat"}
        self._sizes = find_sizes(segment)
        self._buffers: dict[
            fx.Node, fx.Node
        ] = {}  # the node that did the last write to each buffer
        self._counts: dict[Layout, fx.Node] = {}
        self._indices: dict[tuple[Layout, int | None], fx.Node] = {}

    def write(self, node: fx.Node, microbatch: int) -> None:
        """Write a result that was just computed into its buffer, if the concat is in place."""
        if node not in self._wanted:
            return
        # Each write reads the buffer from the write before. So data flow orders the writes, and the
        # result of the last one is the complete value.
        if microbatch == 0 and (buffer := self._allocate(node)):
            self._buffers[node] = buffer
        if node not in self._buffers:
            return
        axis, result = self._axes[node], self._results[microbatch][node]
        if isinstance(axis, Batch):
            start = microbatch * result.meta["val"].shape[axis.dim]
            args = (self._buffers[node], result, axis.dim, start)
            self._buffers[node] = self._add(write_slice, args, like=node)
        elif isinstance(axis, Rows):
            indices = self._row_indices(axis, result, microbatch)
            args = (self._buffers[node], result, indices)
            self._buffers[node] = self._add(write_rows, args, like=node)

    def concat(self, node: fx.Node) -> fx.Node:
        """Return the full-batch value of a node; all microbatches have computed it."""
        if node in self._buffers:
            return self._buffers[node]
        results = [copies[node] for copies in self._results]
        axis = cast(Axis, self._axes[node])
        if isinstance(axis, Last):
            return results[-1]
        if isinstance(axis, Counts):
            is_tensor = isinstance(node.meta["val"], torch.Tensor)
            return self._sum(results, _ATEN.add.Tensor if is_tensor else operator.add, like=node)
        assert isinstance(axis, Batch | Rows)
        full = self._cat(results, axis.dim, like=node)
        if isinstance(axis, Rows):
            order = self._row_indices(axis, full, None)
            full = self._add(_ATEN.index.Tensor, (full, [None] * axis.dim + [order]), like=node)
        return full

    def _allocate(self, node: fx.Node) -> fx.Node | None:
        """Add the buffer of a full-batch value; None if its shape is not known yet."""
        value, axis, first = node.meta["val"], self._axes[node], self._results[0][node]
        if not fits_in_place(node, axis, self._sizes):
            return None
        if isinstance(axis, Batch):
            args = (first, tuple(value.shape), tuple(value.stride()))
            return self._add(_ATEN.new_empty_strided.default, args, like=node)
        assert isinstance(axis, Rows)
        # The size of the buffer is the sum over all microbatches. Their counts are exchanged before
        # the rows of microbatch 0 arrive, so all sizes can be computed now.
        size = self._sizes[str(value.shape[0])]
        if not self._compute_early(size) or not self._compute_early(axis.layout.node):
            return None
        num_rows = self._sum([copies[size] for copies in self._results], operator.add, like=size)
        args = (first, [num_rows, *value.shape[1:]])
        return self._add(_ATEN.new_empty.default, args, like=node)

    def _sum(self, values: Sequence[fx.Node], add: Any, *, like: fx.Node) -> fx.Node:
        return reduce(lambda left, right: self._add(add, (left, right), like=like), values)

    def _cat(self, results: list[fx.Node], dim: int, *, like: fx.Node) -> fx.Node:
        """Concatenate along a dimension, with the dimension order of the full batch's strides."""
        value = like.meta["val"]
        order = list(range(value.ndim))
        if not any(map(is_symbolic, (*value.shape, *value.stride()))):
            order.sort(key=lambda at: -value.stride(at))
        if order == sorted(order):
            return self._add(_ATEN.cat.default, (results, dim), like=like)
        # ``cat`` returns a contiguous tensor: permute to the order in memory, and back.
        stored = [self._add(_ATEN.permute.default, (each, order), like=like) for each in results]
        full = self._add(_ATEN.cat.default, (stored, order.index(dim)), like=like)
        back = [order.index(at) for at in range(value.ndim)]
        return self._add(_ATEN.permute.default, (full, back), like=like)

    def _counts_of(self, layout: Layout) -> fx.Node:
        """Return the row counts of all microbatches, one microbatch after another."""
        if layout not in self._counts:
            counts = [copies[layout.node] for copies in self._results]
            if layout.output is not None:
                counts = [
                    self._add(operator.getitem, (each, layout.output), like=each) for each in counts
                ]
            self._counts[layout] = self._add(_ATEN.cat.default, (counts,), like=layout.node)
        return self._counts[layout]

    def _row_indices(self, axis: Rows, rows: fx.Node, microbatch: int | None) -> fx.Node:
        """Return the full-batch place of each row of a microbatch.

        With None, return the index that sorts the concatenated rows of all microbatches.
        """
        key = axis.layout, microbatch
        if key not in self._indices:
            counts, num_parts = self._counts_of(axis.layout), len(self._results)
            num_rows = self._add(_ATEN.sym_size.int, (rows, axis.dim), like=rows)
            if microbatch is None:
                target, args = concat_order, (counts, num_parts, num_rows)
            else:
                target, args = rows_of_microbatch, (counts, num_parts, microbatch, num_rows)
            self._indices[key] = self._add(target, args, like=rows)
        return self._indices[key]


def find_sizes(segment: Segment) -> dict[str, fx.Node]:
    """Return the nodes of a segment that compute a number of rows, by the symbol of that number."""
    found: dict[str, fx.Node] = {}
    for stage in segment.stages:
        for node in stage:
            if isinstance(node.meta.get("val"), torch.SymInt):
                found.setdefault(str(node.meta["val"]), node)
    return found


def fits_in_place(node: fx.Node, axis: Axes, sizes: Mapping[str, fx.Node]) -> bool:
    """Return whether a buffer can be allocated early with the strides of the full-batch value.

    Args:
        node: node of a segment.
        axis: axis of the node.
        sizes: ``find_sizes`` of the segment.
    """
    value = node.meta["val"]
    if isinstance(axis, Batch):
        shape, strides = tuple(value.shape), tuple(value.stride())
        return not any(map(is_symbolic, (*shape, *strides))) and _is_dense(shape, strides)
    if not isinstance(axis, Rows) or axis.dim != 0 or str(value.shape[0]) not in sizes:
        return False
    # Rows of known size that are contiguous; only their number depends on data.
    row, strides = tuple(value.shape[1:]), tuple(value.stride())
    is_known = not any(map(is_symbolic, (*row, *strides)))
    return is_known and list(strides) == [prod(row[at:]) for at in range(len(strides))]


def is_symbolic(size: object) -> bool:
    """Return whether a size is known at run time only."""
    return not isinstance(size, int)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor covers its memory without gaps or overlaps."""
    expected = 1
    # From the innermost dimension outwards, each stride is the number of elements inside of it.
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
