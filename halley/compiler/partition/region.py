"""A range of a graph as a pipeline of parts: what comes before, in parts, and after them.

Computation and all-to-alls of rows take turns; each turn is a stage. Parts run stage by stage, and
within a stage one after another: while the all-to-all of one part travels, the next computes. The
few bytes that say how many rows there are travel within a stage: were they one of their own, no
part's rows could leave before the last part has chosen experts.

Source: Lancet (arXiv:2404.19429), section 5.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from torch import fx

from halley.compiler.graph_analysis import is_random, is_view, writes
from halley.compiler.graph_collectives import collective_kind
from halley.compiler.partition.axes import (
    Batch,
    BatchFlow,
    Counts,
    Division,
    Index,
    Last,
    Refusal,
    Rows,
)


# How a node behind the parts comes to be: it runs as before; it ran in parts and runs again on the
# whole; or its parts are put together.
Ending = Literal["run", "again", "merge"]


@dataclass(frozen=True, kw_only=True)
class Region:
    """A range of a graph that may run in parts.

    Attributes:
        before: nodes that do not wait for parts, in order.
        stages: nodes that run in parts, in order; all but the last end with an all-to-all of rows.
        after: nodes that wait for parts, and those that ran in parts of which others want the
            whole, in order.
    """

    before: tuple[fx.Node, ...]
    stages: tuple[tuple[fx.Node, ...], ...]
    after: tuple[tuple[Ending, fx.Node], ...]

    def steps(self, num_parts: int) -> Iterator[tuple[fx.Node, int]]:
        """Yield what runs in parts and in which, in the order of the pipeline."""
        for stage in self.stages:
            for part in range(num_parts):
                for node in stage:
                    yield node, part


def find_region(flow: BatchFlow, nodes: Sequence[fx.Node]) -> Region | str:
    """Return consecutive nodes of a graph as a region, or why they cannot run in parts.

    A node runs in parts if it has a rule, all that it reads runs in parts or is there before, and
    what is there before is whole or divided as tokens are. Each all-to-all must run in parts.

    Args:
        flow: of the graph.
        nodes: consecutive, inputs and output not among them.
    """
    for node in nodes:
        if writes(node) or is_random(node):
            verb = "writes to its arguments" if writes(node) else "draws random numbers"
            return f"{node.name} ({node.target}) {verb} and keeps its place"
    divided: set[fx.Node] = set()
    late: set[fx.Node] = set()
    for node in nodes:
        sources = node.all_input_nodes
        if late.isdisjoint(sources) and _runs_in_parts(flow, node, divided):
            divided.add(node)
        elif any(source in divided or source in late for source in sources):
            late.add(node)
    exchanges = [node for node in nodes if collective_kind(node) == "all_to_all"]
    if not exchanges:
        return "no all-to-all is in it"
    for node in exchanges:
        if node not in divided:
            return _explain(flow, node, nodes)
        if not divided.issuperset(node.users):
            return f"{node.name} is waited for outside of the range, or not in parts"
    return Region(
        before=tuple(node for node in nodes if node not in divided and node not in late),
        stages=_stages(flow, [node for node in nodes if node in divided]),
        after=_ending(flow, nodes, divided, late),
    )


def _runs_in_parts(flow: BatchFlow, node: fx.Node, divided: set[fx.Node]) -> bool:
    if not isinstance(flow.calls.get(node), Division):
        return False
    given = (flow.axes[source] for source in node.all_input_nodes if source not in divided)
    return all(axis is None or isinstance(axis, Batch) for axis in given)


def _stages(flow: BatchFlow, divided: Sequence[fx.Node]) -> tuple[tuple[fx.Node, ...], ...]:
    stages: list[list[fx.Node]] = [[]]
    for node in divided:
        stages[-1].append(node)
        if collective_kind(node) == "all_to_all" and isinstance(flow.axes[node], Rows):
            stages.append([])
    return tuple(map(tuple, stages))


def _ending(
    flow: BatchFlow, nodes: Sequence[fx.Node], divided: set[fx.Node], late: set[fx.Node]
) -> tuple[tuple[Ending, fx.Node], ...]:
    inside = set(nodes)
    found: dict[fx.Node, Ending] = dict.fromkeys(late, "run")
    for node in reversed(nodes):  # what runs again wants the whole of what it reads
        if node in divided and any(
            u not in inside or found.get(u) in ("run", "again") for u in node.users
        ):
            found[node] = "again" if _runs_again(flow, node) else "merge"
    return tuple((found[node], node) for node in nodes if node in found)


def _runs_again(flow: BatchFlow, node: fx.Node) -> bool:
    """Return whether the whole of what ran in parts is made by the same operator on the whole.

    So are views, which keep their strides, and what numbers rows, which parts number from 0.
    """
    axes = flow.axes[node]
    if isinstance(axes, tuple | Index):
        return True
    if isinstance(axes, Counts | Last):
        return False
    if getattr(node.target, "__name__", "") == "getitem":
        return is_view(cast(fx.Node, node.args[0]))
    return is_view(node)


def _explain(flow: BatchFlow, exchange: fx.Node, nodes: Sequence[fx.Node]) -> str:
    """Return why an all-to-all among the nodes cannot run in parts."""
    position = {node: at for at, node in enumerate(exchange.graph.nodes)}
    above: set[fx.Node] = {exchange}
    pending = [exchange]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in above:
                above.add(source)
                pending.append(source)
    refused = [
        (position[node], call.reason)
        for node in above
        if isinstance(call := flow.calls.get(node), Refusal)
    ]
    here = [each for each in refused if each[0] >= position[nodes[0]]]
    if here:
        return min(here)[1]
    if flow.calls.get(exchange) is None and refused:
        return max(refused)[1]
    if flow.calls.get(exchange) is None:
        return f"{exchange.name} does not depend on the batch, as far as inputs are known"
    return f"{exchange.name} takes rows that come from before the range"
