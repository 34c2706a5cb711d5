"""Products beside collectives leave these the multiprocessors that they run on."""

from typing import Any

import torch
from torch import fx

from halley.compiler.fusion import takes_place
from halley.compiler.graph_analysis import GraphAnalysis
from halley.compiler.graph_collectives import operator_name
from halley.compiler.sizes import trace_result
from halley.ops.sm_carveout import gemm_into, gemm_with_carveout


def leave_sms_beside(graph: fx.Graph, sm_margins: tuple[int, int], *, always: bool = False) -> None:
    """Have products leave multiprocessors free between the start of an all-to-all and its wait.

    Nodes stay who they are, and where they are. Products with other arguments than the usual ones,
    and in other operators, stay as they are.

    Args:
        graph: in the order in which it will run, changed.
        sm_margins: how many, dense products and grouped ones.
        always: for all products: other collectives run beside the graph.
    """
    dense, grouped = sm_margins
    for node in list(graph.nodes) if always else _find_beside(graph):
        if node.target is gemm_into and dense:
            node.args = (*node.args[:-1], dense)
        elif dense and (operands := _find_dense(node)):
            _become_beside(node, (*operands, None, dense))
        elif grouped and (operands := _find_grouped(node)):
            _become_beside(node, (None, *operands, grouped))
    graph.lint()


def _become_beside(node: fx.Node, args: tuple[Any, ...]) -> None:
    node.target, node.args, node.kwargs = gemm_with_carveout, args, {}
    node.meta.pop("eager_input_vals", None)  # what Inductor was given of the operator it was


def _find_beside(graph: fx.Graph) -> list[fx.Node]:
    analysis = GraphAnalysis(graph)
    found: dict[fx.Node, None] = {}
    for start in analysis.find_collectives("all_to_all"):
        waits = analysis.find_waits(start)
        found |= dict.fromkeys(analysis.nodes[start + 1 : min(waits, default=start)])
    return list(found)


def _find_dense(node: fx.Node) -> tuple[Any, ...] | None:
    """Return bias and operands of a product of two matrices; None of anything else."""
    if not takes_place(node):
        return None
    return node.args if len(node.args) == 3 else (None, *node.args)


def _find_grouped(node: fx.Node) -> tuple[Any, ...] | None:
    """Return operands and ends of groups of a grouped product; None of anything else."""
    name, args = operator_name(node), node.args
    if name == "aten::_grouped_mm":
        ends = args[2] if len(args) == 3 else node.kwargs.get("offs")
        others = {key for key, value in node.kwargs.items() if value is not None} - {"offs"}
        return None if ends is None or others or len(args) > 3 else (*args[:2], ends)
    if name == "halley::expert_gemm":
        return args
    if name == "halley::expert_weight_gemm":
        with node.graph.inserting_before(node):
            # Not t(), which Inductor has taken to pieces before and does not know any more.
            turned = node.graph.call_function(torch.ops.aten.permute.default, (args[0], [1, 0]))
        trace_result(turned)
        return turned, *args[1:]
    return None
