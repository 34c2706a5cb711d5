"""Which operators of a graph communicate, and what ranks must agree on about them."""

import hashlib
from collections.abc import Collection, Sequence
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

# "reduce" ones bring gradients together: only outputs and the optimizer wait for them.
_KINDS: dict[str, Kind] = {
    ALL_TO_ALL: "all_to_all",
    f"{_FUNCTIONAL}::all_reduce": "reduce",
    f"{_FUNCTIONAL}::all_reduce_coalesced": "reduce",
    f"{_FUNCTIONAL}::reduce_scatter_tensor": "reduce",
    f"{_FUNCTIONAL}::reduce_scatter_tensor_coalesced": "reduce",
    f"{_FUNCTIONAL}::all_gather_into_tensor": "gather",
    f"{_FUNCTIONAL}::all_gather_into_tensor_coalesced": "gather",
    f"{_FUNCTIONAL}::broadcast": "gather",
    # Computation with communication inside, waited for inside: ranks meet in them.
    "halley::fused_experts": "fused",
    "halley::fused_experts_backward": "fused",
}
# Namespaces whose other operators communicate in ways that are not known here.
_COMMUNICATING = (
    _FUNCTIONAL, "c10d", "c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"
)  # fmt: skip


def find_operator(node: fx.Node) -> "OpOverload[..., Any] | None":
    """Return the operator that a node calls; None if it calls something else, or nothing."""
    target: object = node.target
    return cast("OpOverload[..., Any]", target) if isinstance(target, OpOverload) else None


def operator_name(node: fx.Node) -> str:
    """Return ``namespace::name`` of the operator that a node calls, "" if it calls none."""
    operator = find_operator(node)
    return "" if operator is None else operator._schema.name  # pyright: ignore[reportPrivateUsage]


def collective_kind(node: fx.Node) -> Kind | None:
    """Return what kind of collective a node starts, or None."""
    return _KINDS.get(operator_name(node))


def is_wait(node: fx.Node) -> bool:
    """Return whether a node waits for a collective that another has started."""
    return operator_name(node) == WAIT


def merge_waits(graph: fx.Graph) -> None:
    """Drop waits for what was waited for, each ten microseconds of the host.

    Traced functional collectives wait by themselves, and then again where a model does.
    """
    for node in list(graph.nodes):
        if is_wait(node) and is_wait(source := node.all_input_nodes[0]):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def unknown_collectives(graph: fx.Graph) -> list[str]:
    """Return the operators of a graph that communicate in a way that is not known here."""
    names = (operator_name(node) for node in graph.nodes)
    return sorted(
        {
            name
            for name in names
            if name.partition("::")[0] in _COMMUNICATING and name not in _KINDS and name != WAIT
        }
    )


def group_of(node: fx.Node) -> str | None:
    """Return the name of the group that a collective is for, or None if it does not say.

    It is the last argument of a functional collective: a name, or since torch 2.13 perhaps an
    object that has one, which stands in the graph's module.
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


def graph_groups(graph: fx.Graph) -> list[str]:
    """Return the names of the groups of a graph's collectives, by first use."""
    groups = (group_of(node) for node in graph.nodes if collective_kind(node))
    return list(dict.fromkeys(group for group in groups if group is not None))


def group_sizes(graph: fx.Graph) -> list[int]:
    """Return how many ranks are in each of the groups of a graph's collectives."""
    return [_resolve_process_group(name).size() for name in graph_groups(graph)]  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What ranks compare before they run a graph together.

    Attributes:
        collectives: a line for each collective, in order. Ranks that differ here would wait for
            each other for ever.
        structure: hash of all operators and of which takes the results of which, without sizes. A
            plan is a list of indices, and holds for graphs of one structure only.
    """

    collectives: tuple[str, ...]
    structure: str


def signature(graph: fx.Graph, batch_inputs: Collection[str] = ()) -> Signature:
    """Return the signature of a graph.

    Args:
        graph: of operators.
        batch_inputs: inputs whose sizes count, as plans that divide the batch depend on them.

    Rows that ranks send and receive may differ, in graphs too, so of an all-to-all only dtype and
    row shape count. Groups are numbered by first use: a group's name says nothing to the ranks of
    another.
    """
    groups = {name: index for index, name in enumerate(graph_groups(graph))}
    position = {node: index for index, node in enumerate(graph.nodes)}
    lines: list[str] = []
    digest = hashlib.sha256()
    for node in graph.nodes:
        inputs = ",".join(str(position[source]) for source in node.all_input_nodes)
        sizes = _operand(node) if node.name in batch_inputs else ""
        digest.update(f"{node.op} {_target(node)} {inputs} {sizes}\n".encode())
        if kind := collective_kind(node):
            group = groups.get(group_of(node) or "")
            lines.append(f"{_target(node)} {_operands(node, kind)} group {group}")
    return Signature(collectives=tuple(lines), structure=digest.hexdigest())


def _target(node: fx.Node) -> str:
    """Return what a node calls by a name that is the same in each process."""
    if node.op != "call_function":
        return ""  # a placeholder's name is its own business
    if operator := find_operator(node):
        return str(operator)
    return getattr(node.target, "__qualname__", type(node.target).__qualname__)


def _operands(node: fx.Node, kind: Kind) -> str:
    sources = node.all_input_nodes
    return " ".join(_operand(source, first=0 if kind == "reduce" else 1) for source in sources)


def _operand(node: fx.Node, *, first: int = 0) -> str:
    """Return dtype and sizes of a node's tensor from a dimension on; "" for what is none."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    shape = cast(Sequence[int | torch.SymInt], value.shape)
    sizes = [str(size) if isinstance(size, int) else "?" for size in shape[first:]]
    return f"{value.dtype}[{','.join(sizes)}]"
