"""Plans of the partition pass within memory: ranges that cost too much of it stay whole."""

import dataclasses
from collections.abc import Mapping, Sequence

from torch import fx

from halley.compiler.axes import Rule
from halley.compiler.graph import GraphFacts
from halley.compiler.memory import LiveBytes
from halley.compiler.partition import RANGE, PartitionPlan, partition
from halley.compiler.sizes import Sizes


def fit_memory(
    graph: fx.Graph,
    plan: PartitionPlan,
    *,
    batch_inputs: Sequence[str],
    rules: Mapping[str, Rule],
    sizes: Sizes,
    memory_margin: float,
) -> PartitionPlan:
    """Return a plan without the ranges at which a graph's live bytes would rise too high.

    Parts of what backward wants live beside the whole while they are put together, and several
    parts are on their way at once.

    Args:
        graph: of forward; a copy of it is divided.
        plan: of the graph.
        batch_inputs, rules, sizes: as of ``partition``.
        memory_margin: by what share the peak of live bytes may rise.
    """
    limit = (1.0 + memory_margin) * _peak(graph, sizes)[0]
    while plan.ranges:
        copy = fx.Graph(owning_module=graph.owning_module)
        copy.output(copy.graph_copy(graph, {}))
        partition(copy, plan.ranges, batch_inputs=batch_inputs, rules=rules, sizes=sizes)
        peak, where = _peak(copy, sizes)
        if peak <= limit:
            break
        nodes = list(copy.nodes)[: where + 1]
        before = [node.meta[RANGE] for node in nodes if RANGE in node.meta]
        plan = _without(plan, before[-1] if before else 0)
    return plan


def _peak(graph: fx.Graph, sizes: Sizes) -> tuple[int, int]:
    facts = GraphFacts(graph)
    return LiveBytes(facts, sizes).peak(range(len(facts.nodes)))


def _without(plan: PartitionPlan, at: int) -> PartitionPlan:
    exchange = plan.reports[at].exchanges[0]
    return dataclasses.replace(
        plan,
        ranges=(*plan.ranges[:at], *plan.ranges[at + 1 :]),
        reports=(*plan.reports[:at], *plan.reports[at + 1 :]),
        skipped=(*plan.skipped, f"{exchange} stays whole: its parts would hold too much memory"),
    )
