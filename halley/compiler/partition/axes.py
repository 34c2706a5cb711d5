"""Along what a graph's values are divided when its batch comes in parts, found by one sweep.

Inputs of the model are divided along their first dimension. A rule for each operator says how its
results are divided if its operands are, or why it needs the whole batch. A value keeps the division
that it has: nothing is divided again, so a part of a result is what the parts of operands give.

Source: Lancet (arXiv:2404.19429), section 5, which solves constraints over a range of operators;
here rules follow the graph, once for all ranges.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast, final

import torch
from torch import fx

from halley.compiler.graph_analysis import is_random, writes
from halley.compiler.graph_collectives import find_operator, operator_name


@dataclass(frozen=True)
class Batch:
    """Ranges of a dimension, one a part: ``unit`` elements for each sample of the batch."""

    dim: int
    unit: int = 1


@dataclass(frozen=True)
class Layout:
    """Numbers of rows that stand together, for each destination or source, in order.

    Attributes:
        node: returns them, int64 of any shape, flat in that order; in parts, those of the part.
        output: which of the node's results they are, if it has several.
    """

    node: fx.Node
    output: int | None = None


@dataclass(frozen=True)
class Rows:
    """Rows along ``dim`` by a layout; of one destination, those of earlier parts first."""

    dim: int
    layout: Layout


@dataclass(frozen=True)
class Index:
    """Places of rows in another order: a part counts its own. What they pick has that layout."""

    layout: Layout


@dataclass(frozen=True)
class Counts:
    """Integers of which the whole's are the sums over the parts, made of a layout's numbers."""

    layout: Layout


@dataclass(frozen=True)
class Last:
    """A value that the last part leaves as the whole batch does, such as a counter."""


Axis: TypeAlias = Batch | Rows | Index | Counts | Last
# Of a node's result: one for all, or one for each of several. None is whole: parts take all of it,
# or the range of it that stands beside a range of another operand.
Axes: TypeAlias = Axis | tuple[Axis | None, ...] | None


@dataclass(frozen=True, kw_only=True)
class Division:
    """How an operator runs on a part.

    Attributes:
        result: how its result is divided.
        splits: operands that are the same for all parts, of which a part takes its range.
        sizes: position of the argument that lists the result's sizes, if there is one.
        carry: (argument, result) of a counter: the argument is the result of the part before.
    """

    result: Axes
    splits: Mapping[fx.Node, Batch] = field(default_factory=dict[fx.Node, Batch])
    sizes: int | None = None
    carry: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why an operator needs the whole batch.

    Attributes:
        reason: for people.
        result: how its result is divided where it is known; what follows may then run on parts.
    """

    reason: str
    result: Axes = None


@final
class Call:
    """One call of an operator, as rules see it.

    Args:
        node: the call.
        axes: of all nodes before it.
    """

    def __init__(self, node: fx.Node, axes: Mapping[fx.Node, Axes]) -> None:
        self.node = node
        self.name = operator_name(node) or getattr(node.target, "__name__", str(node.target))
        self._axes = axes

    def get(self, name: str) -> Any:
        """Return the argument of that name in the operator's schema, given or by default."""
        operator = find_operator(self.node)
        assert operator is not None
        arguments = operator._schema.arguments  # pyright: ignore[reportPrivateUsage]
        for at, argument in enumerate(arguments):
            if argument.name == name:
                if at < len(self.node.args):
                    return self.node.args[at]
                return self.node.kwargs.get(name, argument.default_value)
        raise ValueError(f"argument ({name}) must be one of {self.name}")

    def takes(self, name: str) -> bool:
        """Return whether the operator's schema has an argument of that name."""
        operator = find_operator(self.node)
        assert operator is not None
        arguments = operator._schema.arguments  # pyright: ignore[reportPrivateUsage]
        return any(argument.name == name for argument in arguments)

    def axis(self, argument: object) -> Axis | None:
        """Return how an argument is divided; that of lists is the first one's that is divided."""
        if isinstance(argument, fx.Node):
            found = self._axes.get(argument)
            return None if isinstance(found, tuple) else found
        if isinstance(argument, list | tuple):
            items = map(self.axis, cast(Sequence[object], argument))
            return next((axis for axis in items if axis is not None), None)
        return None

    def refused(self, reason: str, result: Axes = None) -> Refusal:
        """Return that the call needs the whole batch.

        Args:
            reason: ends a sentence that begins with the operator's name.
            result: how its result is divided, if that is known.
        """
        return Refusal(reason=f"{self.node.name} ({self.name}) {reason}", result=result)


