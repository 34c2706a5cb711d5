"""Find the collectives of a graph, and describe them so that ranks can compare their graphs."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import fx
from torch._C._distributed_c10d import (
    _resolve_process_group,  # pyright: ignore[reportPrivateUsage]
)
from torch._ops import OpOverload


Kind = Literal["all_to_all", "reduce", "gather", "fused"]

_FUNCTIONAL = "_c10d_functional"
WAIT = f"{_FUNCTIONAL}::wait_tensor"
ALL_TO_ALL = f"{_FUNCTIONAL}::all_to_all_single"

# Passes may delay kind "reduce": only outputs and the optimizer are assumed to read its results.
_KINDS: dict[str, Kind] = {
    ALL_TO_ALL: "all_to_all",
    f"{_FUNCTIONAL}::all_reduce": "reduce",
    f"{_FUNCTIONAL}::all_reduce_coalesced": "reduce",
    f"{_FUNCTIONAL}::reduce_scatter_tensor": "reduce",
    f"{_FUNCTIONAL}::reduce_scatter_tensor_coalesced": "reduce",
    f"{_FUNCTIONAL}::all_gather_into_tensor": "gather",
    f"{_FUNCTIONAL}::all_gather_into_tensor_coalesced": "gather",
    f"{_FUNCTIONAL}::broadcast": "gather",
    # Fused layers compute and communicate in one operator, so no wait follows them.
    "halley::fused_experts": "fused",
    "halley::fused_experts_backward": "fused",
}
# Namespaces of operators that communicate. Halley knows ``WAIT`` and the keys of ``_KINDS`` only.
_COMMUNICATING = (
    _FUNCTIONAL, "c10d", "c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"
)  # fmt: skip


# In ``Signature.structure``: nodes of a block, and digits of the hash of the nodes before a block.
_BLOCK, _DIGITS = 8, 4


def find_operator(node: fx.Node) -> "OpOverload[..., Any] | None":
    """Return the ``OpOverload`` that a graph node calls; None if it calls none."""
    target: object = node.target
    return cast("OpOverload[..., Any]", target) if isinstance(target, OpOverload) else None


def operator_name(node: fx.Node) -> str:
    """Return ``namespace::name`` of the operator that a graph node calls, "" if it calls none."""
    operator = find_operator(node)
    return "" if operator is None else operator._schema.name  # pyright: ignore[reportPrivateUsage]


def collective_kind(node: fx.Node) -> Kind | None:
    """Return the ``Kind`` of a known collective or fused layer; None for any other operator."""
    return _KINDS.get(operator_name(node))


def is_wait(node: fx.Node) -> bool:
    """Return whether a graph node waits for a collective that another node started."""
    return operator_name(node) == WAIT


def remove_repeated_waits(graph: fx.Graph) -> None:
    """Remove each wait of a graph whose input is the result of another wait.

    A traced functional collective contains a wait, and a model may call a second one. Each wait
    takes the host about 10 us.
    """
    for node in list(graph.nodes):
        if is_wait(node) and is_wait(source := node.all_input_nodes[0]):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def unknown_collectives(nodes: Iterable[fx.Node]) -> list[str]:
    """Return the names of the nodes' operators that communicate in ways unknown to Halley."""
    names = {operator_name(node) for node in nodes} - _KINDS.keys() - {WAIT}
    return sorted(name for name in names if name.partition("::")[0] in _COMMUNICATING)


def group_of(node: fx.Node) -> str | None:
    """Return the name of a functional collective's process group; None for any other node.

    The last argument of a functional collective is this name. Since torch 2.13 it may instead be an
    object that has the name, stored as an attribute of the graph's module.
    """
    if not node.args or operator_name(node).partition("::")[0] != _FUNCTIONAL:
        return None
    group: Any = node.args[-1]
    if isinstance(group, fx.Node):
        module = node.graph.owning_module
        if group.op != "get_attr" or module is None:
            return None
        group = getattr(module, str(group.target), None)
    name = group if isinstance(group, str) else getattr(group, "group_name", None)
    return str(name) if name is not None else None


def graph_groups(*graphs: fx.Graph) -> list[str]:
    """Return group names of the graphs' functional collectives, in order of first appearance."""
    groups = (group_of(node) for graph in graphs for node in graph.nodes if collective_kind(node))
    return list(dict.fromkeys(group for group in groups if group is not None))


def group_sizes(graph: fx.Graph) -> list[int]:
    """Return the number of ranks of each process group, in the order of ``graph_groups``."""
    return [_resolve_process_group(name).size() for name in graph_groups(graph)]  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Description of a rank's graph, which ranks compare before they run their graphs together.

    ``collectives`` has one line for each collective: ranks with different lines would deadlock.
    ``structure`` has hashes of all operators and of the edges between them, without sizes. A plan
    is a list of node indices, so it is valid only for graphs of one structure.
    """

    collectives: tuple[str, ...]
    structure: str


def signature(*graphs: fx.Graph) -> Signature:
    """Return one ``Signature`` for several graphs of a step together, such as forward and backward.

    Ranks may send and receive different numbers of rows, so the first size of a tensor is compared
    only for reductions. Groups are numbered by first use: a group's name may differ between ranks.
    """
    groups = {name: index for index, name in enumerate(graph_groups(*graphs))}
    nodes = [node for graph in graphs for node in graph.nodes]
    position = {node: index for index, node in enumerate(nodes)}
    lines: list[str] = []
    digest, blocks = hashlib.sha256(), list[str]()
    for index, node in enumerate(nodes):
        if index % _BLOCK == 0:
            blocks.append(digest.hexdigest()[:_DIGITS])
        inputs = ",".join(str(position[source]) for source in node.all_input_nodes)
        digest.update(f"{node.op} {_target(node)} {inputs}\n".encode())
        if kind := collective_kind(node):
            group = groups.get(group_of(node) or "")
            first = 0 if kind == "reduce" else 1
            sources = " ".join(_operand(each, first=first) for each in node.all_input_nodes)
            lines.append(f"{_target(node)} {sources} group {group}")
    structure = "".join(blocks) + digest.hexdigest()
    return Signature(collectives=tuple(lines), structure=structure)


def first_difference(structure: str, other: str) -> range:
    """Return indices of nodes, over all graphs of a signature: the first node that differs is one.

    A hash of the nodes before it begins each block of ``structure``.
    """
    pairs = zip(structure, other, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(structure)) // _DIGITS
    return range(max(0, same - 1) * _BLOCK, same * _BLOCK)


def _target(node: fx.Node) -> str:
    """Return the name of a node's function, equal in all processes; "" if the node calls none."""
    if node.op != "call_function":
        return ""  # names of placeholders may differ between ranks
    if operator := find_operator(node):
        return str(operator)
    return getattr(node.target, "__qualname__", type(node.target).__qualname__)


def _operand(node: fx.Node, *, first: int) -> str:
    """Describe a node's result: dtype and sizes from dimension ``first`` on; "" if no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    shape = cast(Sequence[int | torch.SymInt], value.shape)
    sizes = [str(size) if isinstance(size, int) else "?" for size in shape[first:]]
    return f"{value.dtype}[{','.join(sizes)}]"
