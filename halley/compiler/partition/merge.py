"""How parts of what others want whole are put together.

In place where it can be done: the whole is allocated with the first part, each part is written into
it as soon as it is there, and goes when the next operators have read it. Else parts are joined when
all are there, and all of them live beside the whole for that moment.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import prod
from typing import Any, cast, final

import torch
from torch import fx

from halley.compiler.partition.axes import Axes, Axis, Batch, Counts, Last, Layout, Rows
from halley.compiler.partition.region import Region
from halley.ops.in_place_concat import concat_order, rows_of_microbatch, write_rows, write_slice


_ATEN = torch.ops.aten
# What puts parts together.
MERGES = frozenset(
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
Add = Callable[..., fx.Node]  # a call: target, arguments, like=node whose origin it has


@final
class Merger:
    """Puts together the parts of one region's nodes.

    Args:
        region: that runs in parts.
        parts: of each part, what stands for the region's nodes; grows while parts are written.
        axes: of the region's nodes.
        add: adds a call to the graph.
        need: adds a node of the region to all parts, if it and what it needs can stand now.
    """

    def __init__(
        self,
        region: Region,
        parts: Sequence[dict[fx.Node, fx.Node]],
        *,
        axes: dict[fx.Node, Axes],
        add: Add,
        need: Callable[[fx.Node], bool],
    ) -> None:
        self._parts = parts
        self._axes = axes
        self._add = add
        self._need = need
        self._wanted = {node for ending, node in region.after if ending == "merge"}
        self._sizes = find_sizes(region)
        self._wholes: dict[fx.Node, fx.Node] = {}
        self._counts: dict[Layout, fx.Node] = {}
        self._places: dict[tuple[Layout, int], fx.Node] = {}
        self._orders: dict[Layout, fx.Node] = {}

    def note(self, node: fx.Node, part: int) -> None:
        """Write a part, which was added just now, into its whole if that can be done in place."""
        if node not in self._wanted:
            return
        if part == 0 and (whole := self._allocate(node)):
            self._wholes[node] = whole
        if node not in self._wholes:
            return
        axis, result = self._axes[node], self._parts[part][node]
        if isinstance(axis, Batch):
            start = part * result.meta["val"].shape[axis.dim]
            args = (self._wholes[node], result, axis.dim, start)
            self._wholes[node] = self._add(write_slice, args, like=node)
        elif isinstance(axis, Rows):
            places = self._places_of(axis.layout, part, like=result)
            self._wholes[node] = self._add(
                write_rows, (self._wholes[node], result, places), like=node
            )

    def merge(self, node: fx.Node) -> fx.Node:
        """Return the whole of a node, all of whose parts are there."""
        if node in self._wholes:
            return self._wholes[node]
        parts = [results[node] for results in self._parts]
        axis = cast(Axis, self._axes[node])
        if isinstance(axis, Last):
            return parts[-1]
        if isinstance(axis, Counts):
            is_size = not isinstance(node.meta["val"], torch.Tensor)
            return self._sum(parts, operator.add if is_size else _ATEN.add.Tensor, like=node)
        assert isinstance(axis, Batch | Rows)
        whole = self._cat(parts, axis.dim, like=node)
        if isinstance(axis, Rows):
            order = self._order_of(axis, whole)
            places = [None] * axis.dim + [order]
            whole = self._add(_ATEN.index.Tensor, (whole, places), like=node)
        return whole

    def _allocate(self, node: fx.Node) -> fx.Node | None:
        """Add the buffer of a whole, as the operator would store it; None if it is not known."""
        value, axis, first = node.meta["val"], self._axes[node], self._parts[0][node]
        if not fits_in_place(node, axis, self._sizes):
            return None
        if isinstance(axis, Batch):
            sizes, strides = tuple(value.shape), tuple(value.stride())
            return self._add(_ATEN.new_empty_strided.default, (first, sizes, strides), like=node)
        assert isinstance(axis, Rows)
        size = self._sizes[str(value.shape[0])]
        if not self._need(size) or not self._need(axis.layout.node):
            return None
        sizes = [results[size] for results in self._parts]
        num_rows = self._sum(sizes, operator.add, like=size)
        shape = [num_rows, *value.shape[1:]]
        return self._add(_ATEN.new_empty.default, (first, shape), like=node)

    def _sum(self, parts: Sequence[fx.Node], add: Any, *, like: fx.Node) -> fx.Node:
        return reduce(lambda left, right: self._add(add, (left, right), like=like), parts)

    def _cat(self, parts: list[fx.Node], dim: int, *, like: fx.Node) -> fx.Node:
        """Join along a dimension, in the order in which the dimensions of the whole are stored."""
        value = like.meta["val"]
        order = list(range(value.ndim))
        if not any(map(is_symbolic, (*value.shape, *value.stride()))):
            order.sort(key=lambda at: -value.stride(at))
        if order == sorted(order):
            return self._add(_ATEN.cat.default, (parts, dim), like=like)
        stored = [self._add(_ATEN.permute.default, (part, order), like=like) for part in parts]
        whole = self._add(_ATEN.cat.default, (stored, order.index(dim)), like=like)
        back = [order.index(at) for at in range(value.ndim)]
        return self._add(_ATEN.permute.default, (whole, back), like=like)

    def _counts_of(self, layout: Layout) -> fx.Node:
        """Return the numbers of a layout of part after part."""
        if layout not in self._counts:
            counts = [results[layout.node] for results in self._parts]
            if layout.output is not None:
                counts = [
                    self._add(operator.getitem, (each, layout.output), like=each) for each in counts
                ]
            self._counts[layout] = self._add(_ATEN.cat.default, (counts,), like=layout.node)
        return self._counts[layout]

    def _order_of(self, axis: Rows, whole: fx.Node) -> fx.Node:
        """Return the order of the whole's rows, of rows that come part by part."""
        layout = axis.layout
        if layout not in self._orders:
            counts = self._counts_of(layout)
            num_rows = self._add(_ATEN.sym_size.int, (whole, axis.dim), like=whole)
            self._orders[layout] = self._add(
                concat_order, (counts, len(self._parts), num_rows), like=whole
            )
        return self._orders[layout]

    def _places_of(self, layout: Layout, part: int, *, like: fx.Node) -> fx.Node:
        """Return the places in the whole of a part's rows."""
        if (layout, part) not in self._places:
            counts = self._counts_of(layout)
            num_rows = self._add(_ATEN.sym_size.int, (like, 0), like=like)
            self._places[layout, part] = self._add(
                rows_of_microbatch, (counts, len(self._parts), part, num_rows), like=like
            )
        return self._places[layout, part]