Rule: TypeAlias = Callable[[Call], Division | Refusal]


@dataclass(frozen=True, kw_only=True)
class BatchFlow:
    """How the batch goes through a graph.

    Attributes:
        batch_size: samples.
        axes: of each node's result.
        calls: how each node that depends on the batch runs on parts, or why not.
    """

    batch_size: int
    axes: dict[fx.Node, Axes]
    calls: dict[fx.Node, Division | Refusal]


def find_axes(
    graph: fx.Graph, batch_inputs: Collection[str], rules: Mapping[str, Rule]
) -> BatchFlow:
    """Return how the batch goes through a graph.

    Args:
        graph: of operators.
        batch_inputs: names of the inputs whose first dimension may be the batch. The first gives
            its size, others count if theirs is equal.
        rules: by operator, as ``namespace::name``.
    """
    axes: dict[fx.Node, Axes] = {}
    calls: dict[fx.Node, Division | Refusal] = {}
    batch_size = 0
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in batch_inputs:
            size = _first_size(node)
            batch_size = batch_size or size
            axes[node] = Batch(0) if size and size == batch_size else None
        elif node.op != "call_function" or all(axes[n] is None for n in node.all_input_nodes):
            axes[node] = None
        else:
            calls[node] = _judge(Call(node, axes), axes, rules)
            axes[node] = calls[node].result
    return BatchFlow(batch_size=batch_size, axes=axes, calls=calls)


def _judge(
    call: Call, axes: Mapping[fx.Node, Axes], rules: Mapping[str, Rule]
) -> Division | Refusal:
    """Return how one node that depends on the batch runs on parts, or why not."""
    node, operator = call.node, find_operator(call.node)
    if call.name == "getitem":
        source = axes[cast(fx.Node, node.args[0])]
        return Division(
            result=source[cast(int, node.args[1])] if isinstance(source, tuple) else source
        )
    if is_random(node):
        reason = "draws random numbers, which would be others in parts"
        axis = call.axis(node.args[0]) if node.args else None
        is_dropout = call.name == "aten::native_dropout"  # whose results are as what it gets
        return call.refused(reason, (axis, axis) if is_dropout else None)
    if writes(node):
        return call.refused("writes to its arguments")
    rule = rules.get(call.name)
    if rule is None and operator is not None and torch.Tag.pointwise in operator.tags:
        rule = rules["pointwise"]
    if rule is None:
        return call.refused("has no rule")
    try:
        found = cast(object, rule(call))  # a user's rule may return anything
    except Exception as error:
        raise RuntimeError(f"the rule of {call.name} failed for {node.name}: {error!r}") from error
    if not isinstance(found, Division | Refusal):
        raise TypeError(
            f"the rule of {call.name} must return a Division or a Refusal for {node.name}, "
            f"not {found!r}"
        )
    is_one = isinstance(node.meta.get("val"), torch.Tensor)
    if isinstance(found, Division) and isinstance(found.result, tuple) and is_one:
        raise TypeError(
            f"the rule of {call.name} must say how the one result of {node.name} is divided, "
            f"not {found.result!r}"
        )
    return found


def _first_size(node: fx.Node) -> int:
    """Return the size of an input's first dimension; 0 if it has none, or one that may change."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return 0
    size = cast(Sequence[object], value.shape)[0]
    return size if isinstance(size, int) else 0
