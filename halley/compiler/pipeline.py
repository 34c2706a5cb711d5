"""Run the compiler passes on one graph; ranks compare their graphs and apply the plan of rank 0.

This list has every change that Halley makes to a graph, in the order of execution. ``run_passes``
makes changes 2 and 3. ``backend.py`` (inner compiler "eager") and ``inductor.py`` (inner compiler
"inductor") call it, and then make the changes after 3. A change is made to the forward and to the
backward graph, for both inner compilers, unless the list says otherwise. "Lint" is the check of
torch that a graph is well formed.

 1  Save parameters that have a gradient-ready hook (gradient_ready.py). May add outputs to forward
    and inputs to backward. Runs when torch splits the joint graph. Changes nothing unless backward
    has one gradient for each input.
 2  Remove repeated waits (graph_collectives.py), whose result another wait has returned already.
 3  Schedule weight gradients (wgrad/). May reorder nodes: weight gradients, all-reduces of
    gradients and waits move. Checked: each node is there once, after the nodes it needs; lint.
 4  Decompose operators (inductor.py; inductor on a GPU only). May replace an operator of Halley by
    ATen operators. Checked: lint.
 5  Reserve SMs (this file; on a GPU only). May replace a GEMM by the same GEMM with an SM
    carve-out, if one was measured. Checked: lint.
 6  Add control dependencies (inductor.py; inductor only). May wrap the GEMMs and the wait of an
    overlap window so that Inductor keeps the GEMMs in it. Checked: lint.
 7  Insert gradient-ready hooks (gradient_ready.py; backward only). May call a parameter's hook with
    its gradient, and return None instead of the gradient. Checked: lint.
 8  Sort kernels (inductor.py; inductor only, not if ``passes`` is "none"). May reorder the fused
    kernels. Checked: Inductor sorts them so that their dependencies come first.

Changes 5 and 6 are made only if ``run_passes`` returned a report. Rank 0 makes the plans of changes
3 and 5, and all ranks use them. Before that, the ranks compare their graphs (``consensus.py``).
"""

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

from halley.compiler.consensus import Consensus, compare_graphs, share_in_groups
from halley.compiler.fusion import find_boundaries
from halley.compiler.graph_analysis import GraphAnalysis, NodeKind, Sizes
from halley.compiler.graph_collectives import (
    group_sizes,
    operator_name,
    remove_repeated_waits,
    unknown_collectives,
)
from halley.compiler.graph_memory import LiveBytes
from halley.compiler.group_cost import curve_keys, measure_groups
from halley.compiler.node_cost import ProfiledCost, operations
from halley.compiler.options import Options
from halley.compiler.wgrad.schedule import OrderReport, plan_wgrad, report_order
from halley.cost.hardware import Environment, Predictor, find_environment, predictor_of
from halley.cost.profiles import ProfileTable
from halley.cost.simulate import graph_time
from halley.ops.sm_carveout import gemm_with_carveout


def run_passes(graph: fx.Graph, options: Options, *, step_peak: int = 0) -> OrderReport | None:
    """Remove repeated waits and schedule weight gradients; return a report, None if not planned.

    All ranks of the graph's process groups must call this. Nothing is scheduled if ``passes`` is
    "none", the graph has no all-to-all, the graph calls a collective that Halley does not know, or
    the ranks' graphs differ in their computation. The last two cases give a warning.

    Args:
        graph: graph of operators, from aot_autograd or Inductor; changed in place.
        step_peak: peak of live bytes of the step to which the graph belongs; 0 if unknown.
            ``memory_margin`` is relative to it or to the graph's own peak, whichever is higher.

    Raises:
        RuntimeError: the ranks' collectives differ, or a rank is missing; no rank runs the graph.
    """
    remove_repeated_waits(graph)  # change 2 in the list at the top of this file
    if options.passes == "none":
        return None
    begin_s = time.perf_counter()
    analysis = GraphAnalysis(graph)
    groups = _open_consensus(graph, analysis, options)
    if groups is None or not analysis.find_collectives("all_to_all"):
        return None
    sizes = Sizes(options.unknown_size)
    cost = _build_cost(graph, options, groups, sizes=sizes)
    contention = cost.contention
    order, (dense, grouped) = share_in_groups(
        groups,
        "plan",
        lambda: [
            _find_order(analysis, cost, sizes, margin=options.memory_margin, step_peak=step_peak),
            [contention.sm_margin, contention.grouped_sm_margin],
        ],
    )
    reorder(graph, analysis, order)  # change 3 in the list at the top of this file
    report = report_order(
        analysis, order, cost=cost, sizes=sizes, contention=contention, inside=cost.inside
    )
    return _add_planning_time(replace(report, sm_margins=(dense, grouped)), cost, begin_s=begin_s)


