"""Give GEMMs that run beside a collective an SM carve-out, so that it finds free SMs."""

from typing import Any

import torch
from torch import fx

from halley.compiler.fusion import is_dense_gemm
from halley.compiler.graph_analysis import GraphAnalysis
from halley.compiler.graph_collectives import operator_name
from halley.compiler.sizes import trace_result
from halley.ops.sm_carveout import gemm_into, gemm_with_carveout


def reserve_sms(graph: fx.Graph, sm_margins: tuple[int, int], *, in_all: bool = False) -> None:
    """Make the GEMMs between the start of an all-to-all and its wait leave SMs free.

    Nodes keep their identity and place. A GEMM with unusual arguments, or inside another operator,
    is not changed.

    Args:
        graph: in its final order; changed in place.
        sm_margins: number of SMs that dense and grouped GEMMs leave free; 0 changes nothing.
        in_all: change all GEMMs, because collectives outside of the graph may run at any time.
    """
    dense, grouped = sm_margins
    for node in list(graph.nodes) if in_all else _find_overlapped(graph):
        if node.target is gemm_into and dense:
            node.args = (*node.args[:-1], dense)
        elif dense and (operands := _find_dense(node)):
            _set_carveout(node, (*operands, None, dense))
        elif grouped and (operands := _find_grouped(node)):
            _set_carveout(node, (None, *operands, grouped))
    graph.lint()


def _set_carveout(node: fx.Node, args: tuple[Any, ...]) -> None:
    node.target, node.args, node.kwargs = gemm_with_carveout, args, {}
    node.meta.pop("eager_input_vals", None)  # these describe the arguments of the old operator


def _find_overlapped(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes between the start of an all-to-all and its first wait."""
    analysis = GraphAnalysis(graph)
    found: dict[fx.Node, None] = {}
    for start in analysis.find_collectives("all_to_all"):
        waits = analysis.find_waits(start)
        found |= dict.fromkeys(analysis.nodes[start + 1 : min(waits, default=start)])
    return list(found)


def _find_dense(node: fx.Node) -> tuple[Any, ...] | None:
    """Return bias, left and right of a dense GEMM; None for other nodes."""
    if not is_dense_gemm(node):
        return None
    return node.args if len(node.args) == 3 else (None, *node.args)


def _find_grouped(node: fx.Node) -> tuple[Any, ...] | None:
    """Return left, right and the ends of the groups of a grouped GEMM; None for other nodes."""
    name, args = operator_name(node), node.args
    if name == "aten::_grouped_mm":
        ends = args[2] if len(args) == 3 else node.kwargs.get("offs")
        others = {key for key, value in node.kwargs.items() if value is not None} - {"offs"}
        return None if ends is None or others or len(args) > 3 else (*args[:2], ends)
    if name == "halley::expert_gemm":
        return args
    if name == "halley::expert_weight_gemm":
        with node.graph.inserting_before(node):
            # Not aten.t: Inductor has decomposed all of these already and cannot lower a new one.
            transposed = node.graph.call_function(torch.ops.aten.permute.default, (args[0], [1, 0]))
        trace_result(transposed)
        return transposed, *args[1:]
    return None
