"""Parts written into their wholes by operators that Inductor takes, once the order is found.

Passes see operators that return the buffer they write to, so that data alone orders them. Inductor
knows no such operator, but copies into ranges of a buffer, which it computes right there.
"""

from collections.abc import Mapping

import torch
from torch import fx

from halley.compiler.fusion import Boundary, find_boundaries, takes_place
from halley.compiler.sizes import Sizes, trace_result
from halley.ops.in_place_concat import write_rows, write_slice
from halley.ops.sm_carveout import gemm_into


_ATEN = torch.ops.aten
_LIKE_A_PART = (_ATEN.new_empty.default, _ATEN.new_empty_strided.default)


def write_parts(graph: fx.Graph, sizes: Sizes) -> None:
    """Have what fills a buffer write to it and return nothing that is read.

    Args:
        graph: in the order in which it will run, changed.
        sizes: of what nodes return.
    """
    position = {node: at for at, node in enumerate(graph.nodes)}
    boundaries = find_boundaries(graph, sizes)
    for node in list(graph.nodes):
        if node.target not in (write_slice, write_rows):
            continue
        whole, part = node.all_input_nodes[:2]
        whole = _stand_alone(whole, position)
        if node.target is write_rows:
            with graph.inserting_before(node):
                _call(graph, _ATEN.index_put_.default, whole, [node.args[2]], part)
        else:
            _write_range(node, whole, part, position, boundaries)
        node.replace_all_uses_with(whole)
        graph.erase_node(node)
        if not part.users:
            graph.erase_node(part)
    graph.lint()


def _write_range(
    fill: fx.Node,
    whole: fx.Node,
    part: fx.Node,
    position: dict[fx.Node, int],
    boundaries: Mapping[fx.Node, Boundary],
) -> None:
    """Write a part to where it belongs; what is read there need not be anywhere else.

    What is computed in the kernel that makes the part goes on reading that: what a kernel has
    written to a buffer it does not read from there, so there would be another kernel.

    Args:
        fill: what did so.
        whole: the buffer.
        part: what is written.
        position: of nodes in the graph.
        boundaries: of the kernels that Inductor will make.
    """
    graph = fill.graph
    dim, start = fill.args[2:]
    length = part.meta["val"].shape[dim]
    fits = whole.meta["val"].stride() == part.meta["val"].stride()
    is_told = fits and takes_place(part) and _come_before(whole, part, position)
    with graph.inserting_before(part if is_told else fill):
        place = _call(graph, _ATEN.slice.Tensor, whole, dim, start, start + length)
        if is_told:
            bias = part.args[0] if len(part.args) == 3 else None
            _call(graph, gemm_into, place, bias, *part.args[-2:], 0)
        else:
            _call(graph, _ATEN.copy_.default, place, part)
    if fits:
        begin = position[part if is_told else fill]
        part.replace_all_uses_with(
            place,
            lambda user: (
                position.get(user, 0) > begin
                and not (user in boundaries and part in boundaries[user].inside)
            ),
        )


def _come_before(whole: fx.Node, part: fx.Node, position: dict[fx.Node, int]) -> bool:
    """Move a buffer ahead of a part, unless it stands there; return whether that is possible."""
    at = position[part]
    if position[whole] > at:
        if any(position[source] > at for source in whole.all_input_nodes):
            return False
        part.prepend(whole)
        position[whole] = at
    return True


def _stand_alone(whole: fx.Node, position: dict[fx.Node, int]) -> fx.Node:
    """Return a buffer that is made without reading a part, in the place of one that is not."""
    if whole.target not in _LIKE_A_PART:
        return whole
    sizes, strides = whole.args[1:] if len(whole.args) == 3 else (whole.args[1], None)
    options = {name: getattr(whole.meta["val"], name) for name in ("dtype", "device")}
    with whole.graph.inserting_before(whole):
        if strides is None:
            made = whole.graph.call_function(_ATEN.empty.memory_format, (sizes,), options)
        else:
            made = whole.graph.call_function(_ATEN.empty_strided.default, (sizes, strides), options)
    made.meta = whole.meta
    position[made] = position[whole]
    whole.replace_all_uses_with(made)
    whole.graph.erase_node(whole)
    return made


def _call(graph: fx.Graph, target: object, *args: object) -> fx.Node:
    node = graph.call_function(target, args)  # pyright: ignore[reportArgumentType]
    trace_result(node)
    return node