def reorder(graph: fx.Graph, analysis: GraphAnalysis, order: Sequence[int]) -> None:
    """Reorder the nodes of a graph in place, after a check that the new order is legal.

    Raises a ``RuntimeError``, without a change of the graph, if the order is not legal.
    """
    analysis.check_order(order)
    nodes = [analysis.nodes[index] for index in order]
    for before, node in pairwise(nodes):
        if before.next is not node:
            before.append(node)
    assert nodes == list(graph.nodes)
    graph.lint()


def report_unchanged(graph: fx.Graph, options: Options) -> OrderReport:
    """Return a report of the predicted times and memory of a graph that keeps its own order."""
    begin_s = time.perf_counter()
    analysis, sizes = GraphAnalysis(graph), Sizes(options.unknown_size)
    cost = _build_cost(graph, options, [], sizes=sizes)
    report = report_order(analysis, range(len(analysis.nodes)), cost=cost, sizes=sizes)
    return _add_planning_time(report, cost, begin_s=begin_s)


def _add_planning_time(report: OrderReport, cost: ProfiledCost, *, begin_s: float) -> OrderReport:
    return replace(
        report,
        predicted=tuple(sorted(cost.predicted)),
        planning_s=time.perf_counter() - begin_s - cost.measuring_s,
        measuring_s=cost.measuring_s,
    )


def is_backward(graph: fx.Graph) -> bool:
    """Return whether a graph of aot_autograd is for backward: it has inputs named "tangents_*"."""
    inputs = graph.find_nodes(op="placeholder")
    return any(node.name.startswith("tangents") for node in inputs)


def device_of(graph: fx.Graph) -> torch.device:
    """Return the device of a graph's first tensor that is not on the CPU; else the CPU."""
    values = (node.meta.get("val") for node in graph.nodes)
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    return next((each for each in devices if each.type != "cpu"), torch.device("cpu"))


def _open_consensus(
    graph: fx.Graph, analysis: GraphAnalysis, options: Options
) -> list[Consensus] | None:
    """Compare a graph across ranks; return each group's ``Consensus``, None if it must not change.

    A graph without collectives is not compared. Without option ``agree``, the list is empty.
    """
    if unknown := unknown_collectives(graph.nodes):
        warnings.warn(
            "halley does not change a graph, because it does not know how these operators "
            f"communicate: {', '.join(unknown)}",
            stacklevel=3,
        )
        return None
    if not analysis.find(NodeKind.START, NodeKind.FUSED):
        return None
    if not options.agree:
        return []
    groups, difference = compare_graphs(graph, timeout_s=options.timeout_s)
    if difference:
        warnings.warn(
            "halley does not change a graph: the ranks have the same collectives in it, but no "
            f"plan fits all ranks: {difference}",
            stacklevel=3,
        )
        return None
    return groups


def _find_order(
    analysis: GraphAnalysis, cost: ProfiledCost, sizes: Sizes, *, margin: float, step_peak: int
) -> list[int]:
    unchanged, tasks = list(range(len(analysis.nodes))), operations(analysis, cost)
    peak = max(LiveBytes(analysis, sizes, inside=cost.inside).peak(unchanged), step_peak)
    order = plan_wgrad(
        analysis,
        cost=cost,
        sizes=sizes,
        max_bytes=(1.0 + margin) * peak,
        contention=cost.contention,
        inside=cost.inside,
        only_with_gemm=cost.boundaries is not None,
    )
    new, old = (graph_time(tasks, each, cost.contention) for each in (order, unchanged))
    is_faster = (new.makespan_us, new.exposed_us) < (old.makespan_us, old.exposed_us)
    return order if is_faster else unchanged