def find_sizes(region: Region) -> dict[str, fx.Node]:
    """Return the nodes of a region that make numbers of rows, by what is known of these."""
    found: dict[str, fx.Node] = {}
    for stage in region.stages:
        for node in stage:
            if isinstance(node.meta.get("val"), torch.SymInt):
                found.setdefault(str(node.meta["val"]), node)
    return found


def fits_in_place(node: fx.Node, axis: Axes, sizes: Mapping[str, fx.Node]) -> bool:
    """Return whether a whole can be allocated ahead of its parts, as the operator would store it.

    Args:
        node: of a region.
        axis: of the node.
        sizes: of the region.
    """
    value = node.meta["val"]
    if isinstance(axis, Batch):
        shape, strides = tuple(value.shape), tuple(value.stride())
        return not any(map(is_symbolic, (*shape, *strides))) and _is_dense(shape, strides)
    is_rows = isinstance(axis, Rows) and axis.dim == 0 and _has_rows(value)
    return is_rows and str(value.shape[0]) in sizes


def is_symbolic(size: object) -> bool:
    """Return whether a size is known at run time only."""
    return not isinstance(size, int)


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements of a tensor lie side by side, each once."""
    want = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1 and stride != want:
            return False
        want *= size
    return True


def _has_rows(value: torch.Tensor) -> bool:
    """Return whether a tensor has rows of known size that lie side by side."""
    sizes, strides = tuple(value.shape[1:]), tuple(value.stride())
    known = not any(map(is_symbolic, (*sizes, *strides)))
    return known and list(strides) == [prod(sizes[at:]) for at in range(len(strides))]
