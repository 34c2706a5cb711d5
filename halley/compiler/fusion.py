"""What Inductor makes kernels of itself, and the bytes that cross the borders of those kernels."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from halley.compiler.graph_analysis import (
    NodeKind,
    fills,
    is_empty,
    is_gemm,
    is_random,
    node_kind,
    writes,
)
from halley.compiler.graph_collectives import find_operator, operator_name
from halley.compiler.sizes import Sizes
from halley.cost.hardware import Predictor


WHOLE = "halley_whole"  # in the meta of a node of a part that is only priced: the graph's node
_TAGS = frozenset({"pointwise", "reduction"})
_GATHERS = frozenset(
    f"aten::{name}"
    for name in ("embedding", "gather", "index", "_unsafe_index", "index_select", "take")
)
# Torch tags no casts, no fills, and none that Inductor first takes to pieces.
_FUSED = _GATHERS | {
    "aten::_to_copy", "aten::arange", "aten::scalar_tensor", "aten::constant_pad_nd",
    "aten::full", "aten::full_like", "aten::ones", "aten::ones_like", "aten::zeros",
    "aten::zeros_like", "aten::select_scatter", "aten::slice_scatter",
    "aten::native_layer_norm", "aten::native_layer_norm_backward",
    "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward",
    "aten::_softmax", "aten::_softmax_backward_data", "aten::_log_softmax",
    "aten::_log_softmax_backward_data", "aten::nll_loss_forward", "aten::nll_loss_backward",
    "prims::iota", "prims::prepare_softmax_online",
}  # fmt: skip
_JOINS = frozenset({"aten::cat", "halley::write_slice"})
_SUM = "aten::sum"
_SPLIT_ROWS = 1024  # from which on a sum over rows is one of partial sums


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """What a node moves that is in a kernel with others.

    Attributes:
        reads: nodes whose results come from memory, and that no other node of the kernel reads.
        inside: nodes of the same kernel whose results it reads, by way of views or not.
        writes: whether something outside of the kernel reads the result.
    """

    reads: frozenset[fx.Node]
    inside: frozenset[fx.Node]
    writes: bool


def is_fused(node: fx.Node) -> bool:
    """Return whether Inductor computes a node in a kernel of its own making, with its neighbours.

    Not what it calls as it is: products, attention, sorts, sums along rows, collectives, operators
    that are not torch's, and what writes to its arguments.
    """
    operator = find_operator(node)
    if operator is None or operator.namespace not in ("aten", "prims"):
        return False
    if node_kind(node) is not NodeKind.COMPUTE or writes(node) or is_random(node):
        return False
    if is_gemm(node) or is_empty(node):
        return False
    return operator_name(node) in _FUSED or any(tag.name in _TAGS for tag in operator.tags)


def is_join(node: fx.Node) -> bool:
    """Return whether a node puts parts together: Inductor has kernels write where they belong."""
    return operator_name(node) in _JOINS


def takes_place(node: fx.Node) -> bool:
    """Return whether a node is a product that can be told where to write its result."""
    return operator_name(node) in ("aten::addmm", "aten::mm") and not node.kwargs


def is_split_sum(node: fx.Node, sizes: Sizes) -> bool:
    """Return whether a node is a sum over many rows: a bias's gradient, a norm's weight's.

    Inductor makes partial sums beside what it fuses with them, and adds these in a kernel of their
    own, which it has torch launch.
    """
    if operator_name(node) != _SUM or len(node.args) < 2:
        return False
    source, own = _value(node.all_input_nodes[0]), _value(node)
    if not isinstance(source, torch.Tensor) or not isinstance(own, torch.Tensor):
        return False
    dims = node.args[1]
    if not isinstance(dims, list | tuple) or {-1, source.dim() - 1} & set(dims):
        return False
    num_summed = sizes.num_bytes(source) // source.itemsize
    num_sums = sizes.num_bytes(own) // own.itemsize
    return num_summed >= _SPLIT_ROWS * max(1, num_sums)


def find_boundaries(graph: fx.Graph, sizes: Sizes) -> dict[fx.Node, Boundary]:
    """Return the borders of all nodes of a graph that Inductor fuses.

    A result stays inside of a kernel where its reader is fused too and does not wait, by another
    way, for anything that is not: a residual comes from memory behind the product beside it. What
    two such readers read counts for the first. Kernels are taken as large as that allows.
    """
    nodes = list(graph.nodes)
    fused = {node: at for at, node in enumerate(nodes) if is_fused(node)}
    above = dict.fromkeys(nodes, 0)  # bit masks of the nodes that each needs
    behind = dict.fromkeys(nodes, 0)  # of those, the ones on whose way to it something is unfused
    readers: dict[fx.Node, list[fx.Node]] = {}
    reads: dict[fx.Node, set[fx.Node]] = {node: set() for node in fused}
    inside: dict[fx.Node, set[fx.Node]] = {node: set() for node in fused}
    written: set[fx.Node] = set()
    for node in nodes:
        for source in node.all_input_nodes:
            above[node] |= above[source]
            behind[node] |= behind[source]
            if source in fused:
                above[node] |= 1 << fused[source]
            elif _root(source) is source:
                behind[node] |= above[source]
        if node_kind(node) is NodeKind.VIEW:
            continue
        for source in filter(_has_bytes, node.all_input_nodes):
            root = _root(source)
            if node in fused and root in fused and not behind[node] >> fused[root] & 1:
                inside[node].add(root)
                continue
            if root in fused:
                written.add(root)
            if node in fused:
                # Two views of all of a tensor are one; two parts of it are not.
                is_all = sizes.num_bytes(_value(source)) >= sizes.num_bytes(_value(root))
                known = readers.setdefault(root if is_all else source, [])
                if all(behind[node] >> fused[other] & 1 for other in known):
                    reads[node].add(source)
                known.append(node)
    return {
        node: Boundary(
            reads=frozenset(found), inside=frozenset(inside[node]), writes=node in written
        )
        for node, found in reads.items()
    }


def inside_kernels(boundaries: Mapping[fx.Node, Boundary]) -> frozenset[fx.Node]:
    """Return the nodes whose results never come to memory."""
    return frozenset(node for node, boundary in boundaries.items() if not boundary.writes)


def fused_us(
    node: fx.Node, boundaries: Mapping[fx.Node, Boundary], *, predictor: Predictor, sizes: Sizes
) -> float:
    """Predict a node that is fused, or a join, by the bytes that cross the border of its kernel.

    Who writes out of a kernel pays for the shortest one at least. A join copies only what kernels
    do not write right there.

    Args:
        node: of the graph, or of a part; then ``WHOLE`` in its meta, and in that of its inputs,
            tells of which nodes. A node without a border is a kernel alone.
        boundaries: of the graph.
        predictor: of passes over memory.
        sizes: of what nodes return.
    """
    if is_join(node):
        if fills(node):
            sources = [part for part in node.all_input_nodes[1:] if not _is_written_there(part)]
        else:
            sources = [each for each in node.all_input_nodes if not _is_made_there(each)]
        copied = sum(sizes.num_bytes(_value(source)) for source in sources)
        return predictor.memory_us(2 * copied) if copied else 0.0
    boundary = boundaries.get(_whole(node))
    second_us = predictor.hardware.split_sum_us if is_split_sum(_whole(node), sizes) else 0.0
    own = sizes.num_bytes(_value(node))
    moved = 0
    for whole, source in {_whole(source): source for source in node.all_input_nodes}.items():
        if boundary is None or whole in boundary.reads:
            # An expanded tensor is no more than what it is expanded from.
            given = sizes.num_bytes(_value(source))
            given = min(given, sizes.num_bytes(_value(_root(whole))))
            moved += min(given, own) if operator_name(node) in _GATHERS else given
    if boundary is None or boundary.writes:
        first_us = 1e6 * (moved + own) / predictor.hardware.fused_bytes_per_s
        return max(first_us, predictor.hardware.kernel_us) + second_us
    return 1e6 * moved / predictor.hardware.fused_bytes_per_s + second_us


def _is_made_there(node: fx.Node) -> bool:
    """Return whether Inductor computes what it is to join in kernels of its own."""
    return is_fused(_root(_whole(node)))


def _is_written_there(part: fx.Node) -> bool:
    """Return whether a part is computed where it belongs in the whole."""
    return _is_made_there(part) or takes_place(_whole(part))


def _root(node: fx.Node) -> fx.Node:
    """Return the node that a node is a view of, or itself."""
    while node.op == "call_function" and _has_bytes(node) and node_kind(node) is NodeKind.VIEW:
        if not node.all_input_nodes:
            break
        node = node.all_input_nodes[0]
    return node


def _whole(node: fx.Node) -> fx.Node:
    return node.meta.get(WHOLE, node)


def _has_bytes(node: fx.Node) -> bool:
    return isinstance(_value(node), torch.Tensor | tuple | list)


def _value(node: fx.Node) -> object:
    return node.meta.get("val")