def _build_cost(
    graph: fx.Graph, options: Options, groups: Sequence[Consensus], *, sizes: Sizes
) -> ProfiledCost:
    device = device_of(graph)
    own = predictor_of(device if device.type == "cuda" else "cpu")
    predictor = Predictor(options.hardware) if options.hardware else own
    boundaries = find_boundaries(graph, sizes) if options.inner == "inductor" else None
    if not options.profiles:
        return ProfiledCost(predictor, sizes=sizes, boundaries=boundaries)
    plans = not groups or groups[0].rank == 0
    num_ranks = groups[0].num_ranks if groups else 1
    environment = find_environment(device, topology=f"ranks {num_ranks}")
    if options.hardware is not None and not options.measure:
        topology = f"ranks {max(group_sizes(graph), default=1)}"
        environment = Environment(device=options.hardware.name, versions="", topology=topology)
    table = ProfileTable(None, environment)

    def read() -> None:
        nonlocal table
        path = Path(options.profiles)
        if not options.measure and not path.exists():
            raise ValueError(f"profiles ({path}) must be a file unless measure is set")
        table = ProfileTable(path, environment, offline=not options.measure)

    # ``share`` runs ``read`` on rank 0. If ``read`` fails, all ranks raise an error.
    groups[0].share("profiles", read) if groups else read()
    begin_s = time.perf_counter()
    keys = curve_keys(groups)
    if groups and options.measure:
        measure_groups(graph, groups, table, keys=keys, sizes=sizes, device=device)
    cost = ProfiledCost(
        predictor,
        sizes=sizes,
        boundaries=boundaries,
        table=table,
        device=device if options.measure and plans else None,
        curve_keys=keys,
    )
    cost.measuring_s = time.perf_counter() - begin_s
    return cost


def reserve_sms(graph: fx.Graph, sm_margins: tuple[int, int], *, in_all: bool = False) -> None:
    """Make GEMMs in overlap windows of all-to-alls, or all GEMMs (``in_all``), leave SMs free.

    The graph must be in its final order. Each GEMM keeps its node and position. A GEMM with unusual
    arguments, or inside another operator, is not changed.

    Args:
        sm_margins: number of SMs that dense and grouped GEMMs leave free; 0 changes nothing.
        in_all: change all GEMMs, because collectives outside of the graph may run at any time.
    """
    dense, grouped = sm_margins
    analysis = GraphAnalysis(graph)
    starts = analysis.find_collectives("all_to_all")
    inside = {index for start in starts for index in analysis.find_window(start)}
    for index, node in enumerate(analysis.nodes):
        if index not in inside and not in_all:
            continue
        if dense and (operands := _find_dense(node)):
            node.args = (*operands, None, dense)
        elif grouped and (operands := _find_grouped(node)):
            node.args = (None, *operands, grouped)
        else:
            continue
        node.target, node.kwargs = gemm_with_carveout, {}
        node.meta.pop("eager_input_vals", None)  # stale: arguments of the replaced operator
    graph.lint()


def _find_dense(node: fx.Node) -> tuple[Any, ...] | None:
    """Return (bias or None, left, right) of a dense GEMM without other arguments; else None."""
    name, args = operator_name(node), node.args
    if name == "aten::mm" and len(args) == 2 and not node.kwargs:
        return (None, *args)
    return args if name == "aten::addmm" and len(args) == 3 and not node.kwargs else None


def _find_grouped(node: fx.Node) -> tuple[Any, ...] | None:
    """Return (left, right, group ends) of a grouped GEMM, else None; may insert a transpose."""
    name, args = operator_name(node), node.args
    if name == "aten::_grouped_mm":
        ends = args[2] if len(args) == 3 else node.kwargs.get("offs")
        others = {key for key, value in node.kwargs.items() if value is not None} - {"offs"}
        return None if ends is None or others or len(args) > 3 else (*args[:2], ends)
    if name == "halley::expert_gemm":
        return args
    if name == "halley::expert_weight_gemm":
        with node.graph.inserting_before(node):
            # Use permute: Inductor has decomposed aten.t before this pass, and cannot lower it now.
            transposed = node.graph.call_function(torch.ops.aten.permute.default, (args[0], [1, 0]))
        transposed.meta["val"] = cast(fx.Node, args[0]).meta["val"].permute(1, 0)
        return transposed, *args[1:]
    return None
