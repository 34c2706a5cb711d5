"""Microseconds of consecutive nodes of a graph, as they are and as a pipeline of parts."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, final

from torch import fx

from halley.compiler.graph_analysis import node_kind
from halley.compiler.node_cost import ROLES, NodeCost, host_us, is_read
from halley.compiler.partition.axes import BatchFlow, Division
from halley.compiler.partition.merge_cost import Known, MergeCost, Price, PricingNodes
from halley.compiler.partition.region import Region
from halley.compiler.sizes import Sizes
from halley.cost.simulate import NO_CONTENTION, Contention, Operation, Role, graph_time


# A node, and the part; None is the whole. Of what writes a part into the whole, -1 - part.
_Key: TypeAlias = tuple[fx.Node, int | None]


class _Work(NamedTuple):
    """What takes a stream for a while, and what it needs beside the node's inputs."""

    key: _Key
    needs: Sequence[_Key]
    duration_us: float
    role: Role
    host_us: float = 0.0


@final
class PipelineCost:
    """Prices ranges of one graph by simulating them alone.

    A part's node costs what it does on the part's shapes. Of rows whose number depends on data a
    part has its share: Lancet takes an irregular all-to-all for an equal one, too.

    Args:
        flow: of the graph.
        cost: microseconds of a node.
        sizes: of what nodes return.
        contention: of computation and communication.

    Attributes:
        sizes: as given.
    """

    def __init__(
        self,
        flow: BatchFlow,
        *,
        cost: NodeCost,
        sizes: Sizes,
        contention: Contention = NO_CONTENTION,
    ) -> None:
        self._flow = flow
        self._cost = cost
        self.sizes = sizes
        self._contention = contention
        self._pricing_nodes = PricingNodes(flow, sizes)
        self._known: dict[_Key, float] = {}
        self._merges: Known = {}
        self._roles: dict[fx.Node, Role] = {}
        self._reads: dict[fx.Node, bool] = {}
        self._host_us: dict[fx.Node, float] = {}

    def as_is(self, nodes: Sequence[fx.Node]) -> float:
        """Return the time of nodes in their order."""
        return self._time([self._whole_work(node) for node in nodes])

    def in_parts(self, region: Region, num_parts: int, *, defers_merges: bool = False) -> float:
        """Return the time of a region in parts, in the order of the pipeline.

        Args:
            region: of the graph.
            num_parts: of the batch.
            defers_merges: whether parts are put together while others travel, if only backward or
                nobody waits for the whole: then for free, as long as communication takes longer
                than all computation.
        """
        divided = {node for stage in region.stages for node in stage}
        merges = MergeCost(
            region,
            num_parts,
            flow=self._flow,
            cost=self._cost,
            pricing_nodes=self._pricing_nodes,
            known=self._merges,
        )
        works = [self._whole_work(node) for node in region.before]
        for node, part in region.steps(num_parts):
            call = self._flow.calls[node]
            before: list[_Key] = []
            if isinstance(call, Division) and call.carry is not None and part > 0:
                before.append((node, part - 1))
            before += [(source, part) for source in node.all_input_nodes if source in divided]
            role = self._role(node)
            part_us = self._part(node, num_parts)
            works.append(_Work((node, part), before, part_us, role, self._host(node, part_us)))
            fill = merges.fill(node, part)
            if fill.device_us:
                key = (node, -1 - part)
                works.append(_Work(key, [(node, part)], fill.device_us, "compute", fill.host_us))
        deferred = Price()
        for ending, node in region.after:
            if ending == "merge":
                parts = [(node, at) for at in range(-num_parts, num_parts)]
                merge = merges.merge(node)
                if defers_merges:
                    deferred += merge
                    merge = Price()
                role = "compute" if merge.device_us else "free"
                works.append(_Work((node, None), parts, merge.device_us, role, merge.host_us))
            else:
                works.append(self._whole_work(node))
        compute_us = sum(work.duration_us for work in works if work.role == "compute")
        issue_us = sum(work.host_us for work in works)
        return max(self._time(works), compute_us + deferred.device_us, issue_us + deferred.host_us)

    def _time(self, works: Sequence[_Work]) -> float:
        """Return the time of works in their order."""
        position = {work.key: at for at, work in enumerate(works)}
        operations: list[Operation] = []
        for (node, part), more, duration_us, role, issue_us in works:
            inputs: list[_Key] = [(source, None) for source in node.all_input_nodes]
            needs = {position[key] for key in (*inputs, *more) if key in position}
            operations.append(
                Operation(
                    name=f"{node.name}.{part}",
                    role=role,
                    duration_us=duration_us,
                    needs=tuple(sorted(at for at in needs if at < len(operations))),
                    host_us=issue_us,
                    is_read=role == "compute" and self._is_read(node),
                )
            )
        return graph_time(operations, range(len(operations)), self._contention).makespan_us

    def _whole_work(self, node: fx.Node) -> _Work:
        whole_us = self._whole(node)
        return _Work((node, None), (), whole_us, self._role(node), self._host(node, whole_us))

    def _role(self, node: fx.Node) -> Role:
        if node not in self._roles:
            self._roles[node] = ROLES[node_kind(node)]
        return self._roles[node]

    def _is_read(self, node: fx.Node) -> bool:
        if node not in self._reads:
            self._reads[node] = is_read(node)
        return self._reads[node]

    def _host(self, node: fx.Node, duration_us: float) -> float:
        if not duration_us:
            return 0.0
        if node not in self._host_us:
            self._host_us[node] = host_us(node, self._cost)
        return self._host_us[node]

    def _whole(self, node: fx.Node) -> float:
        if (node, None) not in self._known:
            role = self._role(node)
            self._known[node, None] = self._cost(node) if role in ("compute", "start") else 0.0
        return self._known[node, None]

    def _part(self, node: fx.Node, num_parts: int) -> float:
        if (node, num_parts) not in self._known:
            takes_time = self._role(node) in ("compute", "start")
            time_us = (
                self._cost(self._pricing_nodes.of_part(node, num_parts)) if takes_time else 0.0
            )
            self._known[node, num_parts] = time_us
        return self._known[node, num_parts]
