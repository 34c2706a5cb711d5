"""Runs passes over a graph: ranks agree, rank 0 plans, and each checks what came out."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import fx

from halley.compiler.consensus import Consensus, open_consensus
from halley.compiler.fusion import find_boundaries
from halley.compiler.graph_analysis import GraphAnalysis, NodeKind, apply_order
from halley.compiler.graph_collectives import (
    graph_groups,
    group_sizes,
    merge_waits,
    signature,
    unknown_collectives,
)
from halley.compiler.group_cost import curve_keys, measure_groups
from halley.compiler.node_cost import ProfiledCost, operations
from halley.compiler.options import Options
from halley.compiler.partition.choose import (
    PartitionPlan,
    fit_memory,
    fit_time,
    partition,
    plan_partition,
    read_plan,
)
from halley.compiler.sizes import Sizes
from halley.compiler.wgrad.schedule import OrderReport, plan_wgrad, report_order
from halley.cost.hardware import CPU, H200, Hardware, Predictor, find_hardware
from halley.cost.profiles import Environment, ProfileTable, find_environment
from halley.cost.simulate import graph_time


_T = TypeVar("_T")


def run_passes(
    graph: fx.Graph, options: Options, *, batch_inputs: Sequence[str] = (), step_peak: int = 0
) -> OrderReport | None:
    """Run the passes that the options name, in place; a collective of the graph's groups.

    A graph without all-to-alls, or with an operator that communicates in a way unknown here (one
    warning), stays as it is, and so does one whose structure differs between ranks (one warning).
    Waits for what was waited for go from any.

    Args:
        graph: of operators, as aot_autograd or Inductor makes it.
        options: which passes, and how.
        batch_inputs: names of the inputs that have the batch as their first dimension, in a graph
            of forward; without any, none of it runs in parts.
        step_peak: bytes at the worst moment of the step that the graph is half of, where that is
            known; ``memory_margin`` is then above this.

    Returns:
        What changed, or None where the graph stays as it is.

    Raises:
        RuntimeError: ranks have different collectives, or one did not come in time; then before
            the graph has run anywhere.
    """
    merge_waits(graph)
    divides = options.divides and bool(batch_inputs)
    if not divides and not options.moves_gradients:
        return None
    begin_s = time.perf_counter()
    analysis = GraphAnalysis(graph)
    consensus_groups = _convene(graph, analysis, options, batch_inputs if divides else ())
    if consensus_groups is None or not analysis.find_collectives("all_to_all"):
        return None
    sizes = Sizes(options.unknown_size)
    cost = _build_cost(graph, consensus_groups, options, sizes=sizes)
    report = partial(report_order, cost=cost, sizes=sizes, contention=cost.contention)
    before = report(analysis, range(len(analysis.nodes)), inside=cost.inside)
    max_bytes = (1.0 + options.memory_margin) * max(before.peak_before, step_peak)
    plan = PartitionPlan()
    if divides:
        plan = _partition(
            graph,
            consensus_groups,
            options,
            batch_inputs=batch_inputs,
            cost=cost,
            sizes=sizes,
            max_bytes=max_bytes,
        )
        _update_boundaries(graph, options, cost, sizes)
        analysis = GraphAnalysis(graph)
    order = list(range(len(analysis.nodes)))
    if options.moves_gradients or plan.ranges:  # what is put together of parts moves too
        make = partial(_find_order, analysis, cost, sizes, max_bytes=max_bytes)
        order = _share(consensus_groups, "order", make)
    after = report(analysis, order, inside=cost.inside)
    reorder(graph, analysis, order)
    after = replace(_since(before, after, plan), sm_margins=_share_margins(consensus_groups, cost))
    return _timed(after, cost, begin_s=begin_s)


def _share_margins(consensus_groups: Sequence[Consensus], cost: ProfiledCost) -> tuple[int, int]:
    """Return how many multiprocessors dense and grouped products leave, by rank 0's figures."""
    margins = cost.contention.sm_margin, cost.contention.grouped_sm_margin
    dense, grouped = _share(consensus_groups, "margins", lambda: list(margins))
    return dense, grouped


def _since(before: OrderReport, after: OrderReport, plan: PartitionPlan) -> OrderReport:
    """Return the report of a graph with what it was like before some of it ran in parts."""
    was = {name: getattr(before, name) for name in ("time_before", "spans_before", "peak_before")}
    modules = before.modules | after.modules
    return replace(after, modules=modules, ranges=plan.reports, skipped=plan.skipped, **was)


