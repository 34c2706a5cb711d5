"""Price the operators that ``concat`` adds to a graph, before they are added."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast, final

import torch
from torch import fx

from halley.compiler.fusion import FULL_BATCH_NODE
from halley.compiler.node_cost import NodeCost, host_us
from halley.compiler.partition.concat import find_sizes, fits_in_place
from halley.compiler.partition.propagation import (
    Axes,
    Axis,
    Batch,
    BatchFlow,
    Counts,
    Division,
    Layout,
    Rows,
)
from halley.compiler.partition.segment import Segment
from halley.compiler.sizes import Sizes
from halley.ops.in_place_concat import concat_order, rows_of_microbatch, write_rows, write_slice


_ATEN = torch.ops.aten


@final
class PricingNodes:
    """Makes nodes with the shapes of a microbatch, on the meta device, in a graph of their own.

    Args:
        flow: batch-dim propagation over the graph that is priced.
        sizes: shapes and bytes of results.
    """

    def __init__(self, flow: BatchFlow, sizes: Sizes) -> None:
        self._flow = flow
        self._sizes = sizes
        # Constants of the module (``get_attr`` nodes) are looked up in the owning module.
        module = next(iter(flow.axes)).graph.owning_module
        self._graph = fx.Graph(owning_module=module)

    def of_microbatch(self, node: fx.Node, num_parts: int) -> fx.Node:
        """Return a copy of a node as one of ``num_parts`` microbatches runs it."""
        call = self._flow.calls[node]
        assert isinstance(call, Division)

        def operand(source: fx.Node) -> fx.Node:
            if source.op == "get_attr":
                return self._graph.create_node("get_attr", source.target)
            axes = call.splits.get(source) or self._flow.axes[source]
            value = self.microbatch_value(source.meta["val"], axes, num_parts)
            return self._placeholder(value, source)

        args = cast(tuple[Any, ...], fx.map_arg(node.args, operand))
        kwargs = cast(dict[str, Any], fx.map_arg(node.kwargs, operand))
        copy = self._graph.call_function(cast(Any, node.target), args, kwargs)
        copy.meta["val"] = self.microbatch_value(node.meta["val"], self._flow.axes[node], num_parts)
        copy.meta[FULL_BATCH_NODE] = node
        return copy

    def call(
        self, target: Any, operands: Sequence[object], *, result: object, source: fx.Node | None
    ) -> fx.Node:
        """Return the call of an operator on values.

        Args:
            target: the operator.
            operands: tensors, numbers and lists of tensors.
            result: value of the result.
            source: node of the graph whose microbatches the operands are, if there is one.
        """

        def operand(value: object) -> Any:
            if isinstance(value, list):
                return list(map(operand, cast(list[object], value)))
            return self._placeholder(value, source) if isinstance(value, torch.Tensor) else value

        node = self._graph.call_function(target, tuple(map(operand, operands)))
        node.meta["val"] = result
        return node

    def shape(self, value: object) -> tuple[int, ...]:
        """Return the shape of a tensor, with assumed numbers for sizes that depend on data."""
        return tuple(self._sizes.shape(cast(torch.Tensor, value)))

    def microbatch_value(self, value: object, axes: Axes, num_parts: int) -> object:
        """Return a value with the shape of a microbatch; tensors are on the meta device.

        Of rows whose number depends on data, a microbatch has an equal share.
        """
        if isinstance(value, tuple | list):
            items = cast(Sequence[object], value)
            each: Iterable[Axis | None] = axes if isinstance(axes, tuple) else [axes] * len(items)
            return tuple(
                self.microbatch_value(item, axis, num_parts)
                for item, axis in zip(items, each, strict=True)
            )
        if not isinstance(value, torch.Tensor):
            return value
        shape = list(self._sizes.shape(value))
        if isinstance(axes, Batch | Rows):
            shape[axes.dim] = max(1, shape[axes.dim] // num_parts)
        return torch.empty(shape, dtype=value.dtype, device="meta")

    def _placeholder(self, value: object, source: fx.Node | None) -> fx.Node:
        node = self._graph.create_node("placeholder", "x")
        node.meta["val"] = value
        if source is not None:
            node.meta[FULL_BATCH_NODE] = source
        return node


@dataclass(frozen=True)
class Price:
    """Microseconds on the device, and microseconds in which the host issues the work."""

    device_us: float = 0.0
    host_us: float = 0.0

    def __add__(self, other: "Price") -> "Price":
        return Price(self.device_us + other.device_us, self.host_us + other.host_us)


KnownPrices: TypeAlias = dict[tuple[object, ...], Price]


@final
class ConcatCost:
    """Prices the concats of one segment.

    Several concats may share a node, such as the row indices of a layout. The first concat that is
    priced includes it, so concats must be priced in the order in which they run.

    Args:
        segment: the segment.
        num_parts: number of microbatches.
        flow: batch-dim propagation over the graph.
        cost: microseconds of a node.
        pricing_nodes: makes the nodes to price.
        known: prices of the graph's other segments; this one adds its own.
    """

    def __init__(
        self,
        segment: Segment,
        num_parts: int,
        *,
        flow: BatchFlow,
        cost: NodeCost,
        pricing_nodes: PricingNodes,
        known: KnownPrices,
    ) -> None:
        self._num_parts = num_parts
        self._flow = flow
        self._cost = cost
        self._pricing_nodes = pricing_nodes
        self._known = known
        sizes = find_sizes(segment)
        self._in_place = {
            node
            for epilogue, node in segment.after
            if epilogue == "concat" and fits_in_place(node, flow.axes[node], sizes)
        }
        self._seen: set[object] = set()

    def write(self, node: fx.Node, microbatch: int) -> Price:
        """Return the price of writing a result into its buffer; 0 if no buffer is used."""
        if node not in self._in_place:
            return Price()
        axis, full = cast(Batch | Rows, self._flow.axes[node]), node.meta["val"]
        result = self._pricing_nodes.microbatch_value(full, axis, self._num_parts)
        price = Price()
        if microbatch == 0:
            args = (result, self._pricing_nodes.shape(full))
            price = self._price("new", node, _ATEN.new_empty.default, *args, result=full)
        if isinstance(axis, Batch):
            return price + self._price(
                "write", node, write_slice, full, result, result=full, source=node
            )
        indices = self._int64(axis, result)
        price += self._price_indices(axis, "rows", node, indices, key=microbatch)
        return price + self._price("write", node, write_rows, full, result, indices, result=full)

    def concat(self, node: fx.Node) -> Price:
        """Return the price of a concat behind the pipeline; 0 if it was done in place."""
        axis, full = cast(Axis, self._flow.axes[node]), node.meta["val"]
        if node in self._in_place or not isinstance(full, torch.Tensor):
            return Price()
        if isinstance(axis, Counts):  # one addition for each further microbatch
            add = self._price("add", node, _ATEN.add.Tensor, full, full, result=full)
            return sum([add] * (self._num_parts - 1), Price())
        if not isinstance(axis, Batch | Rows):
            return Price()
        results = [
            self._pricing_nodes.microbatch_value(full, axis, self._num_parts)
            for _ in range(self._num_parts)
        ]
        price = self._price("cat", node, _ATEN.cat.default, results, result=full, source=node)
        if isinstance(axis, Batch):
            return price
        order = self._int64(axis, full)
        price += self._price_indices(axis, "order", node, order, key=None)
        return price + self._price("index", node, _ATEN.index.Tensor, full, [order], result=full)

    def _price_indices(
        self, axis: Rows, what: str, node: fx.Node, indices: torch.Tensor, *, key: int | None
    ) -> Price:
        """Return the price of row indices, and of the row counts that they are computed from.

        Each is computed once for a layout and a ``key``: a microbatch, or None for the full batch.
        """
        layout = axis.layout
        if not self._is_first((layout, key)):
            return Price()
        counts, price = self._counts(layout), Price()
        if self._is_first(layout):
            each: list[object] = list(counts.chunk(self._num_parts))
            price = self._price("counts", layout.node, _ATEN.cat.default, each, result=counts)
        target = concat_order if key is None else rows_of_microbatch
        return price + self._price(what, node, target, counts, result=indices)

    def _price(
        self,
        what: str,
        node: fx.Node,
        target: object,
        *operands: object,
        result: object,
        source: fx.Node | None = None,
    ) -> Price:
        # A dynamic program asks for the same concat in many segments.
        key = (what, node, self._num_parts)
        if key not in self._known:
            call = self._pricing_nodes.call(target, operands, result=result, source=source)
            device_us = self._cost(call)
            self._known[key] = Price(device_us, host_us(call, self._cost) if device_us else 0.0)
        return self._known[key]

    def _is_first(self, key: object) -> bool:
        is_first = key not in self._seen
        self._seen.add(key)
        return is_first

    def _counts(self, layout: Layout) -> torch.Tensor:
        """Return the row counts of all microbatches, on the meta device."""
        value = layout.node.meta["val"]
        one = value if layout.output is None else value[layout.output]
        return torch.empty(one.numel() * self._num_parts, dtype=one.dtype, device="meta")

    def _int64(self, axis: Rows, rows: object) -> torch.Tensor:
        """Return a tensor of one int64 per row."""
        assert isinstance(rows, torch.Tensor)
        return rows.new_empty(rows.shape[axis.dim], dtype=torch.int64)
