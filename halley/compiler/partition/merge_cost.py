"""Microseconds of what puts parts together, operator by operator as ``merge`` adds them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import fx

from halley.compiler.fusion import WHOLE
from halley.compiler.node_cost import NodeCost, host_us
from halley.compiler.partition.axes import (
    Axes,
    Axis,
    Batch,
    BatchFlow,
    Counts,
    Division,
    Layout,
    Rows,
)
from halley.compiler.partition.merge import find_sizes, fits_in_place
from halley.compiler.partition.region import Region
from halley.compiler.sizes import Sizes
from halley.ops.in_place_concat import concat_order, rows_of_microbatch, write_rows, write_slice


@final
class PricingNodes:
    """Makes nodes with the shapes of parts.

    Args:
        flow: of the graph whose nodes run in parts.
        sizes: of what nodes return.
    """

    def __init__(self, flow: BatchFlow, sizes: Sizes) -> None:
        self._flow = flow
        self._sizes = sizes
        module = next(iter(flow.axes)).graph.owning_module
        self._graph = fx.Graph(owning_module=module)

    def of_part(self, node: fx.Node, num_parts: int) -> fx.Node:
        """Return a node like this one, with the shapes of a part."""
        call = self._flow.calls[node]
        assert isinstance(call, Division)

        def operand(source: fx.Node) -> fx.Node:
            if source.op == "get_attr":
                return self._graph.create_node("get_attr", source.target)
            axes = call.splits.get(source) or self._flow.axes[source]
            part = self.value_of_part(source.meta["val"], axes, num_parts)
            return self.placeholder(part, of=source)

        args = cast(tuple[Any, ...], fx.map_arg(node.args, operand))
        kwargs = cast(dict[str, Any], fx.map_arg(node.kwargs, operand))
        pricing_node = self._graph.call_function(cast(Any, node.target), args, kwargs)
        pricing_node.meta["val"] = self.value_of_part(
            node.meta["val"], self._flow.axes[node], num_parts
        )
        pricing_node.meta[WHOLE] = node
        return pricing_node

    def call(
        self, target: Any, *operands: object, result: object, of: fx.Node | None = None
    ) -> fx.Node:
        """Return a call of values that returns a value; a list of tensors is one operand.

        Args:
            target: operator.
            operands: values.
            result: value.
            of: node whose parts the operands are.
        """

        def operand(value: object) -> Any:
            if isinstance(value, list):
                return list(map(operand, cast(list[object], value)))
            return self.placeholder(value, of=of) if isinstance(value, torch.Tensor) else value

        node = self._graph.call_function(target, tuple(map(operand, operands)))
        node.meta["val"] = result
        return node

    def shape(self, value: object) -> tuple[int, ...]:
        """Return the shape of a tensor, sizes that depend on data as they are assumed."""
        return tuple(self._sizes.shape(cast(torch.Tensor, value)))

    def placeholder(self, value: object, *, of: fx.Node | None = None) -> fx.Node:
        """Return an input that has a value, that of a node's part if one is given."""
        node = self._graph.create_node("placeholder", "x")
        node.meta["val"] = value
        if of is not None:
            node.meta[WHOLE] = of
        return node

    def value_of_part(self, value: object, axes: Axes, num_parts: int) -> object:
        """Return a value of a part's shape, without memory."""
        if isinstance(value, tuple | list):
            items = cast(Sequence[object], value)
            each: Iterable[Axis | None] = axes if isinstance(axes, tuple) else [axes] * len(items)
            return tuple(
                self.value_of_part(item, axis, num_parts)
                for item, axis in zip(items, each, strict=True)
            )
        if not isinstance(value, torch.Tensor):
            return value
        shape = list(self._sizes.shape(value))
        if isinstance(axes, Batch | Rows):
            shape[axes.dim] = max(1, shape[axes.dim] // num_parts)
        return torch.empty(shape, dtype=value.dtype, device="meta")


_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Price:
    """Microseconds on the device, and those that the host takes to issue it."""

    device_us: float = 0.0
    host_us: float = 0.0

    def __add__(self, other: "Price") -> "Price":
        return Price(self.device_us + other.device_us, self.host_us + other.host_us)


Known = dict[tuple[object, ...], Price]


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
    """

    def __init__(
        self,
        region: Region,
        num_parts: int,
        *,
        flow: BatchFlow,
        cost: NodeCost,
        pricing_nodes: PricingNodes,
        known: Known,
    ) -> None:
        self._num_parts = num_parts
        self._flow = flow
        self._cost = cost
        self._pricing_nodes = pricing_nodes
        self._known = known
        sizes = find_sizes(region)
        self._filled = {
            node
            for ending, node in region.after
            if ending == "merge" and fits_in_place(node, flow.axes[node], sizes)
        }
        self._seen: set[object] = set()

    def fill(self, node: fx.Node, part: int) -> Price:
        """Return what it takes to write a part into its whole; 0 where that is not done."""
        if node not in self._filled:
            return Price()
        axis, whole = cast(Batch | Rows, self._flow.axes[node]), node.meta["val"]
        own = self._pricing_nodes.value_of_part(whole, axis, self._num_parts)
        empty = _ATEN.new_empty.default
        price = Price()
        if part == 0:
            shape = self._pricing_nodes.shape(whole)
            price = self._price("new", node, lambda: self._call(empty, own, shape, result=whole))
        if isinstance(axis, Batch):
            fill = self._price(
                "fill", node, lambda: self._call(write_slice, whole, own, result=whole, of=node)
            )
            return price + fill
        places = self._int64(axis, own)
        if self._is_new(axis.layout, part):
            counts = self._counts(axis.layout)
            price += self._join_counts(axis.layout) + self._price(
                "places",
                node,
                lambda: self._call(rows_of_microbatch, counts, result=places),
            )
        return price + self._price(
            "fill", node, lambda: self._call(write_rows, whole, own, places, result=whole)
        )

    def merge(self, node: fx.Node) -> Price:
        """Return what it takes to put all parts together; 0 where they are in the whole already."""
        axis, whole = cast(Axis, self._flow.axes[node]), node.meta["val"]
        if node in self._filled or not isinstance(whole, torch.Tensor):
            return Price()
        if isinstance(axis, Counts):
            add = self._price(
                "add", node, lambda: self._call(_ATEN.add.Tensor, whole, whole, result=whole)
            )
            return sum([add] * (self._num_parts - 1), Price())
        if not isinstance(axis, Batch | Rows):
            return Price()
        parts = [
            self._pricing_nodes.value_of_part(whole, axis, self._num_parts)
            for _ in range(self._num_parts)
        ]
        cat = _ATEN.cat.default
        price = self._price("cat", node, lambda: self._call(cat, parts, result=whole, of=node))
        if isinstance(axis, Batch):
            return price
        order = self._int64(axis, whole)
        if self._is_new(axis.layout, None):
            counts = self._counts(axis.layout)
            price += self._join_counts(axis.layout) + self._price(
                "order", node, lambda: self._call(concat_order, counts, result=order)
            )
        return price + self._price(
            "index", node, lambda: self._call(_ATEN.index.Tensor, whole, [order], result=whole)
        )

    def _price(self, what: str, node: fx.Node, make: Callable[[], fx.Node]) -> Price:
        key = (what, node, self._num_parts)
        if key not in self._known:
            made = make()
            device_us = self._cost(made)
            issue_us = host_us(made, self._cost) if device_us else 0.0
            self._known[key] = Price(device_us, issue_us)
        return self._known[key]

    def _call(
        self, target: object, *operands: object, result: object, of: fx.Node | None = None
    ) -> fx.Node:
        return self._pricing_nodes.call(target, *operands, result=result, of=of)

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

    def _join_counts(self, layout: Layout) -> Price:
        """Return what it takes to join the numbers of all parts, once for a layout."""
        if not self._is_new(layout, -1):
            return Price()
        counts = self._counts(layout)
        parts: list[object] = list(counts.chunk(self._num_parts))
        cat = _ATEN.cat.default
        return self._price("counts", layout.node, lambda: self._call(cat, parts, result=counts))

    def _int64(self, axis: Rows, rows: object) -> torch.Tensor:
        """Return a number for each row, without values."""
        assert isinstance(rows, torch.Tensor)
        return rows.new_empty(rows.shape[axis.dim], dtype=torch.int64)
