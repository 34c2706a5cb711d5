"""Microseconds of what puts parts together, operator by operator as ``merge`` adds them."""

from collections.abc import Callable
from typing import cast, final

import torch
from torch import fx

from halley.compiler.node_cost import NodeCost
from halley.compiler.partition.axes import Axis, Batch, BatchFlow, Counts, Layout, Rows
from halley.compiler.partition.merge import find_sizes, fits_in_place
from halley.compiler.partition.region import Region
from halley.compiler.partition.shadows import Shadows
from halley.ops.fills import fill_range, fill_rows, places_of_part
from halley.ops.routed_rows import order_of_parts


_ATEN = torch.ops.aten
Known = dict[tuple[object, ...], float]


@final
class MergeCost:
    """Prices the parts of one region's nodes that others want whole.

    Numbers that several nodes need, such as the places of rows, are in the price of the first that
    is asked for, which must be that of the first that runs.

    Args:
        region: that runs in parts.
        num_parts: how many.
        flow: of the graph.
        cost: microseconds of a node.
        shadows: makes the nodes that are priced.
        known: prices of other calls on the same graph; grows.
        in_place: whether parts are written into one buffer, as in ``Merger``.
    """

    def __init__(
        self,
        region: Region,
        num_parts: int,
        *,
        flow: BatchFlow,
        cost: NodeCost,
        shadows: Shadows,
        known: Known,
        in_place: bool,
    ) -> None:
        self._num_parts = num_parts
        self._flow = flow
        self._cost = cost
        self._shadows = shadows
        self._known = known
        sizes = find_sizes(region) if in_place else {}
        self._filled = {
            node
            for ending, node in region.after
            if in_place and ending == "merge" and fits_in_place(node, flow.axes[node], sizes)
        }
        self._seen: set[object] = set()

    def fill(self, node: fx.Node, part: int) -> float:
        """Return the time to write a part into its whole; 0 where that is not done."""
        if node not in self._filled:
            return 0.0
        axis, whole = cast(Batch | Rows, self._flow.axes[node]), node.meta["val"]
        own = self._shadows.value_of_part(whole, axis, self._num_parts)
        empty = _ATEN.new_empty.default
        time_us = 0.0
        if part == 0:
            shape = self._shadows.shape(whole)
            time_us = self._price("new", node, lambda: self._call(empty, own, shape, result=whole))
        if isinstance(axis, Batch):
            fill = self._price(
                "fill", node, lambda: self._call(fill_range, whole, own, result=whole)
            )
            return time_us + fill
        places = self._int64(axis, own)
        if self._is_new(axis.layout, part):
            counts = self._counts(axis.layout)
            time_us += self._counts_us(axis.layout) + self._price(
                "places",
                node,
                lambda: self._call(places_of_part, counts, result=places),
            )
        return time_us + self._price(
            "fill", node, lambda: self._call(fill_rows, whole, own, places, result=whole)
        )

    def merge(self, node: fx.Node) -> float:
        """Return the time to put all parts together; 0 where they were written into the whole."""
        axis, whole = cast(Axis, self._flow.axes[node]), node.meta["val"]
        if node in self._filled or not isinstance(whole, torch.Tensor):
            return 0.0
        if isinstance(axis, Counts):
            add = self._price(
                "add", node, lambda: self._call(_ATEN.add.Tensor, whole, whole, result=whole)
            )
            return (self._num_parts - 1) * add
        if not isinstance(axis, Batch | Rows):
            return 0.0
        parts = [
            self._shadows.value_of_part(whole, axis, self._num_parts)
            for _ in range(self._num_parts)
        ]
        cat = _ATEN.cat.default
        time_us = self._price("cat", node, lambda: self._call(cat, parts, result=whole, of=node))
        if isinstance(axis, Batch):
            return time_us
        order = self._int64(axis, whole)
        if self._is_new(axis.layout, None):
            counts = self._counts(axis.layout)
            time_us += self._counts_us(axis.layout) + self._price(
                "order", node, lambda: self._call(order_of_parts, counts, result=order)
            )
        return time_us + self._price(
            "index", node, lambda: self._call(_ATEN.index.Tensor, whole, [order], result=whole)
        )

    def _price(self, what: str, node: fx.Node, make: Callable[[], fx.Node]) -> float:
        key = (what, node, self._num_parts)
        if key not in self._known:
            self._known[key] = self._cost(make())
        return self._known[key]

    def _call(
        self, target: object, *operands: object, result: object, of: fx.Node | None = None
    ) -> fx.Node:
        return self._shadows.call(target, *operands, result=result, of=of)

    def _is_new(self, layout: Layout, part: int | None) -> bool:
        key = (layout, part)
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new

    def _counts(self, layout: Layout) -> torch.Tensor:
        """Return the numbers of a layout of all parts, without values."""
        value = layout.node.meta["val"]
        one = value if layout.output is None else value[layout.output]
        return torch.empty(one.numel() * self._num_parts, dtype=one.dtype, device="meta")

    def _counts_us(self, layout: Layout) -> float:
        """Return the time to join the numbers of all parts, once for a layout."""
        if not self._is_new(layout, -1):
            return 0.0
        counts = self._counts(layout)
        parts: list[object] = list(counts.chunk(self._num_parts))
        cat = _ATEN.cat.default
        return self._price("counts", layout.node, lambda: self._call(cat, parts, result=counts))

    def _int64(self, axis: Rows, rows: object) -> torch.Tensor:
        """Return a number for each row, without values."""
        assert isinstance(rows, torch.Tensor)
        return rows.new_empty(rows.shape[axis.dim], dtype=torch.int64)
