"""Predict which nodes Inductor fuses into one kernel, and the bytes that kernels read and write."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from halley.compiler.graph_analysis import (
    NodeKind,
    Sizes,
    is_empty,
    is_gemm,
    is_random,
    mutates_arguments,
    node_kind,
    result_of,
)
from halley.compiler.graph_collectives import find_operator, operator_name
from halley.cost.hardware import Predictor


_TAGS = frozenset({"pointwise", "reduction"})
_GATHERS = frozenset(
    f"aten::{name}"
    for name in ("embedding", "gather", "index", "_unsafe_index", "index_select", "take")
)
# Operators that Inductor fuses although PyTorch gives them no tag of ``_TAGS``: gathers, casts,
# fills, and operators that Inductor decomposes before it fuses.
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
_MIN_SPLIT_ROWS = 1024  # Inductor splits a sum over at least this many rows into partial sums


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Inputs that a node of an Inductor kernel loads, and whether the node's result is stored."""

    # If several nodes of the kernel load the same input, only the first of them lists it.
    reads: frozenset[fx.Node]
    writes: bool  # whether a node outside of the kernel reads the result


def is_fused(node: fx.Node) -> bool:
    """Return whether Inductor is expected to generate a node's kernel, and so can fuse the node.

    Inductor calls all other operators as they are: GEMMs, attention, sorts, scans, collectives,
    operators outside of PyTorch, and operators that write to their arguments.
    """
    operator = find_operator(node)
    if operator is None or operator.namespace not in ("aten", "prims"):
        return False
    if node_kind(node) is not NodeKind.COMPUTE or mutates_arguments(node) or is_random(node):
        return False
    if is_gemm(node) or is_empty(node):
        return False
    return operator_name(node) in _FUSED or any(tag.name in _TAGS for tag in operator.tags)


def is_concat(node: fx.Node) -> bool:
    """Return whether a node is ``aten.cat``; Inductor's kernels write directly into its output."""
    return operator_name(node) == "aten::cat"


def is_split_sum(node: fx.Node, sizes: Sizes) -> bool:
    """Return whether a node is a sum over so many rows that Inductor computes it in two kernels.

    Example: a bias gradient. The first kernel, fused with adjacent nodes, makes partial sums. The
    second one adds them, and the host launches it like an operator that is not fused.
    """
    if operator_name(node) != "aten::sum" or len(node.args) < 2:
        return False
    source, own = result_of(node.all_input_nodes[0]), result_of(node)
    if not isinstance(source, torch.Tensor) or not isinstance(own, torch.Tensor):
        return False
    dims = node.args[1]
    # Sums that keep the last dimension are sums over rows. Only these are predicted as split.
    if not isinstance(dims, list | tuple) or {-1, source.dim() - 1} & set(dims):
        return False
    num_summed = sizes.num_bytes(source) // source.itemsize
    num_sums = sizes.num_bytes(own) // own.itemsize
    return num_summed >= _MIN_SPLIT_ROWS * max(1, num_sums)


def find_boundaries(graph: fx.Graph, sizes: Sizes) -> dict[fx.Node, Boundary]:
    """Return each fused node's ``Boundary``: inputs it loads, and whether its result is stored.

    A result stays inside of a kernel if its reader is fused too, and no other path from the result
    to the reader passes a node that is not fused.

    Example: in ``x = a + b; y = gelu(mm(x, w)) + x`` the last sum reads ``x`` from memory, because
    the GEMM separates the two kernels. Kernels are assumed as large as these conditions allow.
    """
    nodes = list(graph.nodes)
    fused = {node: at for at, node in enumerate(nodes) if is_fused(node)}
    # Ancestors are bit masks over ``nodes``, because sets would take far more memory.
    ancestors = dict.fromkeys(nodes, 0)  # masks of the fused ancestors
    separated = dict.fromkeys(nodes, 0)  # fused ancestors with a path through an unfused node
    readers: dict[fx.Node, list[fx.Node]] = {}
    reads: dict[fx.Node, set[fx.Node]] = {node: set() for node in fused}
    written: set[fx.Node] = set()
    for node in nodes:
        for source in node.all_input_nodes:
            ancestors[node] |= ancestors[source]
            separated[node] |= separated[source]
            if source in fused:
                ancestors[node] |= 1 << fused[source]
            elif _root(source) is source:  # views separate no kernels
                separated[node] |= ancestors[source]
        if node_kind(node) is NodeKind.VIEW:
            continue
        for source in filter(_has_tensors, node.all_input_nodes):
            root = _root(source)
            if node in fused and root in fused and not separated[node] >> fused[root] & 1:
                continue  # one kernel computes both nodes
            if root in fused:
                written.add(root)
            if node in fused:
                # A kernel loads a tensor once for all full views, and once more for each slice.
                is_all = sizes.num_bytes(result_of(source)) >= sizes.num_bytes(result_of(root))
                earlier = readers.setdefault(root if is_all else source, [])
                if all(separated[node] >> fused[other] & 1 for other in earlier):
                    reads[node].add(source)
                earlier.append(node)
    return {
        node: Boundary(reads=frozenset(found), writes=node in written)
        for node, found in reads.items()
    }


def inside_kernels(boundaries: Mapping[fx.Node, Boundary]) -> frozenset[fx.Node]:
    """Return the nodes whose results stay in registers, because no kernel writes them to memory."""
    return frozenset(node for node, boundary in boundaries.items() if not boundary.writes)


def fused_us(
    node: fx.Node, boundaries: Mapping[fx.Node, Boundary], *, predictor: Predictor, sizes: Sizes
) -> float:
    """Predict the time in us of a fused node, or of a concat, from the bytes that the node moves.

    A node that writes to memory takes at least the time of the shortest kernel. Other nodes of the
    same kernel add only the time of their loads. A node not in ``boundaries`` is a kernel alone.
    """
    if is_concat(node):
        # Fused inputs are written directly into the concat's output; other inputs are copied.
        inputs = (each for each in node.all_input_nodes if not is_fused(_root(each)))
        copied = sum(sizes.num_bytes(result_of(each)) for each in inputs)
        return predictor.memory_us(2 * copied) if copied else 0.0
    boundary = boundaries.get(node)
    second_us = predictor.hardware.split_sum_us if is_split_sum(node, sizes) else 0.0
    own = sizes.num_bytes(result_of(node))
    moved = 0
    for source in node.all_input_nodes:
        if boundary is None or source in boundary.reads:
            # For an expanded tensor, the kernel loads the bytes of the tensor before ``expand``.
            num_bytes = sizes.num_bytes(result_of(source))
            num_bytes = min(num_bytes, sizes.num_bytes(result_of(_root(source))))
            # A gather loads only the elements of its result, not the whole table.
            moved += min(num_bytes, own) if operator_name(node) in _GATHERS else num_bytes
    if boundary is None or boundary.writes:
        kernel_us = 1e6 * (moved + own) / predictor.hardware.fused_bytes_per_s
        return max(kernel_us, predictor.hardware.kernel_us) + second_us
    return 1e6 * moved / predictor.hardware.fused_bytes_per_s + second_us


def _root(node: fx.Node) -> fx.Node:
    """Return the base of a view or of a chain of views; if a node is no view, return the node."""
    while node.op == "call_function" and _has_tensors(node) and node_kind(node) is NodeKind.VIEW:
        if not node.all_input_nodes:
            break
        node = node.all_input_nodes[0]
    return node


def _has_tensors(node: fx.Node) -> bool:
    return isinstance(result_of(node), torch.Tensor | tuple | list)
