"""Facts about a graph: what its nodes do, which depend on which, and which orders are legal."""

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, final

import torch
from torch import fx

from halley.compiler.graph_collectives import (
    Kind,
    collective_kind,
    find_operator,
    is_wait,
    operator_name,
)


class NodeKind(Enum):
    """What a node does when the graph runs."""

    INPUT = "input"
    OUTPUT = "output"
    START = "start"  # begins a collective, and returns
    WAIT = "wait"
    FUSED = "fused"  # computes and communicates, and returns when both are done
    VIEW = "view"  # names memory that is there, or a size: costs nothing
    COMPUTE = "compute"


_ATEN = torch.ops.aten
# Matrix products: what is long enough to hide an all-to-all.
_GEMMS = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN._grouped_mm.default,
        _ATEN._scaled_mm.default,
        _ATEN._scaled_grouped_mm.default,
    }
)
# By name: known without importing what defines them.
_GEMM_NAMES = frozenset(
    f"halley::{name}"
    for name in ("weight_gemm", "expert_gemm", "expert_weight_gemm", "gemm_with_carveout")
)

_EMPTY_NAMES = frozenset(
    {f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty")}
    | {"aten::new_empty_strided"}
)
_FILL_NAMES = frozenset({"halley::write_slice", "halley::write_rows"})


def is_gemm(node: fx.Node) -> bool:
    """Return whether a node is a matrix product, dense or grouped."""
    return find_operator(node) in _GEMMS or operator_name(node) in _GEMM_NAMES


def module_of(node: fx.Node) -> str:
    """Return the path of the module whose forward a node computes, or whose backward; "" if none.

    Example: "layers.1.mlp". A tracer notes it, as far as it knows modules.
    """
    stack: Any = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = [*stack.values()][-1][0] if stack else ""
    return path.partition("].")[2] or path


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of the ones in ``mask``, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@final
class GraphAnalysis:
    """A graph's nodes by index, what they do, and which must stand before which.

    Besides data, three things order nodes: a node that writes to its arguments stands where it is
    among all others; nodes that draw random numbers keep their order; collectives that ranks wait
    in keep theirs, which is the order of all ranks.

    Args:
        graph: of operators, as aot_autograd makes it.

    Attributes:
        nodes: in the graph's order.
        kinds: of each node.
        collectives: kind of each node's collective, or None.
        needs: indices that must stand before each node.
        ancestors, descendants: the same, and what those need in turn, as bit masks.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.kinds = [node_kind(node) for node in self.nodes]
        self.collectives: list[Kind | None] = [collective_kind(node) for node in self.nodes]
        self.needs = _find_needs(self.nodes, self.collectives)
        self.ancestors = [0] * len(self.nodes)
        for index, needs in enumerate(self.needs):
            mask = 0
            for need in needs:
                mask |= self.ancestors[need] | 1 << need
            self.ancestors[index] = mask
        self.descendants = [0] * len(self.nodes)
        for index in reversed(range(len(self.nodes))):
            below = self.descendants[index] | 1 << index
            for need in self.needs[index]:
                self.descendants[need] |= below

    def find(self, *kinds: NodeKind) -> list[int]:
        """Return the indices of all nodes of these kinds, ascending."""
        return [index for index, kind in enumerate(self.kinds) if kind in kinds]

    def find_collectives(self, *kinds: Kind) -> list[int]:
        """Return the indices of all collectives of these kinds, ascending."""
        return [index for index, kind in enumerate(self.collectives) if kind in kinds]

    def find_waits(self, start: int) -> list[int]:
        """Return the indices of the waits for what a node has started, ascending."""
        return [index for index in self.find(NodeKind.WAIT) if start in self.needs[index]]

    def check_order(self, order: Sequence[int]) -> None:
        """Check that the graph may run in that order.

        Args:
            order: indices of nodes.

        Raises:
            RuntimeError: it leaves out or repeats a node, puts one before what it needs, or moves
                an input or the output.
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


def apply_order(graph: fx.Graph, order: Sequence[int]) -> None:
    """Put the nodes of a graph into that order, a legal one; nothing else changes."""
    nodes = list(graph.nodes)
    cursor = nodes[order[0]]
    for index in order[1:]:
        if cursor.next is not nodes[index]:
            cursor.append(nodes[index])
        cursor = nodes[index]


def node_kind(node: fx.Node) -> NodeKind:
    """Return what a node does when the graph runs."""
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
    """Return whether a node's result is memory of its first argument, or no tensor at all."""
    operator = find_operator(node)
    if operator is None:
        return node.op == "get_attr" or node.op == "call_function"  # getitem, arithmetic of sizes
    # These two copy when they must, and else return a view, without saying so in the schema.
    if operator in (_ATEN.reshape.default, _ATEN._unsafe_view.default):
        return True
    returns = operator._schema.returns  # pyright: ignore[reportPrivateUsage]
    aliases = [result.alias_info for result in returns]
    if aliases and all(alias is not None and not alias.is_write for alias in aliases):
        return True
    value = node.meta.get("val")
    return value is not None and not isinstance(value, torch.Tensor | tuple | list)


def _find_needs(nodes: list[fx.Node], collectives: list[Kind | None]) -> list[tuple[int, ...]]:
    position = {node: index for index, node in enumerate(nodes)}
    found: list[tuple[int, ...]] = []
    barrier: int | None = None  # the last node that wrote to an argument
    last_random: int | None = None
    last_met: int | None = None  # the last collective that ranks meet in
    for index, node in enumerate(nodes):
        needs = {position[source] for source in node.all_input_nodes}
        if node.op == "placeholder":
            found.append(())
            continue
        if barrier is not None:
            needs.add(barrier)
        if node.op == "output" or writes(node):
            needs.update(range(index))
            barrier = index
        if is_random(node):
            needs |= _some(last_random)
            last_random = index
        if collectives[index] in ("all_to_all", "gather", "fused"):
            needs |= _some(last_met)
            last_met = index
        found.append(tuple(sorted(needs)))
    return found


def _some(index: int | None) -> set[int]:
    return set() if index is None else {index}


def fills(node: fx.Node) -> bool:
    """Return whether a node writes a part into a buffer that is read through its result alone."""
    return operator_name(node) in _FILL_NAMES


def is_empty(node: fx.Node) -> bool:
    """Return whether a node makes memory and neither reads nor writes any."""
    return operator_name(node) in _EMPTY_NAMES


def writes(node: fx.Node) -> bool:
    """Return whether a node writes to arguments that others read: data does not order it."""
    operator = find_operator(node)
    if operator is None or fills(node):
        return False
    return operator._schema.is_mutable  # pyright: ignore[reportPrivateUsage]


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers; attention without dropout does not."""
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
