"""Run the compiler passes over one graph: ranks compare it, rank 0 plans, every rank checks.

Every change that Halley makes to a graph, in the order of execution. "Each" is the forward and the
backward graph. Rows 2 to 4 are ``run_passes`` in this file; ``backend.py`` (inner compiler "eager")
and ``inductor.py`` (inner compiler "inductor") call it, and then make the changes below it.

    change                       file                 graph              inner compiler
 1  save hooked parameters       gradient_ready.py    joint              both
 2  remove repeated waits        graph_collectives.py each               both
 3  run segments in microbatches partition/           forward            both
 4  schedule weight gradients    wgrad/               each               both
 5  decompose operators          inductor.py          each               inductor, on a GPU
 6  lower in-place concat        writes.py            forward            inductor
 7  reserve SMs                  reserved_sms.py      each               both, on a GPU
 8  add control dependencies     inductor.py          each               inductor
 9  insert gradient-ready hooks  gradient_ready.py    backward           both
10  order kernels                inductor.py          Inductor's kernels inductor

 1  May add outputs to forward and inputs to backward: parameters that have a hook. Runs when torch
    splits the joint graph. Changes nothing unless backward has one gradient for each input.
 2  May remove a wait for a result that another wait has returned already.
 3  May run a segment once for each microbatch and write the results into one tensor for the full
    batch (in-place concat). Checked: how often each operator is called; shapes, strides and dtypes
    of the outputs. Passes "partition" and "both".
 4  May reorder nodes: weight gradients, all-reduces of gradients, concats and waits move. Checked:
    each node is there once, after everything it needs; the same operators and outputs. Passes
    "wgrad" and "both"; with "partition" alone, only a graph that change 3 has rewritten.
 5  May replace an operator of Halley by ATen operators. Checked: the graph is well formed (lint).
 6  May replace a write operator by ``copy_``, ``index_put_`` or a GEMM with ``out``. Checked: lint.
 7  May replace a GEMM by the same GEMM with an SM carve-out, if one was measured. Checked: lint.
 8  May wrap the nodes of an overlap window so that Inductor keeps them in it. They are found before
    change 6: after it, a node that writes to its arguments depends on all nodes before it.
 9  May return None for a gradient and call the parameter's hook with it instead. Checked: lint.
10  May reorder kernels after Inductor's fusion, each after the kernels that it depends on.

Changes 6 to 8 are made only if ``run_passes`` returned a report. Rank 0 makes the plans of changes
3, 4 and 7, and all ranks use them. Before that, the ranks compare their graphs (``consensus.py``).
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TypeVar, final

import torch
from torch import fx

from halley.compiler.consensus import Consensus, open_consensus
from halley.compiler.fusion import find_boundaries
from halley.compiler.graph_analysis import GraphAnalysis, NodeKind, apply_order
from halley.compiler.graph_collectives import (
    graph_groups,
    group_sizes,
    remove_repeated_waits,
    signature,
    unknown_collectives,
)
from halley.compiler.group_cost import curve_keys, measure_groups
from halley.compiler.node_cost import ProfiledCost, operations
from halley.compiler.options import Options
from halley.compiler.partition.partition_plan import (
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
    """Run the passes that the options name on a graph; a collective of the graph's groups.

    A graph keeps its order if it has no all-to-all. It also does, after a warning, if it calls a
    collective that Halley does not know, or if the ranks' graphs differ in their computation.

    Args:
        graph: of operators, from aot_autograd or Inductor; changed in place.
        batch_inputs: names of the inputs whose first dimension is the batch, for a forward graph.
            Without any, no segment runs in microbatches.
        step_peak: peak of live bytes of the step to which the graph belongs; 0 if unknown.
            ``memory_margin`` is relative to it or to the graph's own peak, whichever is higher.

    Returns:
        The report of the changes, or None if the graph keeps its order.

    Raises:
        RuntimeError: the ranks' collectives differ, or a rank is missing; no rank runs the graph.
    """
    remove_repeated_waits(graph)  # change 2
    if not options.divides:
        batch_inputs = ()
    if not batch_inputs and not options.moves_gradients:
        return None
    begin_s = time.perf_counter()
    analysis = GraphAnalysis(graph)
    groups = _open_consensus(graph, analysis, options, batch_inputs)
    if groups is None or not analysis.find_collectives("all_to_all"):
        return None
    planner = _Planner(graph, options, groups)
    before = planner.report(analysis, range(len(analysis.nodes)))
    planner.max_bytes = (1.0 + options.memory_margin) * max(before.peak_before, step_peak)
    plan = PartitionPlan()
    if batch_inputs:  # change 3
        plan = planner.partition(graph, batch_inputs)
        analysis = GraphAnalysis(graph)
    order = list(range(len(analysis.nodes)))
    if options.moves_gradients or plan.ranges:  # change 4
        order = planner.share("order", partial(planner.find_order, analysis))
    reorder(graph, analysis, order)
    after = planner.report(analysis, order)
    report = replace(
        after,
        modules=before.modules | after.modules,
        time_before=before.time_before,
        spans_before=before.spans_before,
        peak_before=before.peak_before,
        ranges=plan.reports,
        skipped=plan.skipped,
        sm_margins=planner.share_sm_margins(),
    )
    return _add_planning_time(report, planner.cost, begin_s=begin_s)


def reorder(graph: fx.Graph, analysis: GraphAnalysis, order: Sequence[int]) -> None:
    """Put the nodes of a graph into an order, and check the result.

    Raises:
        RuntimeError: the order is not legal; the graph is not changed.
    """
    analysis.check_order(order)
    calls = Counter(str(node.target) for node in analysis.nodes)
    outputs = analysis.nodes[-1].args
    apply_order(graph, order)
    assert [analysis.nodes[index] for index in order] == list(graph.nodes)
    assert Counter(str(node.target) for node in graph.nodes) == calls
    assert graph.output_node().args == outputs
    graph.lint()


def report_unchanged(graph: fx.Graph, options: Options) -> OrderReport:
    """Return the report of a graph that no pass has changed, with predicted times."""
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


def find_batch_inputs(graph: fx.Graph, positions: Sequence[int]) -> list[str]:
    """Return the names of a forward graph's inputs at some positions; none for a backward graph."""
    if is_backward(graph):
        return []
    inputs = graph.find_nodes(op="placeholder")
    return [node.name for at, node in enumerate(inputs) if at in positions]


