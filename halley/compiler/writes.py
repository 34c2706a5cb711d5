"""Replace the write operators of in-place concat by operators that Inductor can compile.

The passes work on operators that return the tensor they write to, so that data flow orders them
(``ops/in_place_concat.py``). Inductor has no lowering for such operators. It has one for copies
into a slice of a tensor, and computes the copied values directly in that slice.
"""

from collections.abc import Mapping

import torch
from torch import fx

from halley.compiler.fusion import Boundary, find_boundaries, is_dense_gemm
from halley.compiler.sizes import Sizes, trace_result
from halley.ops.in_place_concat import write_rows, write_slice
from halley.ops.sm_carveout import gemm_into


_ATEN = torch.ops.aten
# Allocations that read a microbatch only for its dtype and device.
_NEW_LIKE = (_ATEN.new_empty.default, _ATEN.new_empty_strided.default)


def lower_writes(graph: fx.Graph, sizes: Sizes) -> None:
    """Replace operators that write a microbatch into the tensor of the full batch.

    Args:
        graph: in its final order; changed in place.
        sizes: of the results of its nodes.
    """
    position = {node: at for at, node in enumerate(graph.nodes)}
    boundaries = find_boundaries(graph, sizes)
    for node in list(graph.nodes):
        if node.target not in (write_slice, write_rows):
            continue
        full, part = node.all_input_nodes[:2]
        full = _detach_from_microbatch(full, position)
        if node.target is write_rows:
            with graph.inserting_before(node):
                _call(graph, _ATEN.index_put_.default, full, [node.args[2]], part)
        else:
            _lower_write_slice(node, full, part, position, boundaries)
        node.replace_all_uses_with(full)
        graph.erase_node(node)
        if not part.users:
            graph.erase_node(part)
    graph.lint()


def _lower_write_slice(
    write: fx.Node,
    full: fx.Node,
    part: fx.Node,
    position: dict[fx.Node, int],
    boundaries: Mapping[fx.Node, Boundary],
) -> None:
    """Write ``part`` into a slice of ``full``; let its later readers read that slice.

    A dense GEMM is told to write its result there. Readers in the same kernel as ``part`` keep
    reading ``part``: a kernel cannot read a buffer that it has just written, so reading the slice
    would split the kernel.
    """
    graph = write.graph
    dim, start = write.args[2:]
    length = part.meta["val"].shape[dim]
    same_strides = full.meta["val"].stride() == part.meta["val"].stride()
    is_gemm_into = same_strides and is_dense_gemm(part) and _move_before(full, part, position)
    with graph.inserting_before(part if is_gemm_into else write):
        place = _call(graph, _ATEN.slice.Tensor, full, dim, start, start + length)
        if is_gemm_into:
            bias = part.args[0] if len(part.args) == 3 else None
            _call(graph, gemm_into, place, bias, *part.args[-2:], 0)
        else:
            _call(graph, _ATEN.copy_.default, place, part)
    if same_strides:
        begin = position[part if is_gemm_into else write]
        part.replace_all_uses_with(
            place,
            lambda user: (
                position.get(user, 0) > begin
                and not (user in boundaries and part in boundaries[user].inside)
            ),
        )


def _move_before(full: fx.Node, part: fx.Node, position: dict[fx.Node, int]) -> bool:
    """Move the allocation of ``full`` before ``part`` if needed; return whether it is there."""
    at = position[part]
    if position[full] > at:
        if any(position[source] > at for source in full.all_input_nodes):
            return False
        part.prepend(full)
        position[full] = at
    return True


def _detach_from_microbatch(full: fx.Node, position: dict[fx.Node, int]) -> fx.Node:
    """Return an allocation of ``full`` that does not read a microbatch, replaced if needed."""
    if full.target not in _NEW_LIKE:
        return full
    sizes, strides = full.args[1:] if len(full.args) == 3 else (full.args[1], None)
    options = {name: getattr(full.meta["val"], name) for name in ("dtype", "device")}
    with full.graph.inserting_before(full):
        if strides is None:
            made = full.graph.call_function(_ATEN.empty.memory_format, (sizes,), options)
        else:
            made = full.graph.call_function(_ATEN.empty_strided.default, (sizes, strides), options)
    made.meta = full.meta
    position[made] = position[full]
    full.replace_all_uses_with(made)
    full.graph.erase_node(full)
    return made


def _call(graph: fx.Graph, target: object, *args: object) -> fx.Node:
    node = graph.call_function(target, args)  # pyright: ignore[reportArgumentType]
    trace_result(node)
    return node
