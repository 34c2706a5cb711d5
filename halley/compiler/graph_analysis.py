"""Analyse a graph of operators: kinds of nodes, sizes of results, dependencies, legal orders."""

import math
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, cast, final

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from halley.compiler.graph_collectives import (
    Kind,
    collective_kind,
    find_operator,
    is_wait,
    operator_name,
)


class NodeKind(Enum):
    """The kind of work that a graph node does when the graph runs."""

    INPUT = "input"
    OUTPUT = "output"
    START = "start"  # starts a collective and returns at once
    WAIT = "wait"  # blocks the compute stream until a collective has ended
    FUSED = "fused"  # computes and communicates in one operator; the compute stream runs both
    VIEW = "view"  # makes a view, a size or a tuple element: no kernel
    COMPUTE = "compute"


# Operators are compared by name, so that this file does not import the packages that define them.
_GROUPED_GEMMS = frozenset({
    "aten::_grouped_mm", "aten::_scaled_grouped_mm",
    "halley::expert_gemm", "halley::expert_weight_gemm",
})  # fmt: skip
_GEMMS = _GROUPED_GEMMS | {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm",
    "halley::weight_gemm", "halley::gemm_with_carveout",
}  # fmt: skip
_EMPTY = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
)


def result_of(node: fx.Node) -> object:
    """Return the fake tensors or number that tracing stored as a node's result, or None."""
    return node.meta.get("val")


def without_values() -> FakeTensorMode:
    """Return a ``FakeTensorMode`` for tensors without values, whose sizes may depend on data."""
    return FakeTensorMode(shape_env=ShapeEnv())


@final
class Sizes:
    """Gives shapes and numbers of bytes of results; assumes a value for sizes that depend on data.

    The assumed value is ``unknown``, also for a sum of such sizes. All ranks use the same value.
    """

    def __init__(self, unknown: int) -> None:
        self._unknown = unknown

    def number(self, size: int | torch.SymInt) -> int:
        """Return a size as an integer; for a size that depends on data, the assumed value."""
        known = _known_size(size)
        return self._unknown if known is None else known

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return a shape; its first data-dependent size is ``unknown``, any further ones are 1.

        The first such size is a number of rows. Further ones are assumed to be small.
        """
        shape = cast(Sequence[int | torch.SymInt], tensor.shape)
        unknown = [at for at, size in enumerate(shape) if _known_size(size) is None]
        return tuple(1 if at in unknown[1:] else self.number(size) for at, size in enumerate(shape))

    def num_bytes(self, result: object) -> int:
        """Return the number of bytes of a tensor, or of all tensors of a tuple; else 0."""
        if isinstance(result, torch.Tensor):
            return result.element_size() * math.prod(self.shape(result))
        if isinstance(result, tuple | list):
            return sum(map(self.num_bytes, cast(Sequence[object], result)))
        return 0


def _known_size(size: int | torch.SymInt) -> int | None:
    """Return a tensor size as it was in the traced example; None if it depends on data."""
    known: object = size if isinstance(size, int) else getattr(cast(Any, size).node, "hint", None)
    return known if isinstance(known, int) else None


def is_gemm(node: fx.Node) -> bool:
    """Return whether a graph node is a GEMM: dense, batched or grouped."""
    return operator_name(node) in _GEMMS


def is_grouped_gemm(node: fx.Node) -> bool:
    """Return whether a graph node multiplies groups of rows by a matrix for each group."""
    return operator_name(node) in _GROUPED_GEMMS


def module_of(node: fx.Node) -> str:
    """Return the path of a node's ``nn.Module``, such as "layers.1.mlp"; "" if it has none."""
    stack: Any = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = [*stack.values()][-1][0] if stack else ""
    return path.partition("].")[2] or path  # Dynamo's paths begin with a root such as "L['self']."


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of the 1 bits of an integer, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def mask_of(indices: Iterable[int]) -> int:
    """Return the bit mask of distinct indices: the integer whose bits at these positions are 1."""
    return sum(1 << index for index in indices)


