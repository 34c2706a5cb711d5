"""Nodes that stand for those of parts, to be priced: in a graph of their own that never runs."""

from collections.abc import Iterable, Sequence
from typing import Any, cast, final

import torch
from torch import fx

from halley.compiler.fusion import WHOLE
from halley.compiler.partition.axes import Axes, Axis, Batch, BatchFlow, Division, Rows
from halley.compiler.sizes import Sizes


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
