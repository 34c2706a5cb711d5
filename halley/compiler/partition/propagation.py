"""Find the batch dimension of every value of a graph in one sweep (batch-dim propagation).

Inputs with the batch have it along dimension 0. A rule per operator derives the axis of its result
from the axes of its operands, or says why the operator needs the full batch. An axis tells how the
microbatches of a value make up its full-batch value. DTensor's placements are comparable:

    axis    full-batch value                                             DTensor
    Batch   concatenation of the microbatches along a dimension          Shard
    Rows    all rows, sorted by destination, then by microbatch
    Index   row indices; each microbatch numbers its own rows from 0
    Counts  sum of the microbatches' integers                            Partial
    Last    value of the last microbatch, such as a running counter
    None    the same value in every microbatch                           Replicate

Source: Lancet (arXiv:2404.19429), section 5. Lancet solves constraints for each range of operators;
one sweep here serves all segments.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast, final

import torch
from torch import fx

from halley.compiler.graph_analysis import is_random, mutates_arguments
from halley.compiler.graph_collectives import find_operator, operator_name


@dataclass(frozen=True)
class Batch:
    """Slices along ``dim``, one per microbatch, with ``unit`` elements for each sample."""

    dim: int
    unit: int = 1


@dataclass(frozen=True)
class Layout:
    """The numbers of rows for each destination (rank or expert), in order.

    Attributes:
        node: returns them as int64. Its copy in a microbatch counts the rows of that microbatch.
        output: index of the result, if ``node`` has several.
    """

    node: fx.Node
    output: int | None = None


@dataclass(frozen=True)
class Rows:
    """Rows along ``dim``, sorted by the destinations of a layout.

    In the full batch, rows for one destination are adjacent, those of earlier microbatches first.
    """

    dim: int
    layout: Layout


@dataclass(frozen=True)
class Index:
    """Row indices, such as a permutation. Rows gathered with them have the layout."""

    layout: Layout


@dataclass(frozen=True)
class Counts:
    """Integers derived from a layout. The sum over the microbatches is the full-batch value."""

    layout: Layout


@dataclass(frozen=True)
class Last:
    """A value whose full-batch value is that of the last microbatch, such as a counter."""


Axis: TypeAlias = Batch | Rows | Index | Counts | Last
# Axis of a node's result, or a tuple with one axis for each of several results.
Axes: TypeAlias = Axis | tuple[Axis | None, ...] | None


@dataclass(frozen=True, kw_only=True)
class Division:
    """How an operator runs on a microbatch.

    Attributes:
        result: axes of the result.
        splits: operands without an axis of which each microbatch reads a slice, as a bias for each
            sample. Other operands without an axis are read in full.
        sizes: position of the argument that holds the shape of the result, as in ``view``.
        carry: (argument, result) of a running counter. The argument of one microbatch is the result
            of the microbatch before.
    """

    result: Axes
    splits: Mapping[fx.Node, Batch] = field(default_factory=dict[fx.Node, Batch])
    sizes: int | None = None
    carry: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why an operator needs the full batch.

    Attributes:
        reason: a sentence for the user.
        result: axes of the result, if they are known: operators behind it may run in microbatches.
    """

    reason: str
    result: Axes = None


@final
class Call:
    """One call of an operator, as a rule sees it.

    Args:
        node: the call.
        axes: axes of all nodes before it.
    """

    def __init__(self, node: fx.Node, axes: Mapping[fx.Node, Axes]) -> None:
        self.node = node
        self.name = operator_name(node) or getattr(node.target, "__name__", str(node.target))
        self._axes = axes

    def get(self, name: str) -> Any:
        """Return an argument by its name in the operator's schema, or its default value.

        Raises:
            ValueError: the schema has no such argument.
        """
        for position, argument in enumerate(self._arguments()):
            if argument.name == name:
                if position < len(self.node.args):
                    return self.node.args[position]
                return self.node.kwargs.get(name, argument.default_value)
        raise ValueError(f"argument ({name}) must be one of {self.name}")

    def takes(self, name: str) -> bool:
        """Return whether the operator's schema has an argument of this name."""
        return any(argument.name == name for argument in self._arguments())

    def _arguments(self) -> Sequence[Any]:
        operator = find_operator(self.node)
        assert operator is not None
        return operator._schema.arguments  # pyright: ignore[reportPrivateUsage]

    def axis(self, argument: object) -> Axis | None:
        """Return the axis of an argument; of a list, that of its first item that has one."""
        if isinstance(argument, fx.Node):
            found = self._axes.get(argument)
            return None if isinstance(found, tuple) else found
        if isinstance(argument, list | tuple):
            axes = map(self.axis, cast(Sequence[object], argument))
            return next((axis for axis in axes if axis is not None), None)
        return None

    def refused(self, reason: str, result: Axes = None) -> Refusal:
        """Return a refusal: this call needs the full batch.

        Args:
            reason: end of a sentence that begins with the name of the operator.
            result: axes of the result, if they are known.
        """
        return Refusal(reason=f"{self.node.name} ({self.name}) {reason}", result=result)


Rule: TypeAlias = Callable[[Call], Division | Refusal]


@dataclass(frozen=True, kw_only=True)
class BatchFlow:
    """Result of batch-dim propagation over a graph.

    Attributes:
        batch_size: number of samples.
        axes: axes of each node's result.
        calls: for each operator that depends on the batch, how it runs on a microbatch, or why not.
    """

    batch_size: int
    axes: dict[fx.Node, Axes]
    calls: dict[fx.Node, Division | Refusal]


def propagate_batch(
    graph: fx.Graph, batch_inputs: Collection[str], rules: Mapping[str, Rule]
) -> BatchFlow:
    """Find the axes of all values of a graph.

    Args:
        graph: graph of operators.
        batch_inputs: names of inputs that may have the batch as dimension 0. The first one defines
            the batch size; inputs of another size have no batch.
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
            calls[node] = _apply_rule(Call(node, axes), axes, rules)
            axes[node] = calls[node].result
    return BatchFlow(batch_size=batch_size, axes=axes, calls=calls)


def _apply_rule(
    call: Call, axes: Mapping[fx.Node, Axes], rules: Mapping[str, Rule]
) -> Division | Refusal:
    node, operator = call.node, find_operator(call.node)
    if call.name == "getitem":
        source = axes[cast(fx.Node, node.args[0])]
        index = cast(int, node.args[1])
        return Division(result=source[index] if isinstance(source, tuple) else source)
    if is_random(node):
        axis = call.axis(node.args[0]) if node.args else None
        # Both results of dropout, values and mask, have the axis of its input.
        result = (axis, axis) if call.name == "aten::native_dropout" else None
        return call.refused("draws random numbers, and microbatches would draw others", result)
    if mutates_arguments(node):
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
    has_one_result = isinstance(node.meta.get("val"), torch.Tensor)
    if isinstance(found, Division) and isinstance(found.result, tuple) and has_one_result:
        raise TypeError(
            f"the rule of {call.name} must return one axis for the one result of {node.name}, "
            f"not {found.result!r}"
        )
    return found


def _first_size(node: fx.Node) -> int:
    """Return the size of an input's dimension 0; 0 if it is dynamic or the input is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return 0
    size = cast(Sequence[object], value.shape)[0]
    return size if isinstance(size, int) else 0