@final
class GraphAnalysis:
    """Kinds and dependencies of the nodes of a graph, by index of the node.

    A node must come after the nodes whose results it reads. Three rules add dependencies:

    1. A node that writes to its arguments stays after all nodes before it and before all after it.
    2. Nodes that draw random numbers keep their order.
    3. All-to-alls, all-gathers and fused operators keep their order: if ranks ran them in
       different orders, they would deadlock.

    Sets of nodes are bit masks: bit i is the node of index i. One ``&`` then intersects the
    ancestors of a node with any other set, also in graphs of thousands of nodes.

    Attributes:
        nodes, kinds: all nodes in the order of the graph, and the kind of each.
        collectives: kind of the collective that each node starts, or None.
        needs: for each node the indices of the nodes that it directly depends on, ascending.
        ancestors, descendants: by node, the mask of all nodes that must come before or after it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.kinds = [node_kind(node) for node in self.nodes]
        self.collectives: list[Kind | None] = [collective_kind(node) for node in self.nodes]
        self.needs = _find_needs(self.nodes, self.collectives)
        self.ancestors = [0] * len(self.nodes)
        for index, needs in enumerate(self.needs):
            for need in needs:
                self.ancestors[index] |= self.ancestors[need] | 1 << need
        self.descendants = [0] * len(self.nodes)
        for index in reversed(range(len(self.nodes))):
            below = self.descendants[index] | 1 << index
            for need in self.needs[index]:
                self.descendants[need] |= below

    def find(self, *kinds: NodeKind) -> list[int]:
        """Return the indices of all nodes of the given kinds, ascending."""
        return [index for index, kind in enumerate(self.kinds) if kind in kinds]

    def find_collectives(self, *kinds: Kind) -> list[int]:
        """Return the indices of the nodes whose collective is of one of ``kinds``, ascending."""
        return [index for index, kind in enumerate(self.collectives) if kind in kinds]

    def find_waits(self, start: int) -> list[int]:
        """Return the indices of the waits for the collective that node ``start`` starts."""
        return [index for index in self.find(NodeKind.WAIT) if start in self.needs[index]]

    def find_window(self, start: int) -> range:
        """Return the indices of nodes between a start and its first wait; none without a wait."""
        return range(start + 1, min(self.find_waits(start), default=start + 1))

    def check_order(self, order: Sequence[int]) -> None:
        """Raise a ``RuntimeError`` if ``order``, a list of node indices, breaks a dependency.

        Each node must come once, after its ancestors. Inputs are first, in order; the output last.
        """
        if sorted(order) != list(range(len(self.nodes))):
            raise RuntimeError("an order must have each node of its graph once")
        seen = 0
        for index in order:
            if missing := self.ancestors[index] & ~seen:
                names = [self.nodes[other].name for other in bits(missing)]
                raise RuntimeError(f"{self.nodes[index].name} must come after {names}")
            seen |= 1 << index
        inputs = self.find(NodeKind.INPUT)
        if list(order[: len(inputs)]) != inputs or self.kinds[order[-1]] is not NodeKind.OUTPUT:
            raise RuntimeError("inputs must come first, in their order, and the output last")


def node_kind(node: fx.Node) -> NodeKind:
    """Return the kind of work that a graph node does."""
    if node.op == "placeholder":
        return NodeKind.INPUT
    if node.op == "output":
        return NodeKind.OUTPUT
    if is_wait(node):
        return NodeKind.WAIT
    if kind := collective_kind(node):
        return NodeKind.FUSED if kind == "fused" else NodeKind.START
    return NodeKind.VIEW if is_view(node) else NodeKind.COMPUTE


def is_view(node: fx.Node) -> bool:
    """Return whether a node launches no kernel: it is a view, an element of a tuple or a number."""
    operator = find_operator(node)
    if operator is None:
        return node.op in ("get_attr", "call_function")  # such as getitem and arithmetic on sizes
    # ``reshape`` and ``_unsafe_view`` return a view if strides allow, whatever their schema says.
    if operator_name(node) in ("aten::reshape", "aten::_unsafe_view"):
        return True
    returns = operator._schema.returns  # pyright: ignore[reportPrivateUsage]
    aliases = [result.alias_info for result in returns]
    if aliases and all(alias is not None and not alias.is_write for alias in aliases):
        return True
    result = result_of(node)
    return result is not None and not isinstance(result, torch.Tensor | tuple | list)


def _find_needs(nodes: list[fx.Node], collectives: list[Kind | None]) -> list[tuple[int, ...]]:
    """Return, for each node, the indices of the nodes that must run before it."""
    position = {node: index for index, node in enumerate(nodes)}
    found: list[tuple[int, ...]] = []
    barrier: set[int] = set()  # the last node that wrote to an argument
    last_random: set[int] = set()
    last_ordered: set[int] = set()  # the last collective of a kind that keeps its order
    for index, node in enumerate(nodes):
        if node.op == "placeholder":
            found.append(())
            continue
        needs = {position[source] for source in node.all_input_nodes} | barrier
        if node.op == "output" or mutates_arguments(node):
            needs.update(range(index))
            barrier = {index}
        if is_random(node):
            needs |= last_random
            last_random = {index}
        # Gradient reductions have no fixed order here: all ranks follow the order of rank 0's plan.
        if collectives[index] in ("all_to_all", "gather", "fused"):
            needs |= last_ordered
            last_ordered = {index}
        found.append(tuple(sorted(needs)))
    return found


def is_empty(node: fx.Node) -> bool:
    """Return whether a graph node allocates a tensor without initial values, as ``empty`` does."""
    return operator_name(node) in _EMPTY


def mutates_arguments(node: fx.Node) -> bool:
    """Return whether the operator of a graph node writes to its arguments, by its schema."""
    operator = find_operator(node)
    return operator is not None and operator._schema.is_mutable  # pyright: ignore[reportPrivateUsage]


def is_random(node: fx.Node) -> bool:
    """Return whether a graph node draws random numbers; attention without dropout does not."""
    operator = find_operator(node)
    if operator is None or torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    arguments = operator._schema.arguments  # pyright: ignore[reportPrivateUsage]
    names = [argument.name for argument in arguments]
    if "dropout_p" not in names:
        return True
    at = names.index("dropout_p")
    given = node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given)
