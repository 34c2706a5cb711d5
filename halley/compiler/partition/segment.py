"""Split a segment of a graph into the nodes before, in and after its microbatch pipeline.

The nodes that run in microbatches form pipeline stages. Each all-to-all of rows ends a stage, and
all microbatches run one stage before any runs the next. With two microbatches and two stages:

    compute stream   A0  A1  B0  B1       A: up to the dispatch, B: expert GEMMs and what follows
    all-to-alls          a0  a1           a0 overlaps A1, a1 overlaps B0

The small all-to-all of row counts does not end a stage. Otherwise the rows of microbatch 0 could be
sent only after the last microbatch has chosen its experts.

Source: Lancet (arXiv:2404.19429), section 5.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from torch import fx

from halley.compiler.graph_analysis import is_random, is_view, mutates_arguments
from halley.compiler.graph_collectives import collective_kind
from halley.compiler.partition.propagation import (
    Batch,
    BatchFlow,
    Counts,
    Division,
    Index,
    Last,
    Refusal,
    Rows,
)


# How the epilogue computes the full-batch value of a node. "run": the node runs only here, on the
# full batch. "rerun": it ran in microbatches and runs again on the full batch. "concat": the
# results of the microbatches are concatenated or added.
Epilogue: TypeAlias = Literal["run", "rerun", "concat"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive nodes of a graph that may run in microbatches.

    Attributes:
        before: nodes that do not depend on microbatches, in order.
        stages: nodes that run in microbatches, in order. All stages but the last end with an
            all-to-all of rows.
        after: nodes whose full-batch value is computed after the pipeline, in order.
    """

    before: tuple[fx.Node, ...]
    stages: tuple[tuple[fx.Node, ...], ...]
    after: tuple[tuple[Epilogue, fx.Node], ...]

    def steps(self, num_parts: int) -> Iterator[tuple[fx.Node, int]]:
        """Yield (node, microbatch) in the order of the pipeline."""
        for stage in self.stages:
            for microbatch in range(num_parts):
                for node in stage:
                    yield node, microbatch


def find_segment(flow: BatchFlow, nodes: Sequence[fx.Node]) -> Segment | str:
    """Return consecutive nodes as a segment, or the reason why they cannot run in microbatches.

    A node runs in microbatches if it has a ``Division`` and each operand either runs in
    microbatches too, or exists before the segment as a full batch that can be sliced. Every
    all-to-all of the nodes must run in microbatches.

    Args:
        flow: batch-dim propagation over the graph.
        nodes: consecutive nodes, without inputs and output of the graph.
    """
    for node in nodes:
        if mutates_arguments(node) or is_random(node):
            verb = "writes to its arguments" if mutates_arguments(node) else "draws random numbers"
            return f"{node.name} ({node.target}) {verb} and must keep its place"
    divided: set[fx.Node] = set()
    late: set[fx.Node] = set()  # full-batch nodes that need a result of the microbatches
    for node in nodes:
        sources = node.all_input_nodes
        if late.isdisjoint(sources) and _runs_in_microbatches(flow, node, divided):
            divided.add(node)
        elif any(source in divided or source in late for source in sources):
            late.add(node)
    exchanges = [node for node in nodes if collective_kind(node) == "all_to_all"]
    if not exchanges:
        return "it contains no all-to-all"
    for node in exchanges:
        if node not in divided:
            return _explain(flow, node, nodes)
        if not divided.issuperset(node.users):
            return f"the wait of {node.name} is outside of the segment or not in microbatches"
    return Segment(
        before=tuple(node for node in nodes if node not in divided and node not in late),
        stages=_find_stages(flow, [node for node in nodes if node in divided]),
        after=_find_epilogue(flow, nodes, divided, late),
    )


def _runs_in_microbatches(flow: BatchFlow, node: fx.Node, divided: set[fx.Node]) -> bool:
    if not isinstance(flow.calls.get(node), Division):
        return False
    # Of the values from before the segment, slices of a batch dimension can be taken, but not the
    # rows of one microbatch.
    given = (flow.axes[source] for source in node.all_input_nodes if source not in divided)
    return all(axis is None or isinstance(axis, Batch) for axis in given)


def _find_stages(flow: BatchFlow, divided: Sequence[fx.Node]) -> tuple[tuple[fx.Node, ...], ...]:
    stages: list[list[fx.Node]] = [[]]
    for node in divided:
        stages[-1].append(node)
        if collective_kind(node) == "all_to_all" and isinstance(flow.axes[node], Rows):
            stages.append([])
    return tuple(map(tuple, stages))


def _find_epilogue(
    flow: BatchFlow, nodes: Sequence[fx.Node], divided: set[fx.Node], late: set[fx.Node]
) -> tuple[tuple[Epilogue, fx.Node], ...]:
    inside = set(nodes)
    found: dict[fx.Node, Epilogue] = dict.fromkeys(late, "run")
    # In reverse order, because a node that runs again needs the full-batch values of its operands.
    for node in reversed(nodes):
        if node in divided and any(
            user not in inside or found.get(user) in ("run", "rerun") for user in node.users
        ):
            found[node] = "rerun" if _runs_again(flow, node) else "concat"
    return tuple((found[node], node) for node in nodes if node in found)


def _runs_again(flow: BatchFlow, node: fx.Node) -> bool:
    """Return whether a divided node must run again on the full batch.

    A view must, to keep its strides. So must row indices, which microbatches number from 0.
    """
    axes = flow.axes[node]
    if isinstance(axes, tuple | Index):
        return True
    if isinstance(axes, Counts | Last):
        return False
    is_item = getattr(node.target, "__name__", "") == "getitem"
    return is_view(cast(fx.Node, node.args[0]) if is_item else node)


def _explain(flow: BatchFlow, exchange: fx.Node, nodes: Sequence[fx.Node]) -> str:
    """Return why an all-to-all among the nodes cannot run in microbatches."""
    position = {node: at for at, node in enumerate(exchange.graph.nodes)}
    above: set[fx.Node] = {exchange}
    pending = [exchange]
    while pending:
        new = set(pending.pop().all_input_nodes) - above
        above |= new
        pending += new
    refused = sorted(
        (position[node], call.reason)
        for node in above
        if isinstance(call := flow.calls.get(node), Refusal)
    )
    inside = [reason for at, reason in refused if at >= position[nodes[0]]]
    if inside:
        return inside[0]
    if exchange in flow.calls:
        return f"{exchange.name} sends rows that were sorted before the segment"
    if refused:
        return refused[-1][1]
    return f"{exchange.name} does not depend on an input that has the batch"