def is_backward(graph: fx.Graph) -> bool:
    """Return whether a graph is a backward graph: aot_autograd names its gradients tangents."""
    inputs = graph.find_nodes(op="placeholder")
    return any(node.name.startswith("tangents") for node in inputs)


def device_of(graph: fx.Graph) -> torch.device:
    """Return the device of a graph's tensors: the first that is no CPU, if there is one."""
    values = (node.meta.get("val") for node in graph.nodes)
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    return next((each for each in devices if each.type != "cpu"), torch.device("cpu"))


def _open_consensus(
    graph: fx.Graph, analysis: GraphAnalysis, options: Options, batch_inputs: Sequence[str]
) -> list[Consensus] | None:
    """Compare a graph in each of its process groups; return one ``Consensus`` for each group.

    The largest group comes first. None, after a warning, if the graph must stay as it is; None also
    if it has no collective, and then no rank is asked.
    """
    if unknown := unknown_collectives(graph):
        warnings.warn(
            "halley does not change a graph, because it does not know how these operators "
            f"communicate: {', '.join(unknown)}",
            stacklevel=3,
        )
        return None
    if not analysis.find(NodeKind.START, NodeKind.FUSED):
        return None
    names = graph_groups(graph) if options.agree else []
    groups = [open_consensus(name, timeout_s=options.timeout_s) for name in names]
    groups.sort(key=lambda consensus: -consensus.num_ranks)
    own = signature(graph, batch_inputs)
    # Compare in every group, also after a difference: its other ranks wait for this rank.
    differing = [consensus.compare(own) for consensus in groups]
    if any(differing):
        warnings.warn(
            "halley does not change a graph: the ranks have the same collectives in it, but "
            "different computation, so no plan fits all ranks",
            stacklevel=3,
        )
        return None
    return groups