def _timed(report: OrderReport, cost: ProfiledCost, *, begin_s: float) -> OrderReport:
    """Return a report with what its costs were made of, and what the passes took until now."""
    planning_s = time.perf_counter() - begin_s - cost.measuring_s
    return replace(
        report,
        predicted=tuple(sorted(cost.predicted)),
        planning_s=planning_s,
        measuring_s=cost.measuring_s,
    )


def report_as_is(graph: fx.Graph, options: Options) -> OrderReport:
    """Return the report of a graph that no pass has changed, with predicted times."""
    begin_s = time.perf_counter()
    analysis, sizes = GraphAnalysis(graph), Sizes(options.unknown_size)
    cost = _build_cost(graph, [], options, sizes=sizes)
    report = report_order(analysis, range(len(analysis.nodes)), cost=cost, sizes=sizes)
    return _timed(report, cost, begin_s=begin_s)


def _convene(
    graph: fx.Graph, analysis: GraphAnalysis, options: Options, batch_inputs: Sequence[str]
) -> list[Consensus] | None:
    """Open a consensus over each group of a graph, the largest group first.

    None if the graph must stay as it is, after a warning.
    """
    if unknown := unknown_collectives(graph):
        warnings.warn(
            f"halley leaves a graph as it is: it does not know {', '.join(unknown)}", stacklevel=3
        )
        return None
    if not analysis.find(NodeKind.START, NodeKind.FUSED):
        return None
    groups = graph_groups(graph) if options.agree else []
    consensus_groups = [open_consensus(name, timeout_s=options.timeout_s) for name in groups]
    consensus_groups.sort(key=lambda consensus: -consensus.num_ranks)
    if _differing(consensus_groups, graph, batch_inputs):
        warnings.warn(
            "halley leaves a graph as it is: ranks have the same collectives in it, but other "
            "computation, so that no plan fits all",
            stacklevel=3,
        )
        return None
    return consensus_groups


def find_batch_inputs(graph: fx.Graph, positions: Sequence[int]) -> list[str]:
    """Return the names of inputs of a graph of forward by position; none for one of backward."""
    if is_backward(graph):
        return []
    inputs = graph.find_nodes(op="placeholder")
    return [node.name for at, node in enumerate(inputs) if at in positions]


def is_backward(graph: fx.Graph) -> bool:
    """Return whether a graph is a backward half, which has gradients among its inputs."""
    inputs = graph.find_nodes(op="placeholder")
    return any(node.name.startswith("tangents") for node in inputs)


def device_of(graph: fx.Graph) -> torch.device:
    """Return the device of a graph's tensors: one that is no CPU, if there is any."""
    values = (node.meta.get("val") for node in graph.nodes)
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    return next((each for each in devices if each.type != "cpu"), torch.device("cpu"))


def _partition(
    graph: fx.Graph,
    consensus_groups: Sequence[Consensus],
    options: Options,
    *,
    batch_inputs: Sequence[str],
    cost: ProfiledCost,
    sizes: Sizes,
    max_bytes: float,
) -> PartitionPlan:
    """Run ranges of forward in parts by rank 0's plan, and return that."""
    divide = partial(
        partition,
        batch_inputs=batch_inputs,
        rules=options.rules,
        sizes=sizes,
    )

    def inside(whole: fx.Graph) -> Collection[fx.Node]:
        _update_boundaries(whole, options, cost, sizes)
        return cost.inside

    def time_us(whole: fx.Graph) -> float:
        _update_boundaries(whole, options, cost, sizes)
        analysis = GraphAnalysis(whole)
        order = _find_order(analysis, cost, sizes, max_bytes=max_bytes)
        return graph_time(operations(analysis, cost), order, cost.contention).makespan_us

    def make_plan() -> dict[str, object]:
        plan = plan_partition(
            graph,
            batch_inputs=batch_inputs,
            rules=options.rules,
            cost=cost,
            sizes=sizes,
            num_parts=options.num_parts,
            contention=cost.contention,
        )
        plan = fit_memory(graph, plan, divide, sizes=sizes, max_bytes=max_bytes, inside=inside)
        return asdict(plan if options.num_parts else fit_time(graph, plan, divide, time_us))

    plan = read_plan(_share(consensus_groups, "partition", make_plan))
    divide(graph, plan.ranges)
    return plan


