"""Predict the time of consecutive nodes on the full batch, and as a pipeline of microbatches."""

from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple, final

from torch import fx

from halley.compiler.graph_analysis import node_kind
from halley.compiler.node_cost import ROLES, NodeCost, host_us, is_read
from halley.compiler.partition.concat_cost import ConcatCost, KnownPrices, Price, PricingNodes
from halley.compiler.partition.propagation import BatchFlow, Division
from halley.compiler.partition.segment import Segment
from halley.compiler.sizes import Sizes
from halley.cost.simulate import NO_CONTENTION, Contention, Operation, Role, graph_time


class _Key(NamedTuple):
    """A node on a microbatch (None: the full batch), or the write of its result into a buffer."""

    node: fx.Node
    microbatch: int | None = None
    what: Literal["run", "write"] = "run"


class _Work(NamedTuple):
    """One operation to simulate. ``needs`` come in addition to the inputs of the node."""

    key: _Key
    needs: Sequence[_Key]
    price: Price
    role: Role


@final
class PipelineCost:
    """Predicts the time of segments of one graph by simulating each alone.

    A node in a microbatch costs as much as an operator of its shapes. Like Lancet, it treats an
    all-to-all with splits that depend on data as one with equal splits.

    Args:
        flow: batch-dim propagation over the graph.
        cost: microseconds of a node.
        sizes: shapes and bytes of results.
        contention: how computation and communication slow each other down.
    """

    def __init__(
        self,
        flow: BatchFlow,
        *,
        cost: NodeCost,
        sizes: Sizes,
        contention: Contention = NO_CONTENTION,
    ) -> None:
        self.sizes = sizes
        self._flow = flow
        self._cost = cost
        self._contention = contention
        self._pricing_nodes = PricingNodes(flow, sizes)
        self._prices: dict[tuple[fx.Node, int], Price] = {}
        self._concat_prices: KnownPrices = {}

        def role_of(node: fx.Node) -> Role:
            return ROLES[node_kind(node)]

        # A search asks for the same nodes in many segments.
        self._role = cache(role_of)
        self._is_read = cache(is_read)

    def full_batch_us(self, nodes: Sequence[fx.Node]) -> float:
        """Return the time of consecutive nodes on the full batch, in their order."""
        return self._simulate([self._work(_Key(node)) for node in nodes])

    def pipeline_us(
        self, segment: Segment, num_parts: int, *, defers_concats: bool = False
    ) -> float:
        """Return the time of a segment in microbatches, in the order of the pipeline.

        Args:
            segment: segment of the graph.
            num_parts: number of microbatches.
            defers_concats: whether concats behind the pipeline may overlap all-to-alls of other
                segments, as only backward reads their results. They are then free, as long as
                communication takes longer than all computation.
        """
        divided = {node for stage in segment.stages for node in stage}
        concats = ConcatCost(
            segment,
            num_parts,
            flow=self._flow,
            cost=self._cost,
            pricing_nodes=self._pricing_nodes,
            known=self._concat_prices,
        )
        works = [self._work(_Key(node)) for node in segment.before]
        for node, microbatch in segment.steps(num_parts):
            call = self._flow.calls[node]
            needs = [
                _Key(source, microbatch) for source in node.all_input_nodes if source in divided
            ]
            if isinstance(call, Division) and call.carry is not None and microbatch > 0:
                needs.append(_Key(node, microbatch - 1))
            key = _Key(node, microbatch)
            works.append(self._work(key, num_parts=num_parts, needs=needs))
            write = concats.write(node, microbatch)
            if write.device_us:  # 0 if Inductor's kernels compute right in the buffer
                works.append(_Work(_Key(node, microbatch, "write"), [key], write, "compute"))
        deferred = Price()
        for epilogue, node in segment.after:
            if epilogue != "concat":
                works.append(self._work(_Key(node)))
                continue
            price = concats.concat(node)
            if defers_concats:
                deferred += price
                price = Price()
            runs = [_Key(node, at) for at in range(num_parts)]
            writes = [_Key(node, at, "write") for at in range(num_parts)]
            role = "compute" if price.device_us else "free"
            works.append(_Work(_Key(node), runs + writes, price, role))
        compute_us = sum(work.price.device_us for work in works if work.role == "compute")
        issue_us = sum(work.price.host_us for work in works)
        # Deferred concats take no time as long as neither the device nor the host becomes busier
        # than the pipeline lasts.
        return max(
            self._simulate(works), compute_us + deferred.device_us, issue_us + deferred.host_us
        )

    def _simulate(self, works: Sequence[_Work]) -> float:
        position = {work.key: at for at, work in enumerate(works)}
        operations: list[Operation] = []
        for key, more, price, role in works:
            inputs = [_Key(source) for source in key.node.all_input_nodes]
            needs = {position[each] for each in (*inputs, *more) if each in position}
            operations.append(
                Operation(
                    name=f"{key.node.name}.{key.microbatch}.{key.what}",
                    role=role,
                    duration_us=price.device_us,
                    # Inputs that the epilogue computes come later: microbatches do not read them.
                    needs=tuple(sorted(at for at in needs if at < len(operations))),
                    host_us=price.host_us,
                    is_read=role == "compute" and self._is_read(key.node),
                )
            )
        return graph_time(operations, range(len(operations)), self._contention).makespan_us

    def _work(self, key: _Key, *, num_parts: int = 1, needs: Sequence[_Key] = ()) -> _Work:
        """Return the work of a node on the full batch, or on one of ``num_parts`` microbatches."""
        node, role = key.node, self._role(key.node)
        if (node, num_parts) not in self._prices:
            device_us = 0.0
            if role in ("compute", "start"):
                nodes = self._pricing_nodes
                copy = node if num_parts == 1 else nodes.of_microbatch(node, num_parts)
                device_us = self._cost(copy)
            issue_us = host_us(node, self._cost) if device_us else 0.0
            self._prices[node, num_parts] = Price(device_us, issue_us)
        return _Work(key, needs, self._prices[node, num_parts], role)