@final
class _Planner:
    """Plans the passes over one graph. Rank 0 makes each plan and shares it with all ranks.

    ``groups`` has one consensus for each process group of the graph, the largest first. It is empty
    if this process plans alone.
    """

    def __init__(self, graph: fx.Graph, options: Options, groups: Sequence[Consensus]) -> None:
        self.max_bytes = inf  # of live bytes
        self._options = options
        self._groups = groups
        self._sizes = Sizes(options.unknown_size)
        self.cost = _build_cost(graph, options, groups, sizes=self._sizes)

    def share(self, what: str, make: Callable[[], _T]) -> _T:
        """Return the result that ``make`` gives on rank 0 of the largest group, on all ranks.

        Raises:
            RuntimeError: the ranks of a smaller group got different results, because no group of
                the graph holds all of them.
        """
        if not self._groups:
            return make()
        made = self._groups[0].share(what, make)
        for consensus in self._groups[1:]:
            if consensus.share(f"same {what}", lambda: made) != made:
                raise RuntimeError(
                    "ranks of two groups would run a graph in different orders: the largest group "
                    "of a graph must hold all ranks that take part in it"
                )
        return made

    def share_sm_margins(self) -> tuple[int, int]:
        """Return how many SMs dense and grouped GEMMs leave free, as rank 0 measured it."""
        found = self.cost.contention
        dense, grouped = self.share("margins", lambda: [found.sm_margin, found.grouped_sm_margin])
        return dense, grouped

    def report(self, analysis: GraphAnalysis, order: Sequence[int]) -> OrderReport:
        """Return the predicted effect of an order."""
        return report_order(
            analysis,
            order,
            cost=self.cost,
            sizes=self._sizes,
            contention=self.cost.contention,
            inside=self.cost.inside,
        )

    def partition(self, graph: fx.Graph, batch_inputs: Sequence[str]) -> PartitionPlan:
        """Run segments of a forward graph in microbatches; return the plan."""
        run = partial(
            partition, batch_inputs=batch_inputs, rules=self._options.rules, sizes=self._sizes
        )

        def make_plan() -> dict[str, object]:
            plan = plan_partition(
                graph,
                batch_inputs=batch_inputs,
                rules=self._options.rules,
                cost=self.cost,
                sizes=self._sizes,
                num_parts=self._options.num_parts,
                contention=self.cost.contention,
            )
            plan = fit_memory(
                graph,
                plan,
                run,
                sizes=self._sizes,
                max_bytes=self.max_bytes,
                inside=self._inside_kernels,
            )
            if not self._options.num_parts:  # a number that the user gives is used even if slower
                plan = fit_time(graph, plan, run, self._time_us)
            return asdict(plan)

        plan = read_plan(self.share("partition", make_plan))
        run(graph, plan.ranges)
        _update_boundaries(graph, self._options, self.cost, self._sizes)
        return plan

    def _inside_kernels(self, graph: fx.Graph) -> Collection[fx.Node]:
        _update_boundaries(graph, self._options, self.cost, self._sizes)
        return self.cost.inside

    def _time_us(self, graph: fx.Graph) -> float:
        """Predict a forward graph in the order that ``find_order`` gives it."""
        _update_boundaries(graph, self._options, self.cost, self._sizes)
        analysis = GraphAnalysis(graph)
        order = self.find_order(analysis)
        return graph_time(operations(analysis, self.cost), order, self.cost.contention).makespan_us

    def find_order(self, analysis: GraphAnalysis) -> list[int]:
        """Return the order of the weight-gradient pass, or that of the graph if none is faster."""
        cost = self.cost
        order = plan_wgrad(
            analysis,
            cost=cost,
            sizes=self._sizes,
            max_bytes=self.max_bytes,
            contention=cost.contention,
            inside=cost.inside,
            gemms_alone=cost.boundaries is not None,
        )
        unchanged, tasks = list(range(len(analysis.nodes))), operations(analysis, cost)
        new, old = (graph_time(tasks, each, cost.contention) for each in (order, unchanged))
        is_faster = (new.makespan_us, new.exposed_us) < (old.makespan_us, old.exposed_us)
        return order if is_faster else unchanged


def _build_cost(
    graph: fx.Graph, options: Options, groups: Sequence[Consensus], *, sizes: Sizes
) -> ProfiledCost:
    """Return the cost of the graph's nodes; only the rank that plans reads the file of profiles."""
    device = device_of(graph)
    predictor = Predictor(options.hardware or _hardware_of(device))
    if not options.profiles:
        cost = ProfiledCost(predictor, sizes=sizes)
        _update_boundaries(graph, options, cost, sizes)
        return cost
    plans = not groups or groups[0].rank == 0
    num_ranks = groups[0].num_ranks if groups else 1
    environment = find_environment(device, topology=f"ranks {num_ranks}")
    if options.hardware is not None and not options.measure:
        # The plan is for a device that this machine does not have: take its times of any versions.
        topology = f"ranks {max(group_sizes(graph), default=1)}"
        environment = Environment(device=options.hardware.name, versions="", topology=topology)
    table = ProfileTable(None, environment)

    def read() -> None:
        nonlocal table
        path = Path(options.profiles)
        if not options.measure and not path.exists():
            raise ValueError(f"profiles ({path}) must be a file unless measure is set")
        table = ProfileTable(path, environment, offline=not options.measure)

    # An error of rank 0, such as a missing file, is raised on all ranks.
    groups[0].share("profiles", read) if groups else read()
    begin_s = time.perf_counter()
    keys = curve_keys(groups)
    if groups and options.measure:
        measure_groups(graph, groups, table, keys=keys, sizes=sizes, device=device)
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
    """Set the kernels that Inductor will make of the graph as it is now; nothing if eager."""
    if options.inner == "inductor":
        cost.boundaries = find_boundaries(graph, sizes)


def _hardware_of(device: torch.device) -> Hardware:
    if device.type != "cuda":
        return CPU
    try:
        return find_hardware(torch.cuda.get_device_name(device))
    except ValueError:  # a GPU whose rates Halley does not know: strategies assume an H200, too
        return H200