def _find_order(
    analysis: GraphAnalysis, cost: ProfiledCost, sizes: Sizes, *, max_bytes: float
) -> list[int]:
    """Return the order of the weight-gradient pass, or that of the graph if none is faster.

    The cost knows the graph as it is now.
    """
    order = plan_wgrad(
        analysis,
        cost=cost,
        sizes=sizes,
        max_bytes=max_bytes,
        contention=cost.contention,
        inside=cost.inside,
        gemms_alone=cost.boundaries is not None,
    )
    as_is, todo = list(range(len(analysis.nodes))), operations(analysis, cost)
    new, old = (graph_time(todo, each, cost.contention) for each in (order, as_is))
    gains = (new.makespan_us, new.exposed_us) < (old.makespan_us, old.exposed_us)
    return order if gains else as_is


def _share(consensus_groups: Sequence[Consensus], what: str, make: Callable[[], _T]) -> _T:
    """Return what rank 0 of the largest group makes, on all ranks.

    Raises:
        RuntimeError: the ranks of a smaller group got different plans, as not all are in one group.
    """
    if not consensus_groups:
        return make()
    made = consensus_groups[0].share(what, make)
    for consensus in consensus_groups[1:]:
        if consensus.share(f"same {what}", lambda: made) != made:
            raise RuntimeError(
                "ranks of two groups would run a graph in different orders: the largest group of "
                "a graph must hold all ranks that meet in it"
            )
    return made


def reorder(graph: fx.Graph, analysis: GraphAnalysis, order: Sequence[int]) -> None:
    """Put a graph's nodes into an order and check what came out.

    Args:
        graph: changed.
        analysis: of the graph before.
        order: of all of its nodes.

    Contract: the same operators as often, every node after what it needs, the same outputs.

    Raises:
        RuntimeError: the order is not legal; the graph is as it was.
    """
    analysis.check_order(order)
    calls = Counter(str(node.target) for node in analysis.nodes)
    outputs = analysis.nodes[-1].args
    apply_order(graph, order)
    assert [analysis.nodes[index] for index in order] == list(graph.nodes)
    assert Counter(str(node.target) for node in graph.nodes) == calls
    assert graph.output_node().args == outputs
    graph.lint()


def _differing(
    consensus_groups: Sequence[Consensus], graph: fx.Graph, batch_inputs: Sequence[str]
) -> bool:
    """Return whether ranks have other computation; raise if they have other collectives."""
    mine = signature(graph, batch_inputs)
    others = [consensus.compare(mine) for consensus in consensus_groups]  # each must be asked
    return any(others)


def _build_cost(
    graph: fx.Graph, consensus_groups: Sequence[Consensus], options: Options, *, sizes: Sizes
) -> ProfiledCost:
    """Return the cost of nodes; only that of the rank that plans knows the file of profiles."""
    device = device_of(graph)
    predictor = Predictor(options.hardware or _hardware_of(device))
    if not options.profiles:
        cost = ProfiledCost(predictor, sizes=sizes)
        _update_boundaries(graph, options, cost, sizes)
        return cost
    plans = not consensus_groups or consensus_groups[0].rank == 0
    num_ranks = consensus_groups[0].num_ranks if consensus_groups else 1
    environment = find_environment(device, topology=f"ranks {num_ranks}")
    if options.hardware is not None and not options.measure:  # a plan for a device, from afar
        topology = f"ranks {max(group_sizes(graph), default=1)}"
        environment = Environment(device=options.hardware.name, versions="", topology=topology)
    table = ProfileTable(None, environment)

    def read() -> None:
        nonlocal table
        path = Path(options.profiles)
        if not options.measure and not path.exists():
            raise ValueError(f"profiles ({path}) must be a file unless measure is set")
        table = ProfileTable(path, environment, offline=not options.measure)

    _share(consensus_groups[:1], "profiles", read)
    begin_s = time.perf_counter()
    keys = curve_keys(consensus_groups)
    if consensus_groups and options.measure:
        measure_groups(graph, consensus_groups, table, keys=keys, sizes=sizes, device=device)
    cost = ProfiledCost(
        predictor,
        sizes=sizes,
        table=table,
        device=device if options.measure and plans else None,
        curve_keys=keys,
    )
    cost.measuring_s = time.perf_counter() - begin_s
    _update_boundaries(graph, options, cost, sizes)
    return cost


def _update_boundaries(graph: fx.Graph, options: Options, cost: ProfiledCost, sizes: Sizes) -> None:
    """Tell a cost what the inner compiler fuses of the graph as it is now."""
    if options.inner == "inductor":
        cost.boundaries = find_boundaries(graph, sizes)


def _hardware_of(device: torch.device) -> Hardware:
    if device.type != "cuda":
        return CPU
    try:
        return find_hardware(torch.cuda.get_device_name(device))
    except ValueError:  # as strategies take a GPU without figures
        return H200
