"""Run routed experts across nodes: a token crosses the network once for each destination node.

The ranks form a mesh of nodes and local ranks. A rail is the group of ranks with the same local
rank, one in each node. A strategy over the ranks of one node runs the experts of the node; this
strategy brings the tokens of other nodes to it, and their partial sums back:

    node 0, local rank r                         node 1, local rank r
    1. send each token that has an expert in     1. the same
       another node to rank r of that node  ---->
    2. run the first half of the own tokens      2. the same, while the rows are on the network
       on the experts of node 0
    3. wait for the rows of node 1 and run       3. the same
       them on the experts of node 0
    4. return one partial sum for each row  ---->
    5. run the other half of the own tokens      5. the same, while the sums are on the network
    6. add own and returned sums, in order of node

A token with 8 experts in another node crosses once instead of 8 times. Backward runs the steps in
reverse order: gradients of the sums leave first, gradients of the rows return, and each crossing
has one half of the own tokens beside it.

With nodes of one rank this sends each token once to each destination rank: the strategy
"deduplicated".
"""

from dataclasses import replace
from typing import final, get_args

import torch
import torch.distributed as dist

from halley.core.field_types import check_choice
from halley.core.routing import check_routing
from halley.core.timeline import Recorder
from halley.core.types import Experts, LayerShape, Routing
from halley.cost.hardware import Predictor
from halley.cost.simulate import Task
from halley.distributed.nodes import Nodes
from halley.ops.crossing import (
    Wire,
    WireDtype,
    add_returned,
    keep_node,
    plan_crossing,
    receive_rows,
    send_rows,
)
from halley.strategies.base import (
    AbstractStrategy,
    Lockstep,
    check_inputs,
    comm_task,
    share_of_tokens,
)


@final
class HierarchicalStrategy(AbstractStrategy):
    """Strategy that sends each token once to each node that holds one of its experts.

    Args:
        group: the ranks over which the experts are spread; None for a single rank.
        nodes: the same ranks as nodes of equal size.
        inner: the strategy over ``nodes.local``, for the experts of one node.
        recorder: takes a span for each step and for the host's waits.
        wire_dtype: "float8" sends the tokens of forward between nodes in 8 bits, which costs
            accuracy; "" sends them as they are. Sums and gradients always cross as they are.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        nodes: Nodes,
        inner: AbstractStrategy,
        recorder: Recorder,
        wire_dtype: WireDtype = "",
    ) -> None:
        check_choice(wire_dtype, get_args(WireDtype), name="wire_dtype")
        self.wire_dtype: WireDtype = wire_dtype
        self.group, self.nodes = group, nodes
        self.inner, self.recorder = inner, recorder
        self.tp_size = inner.tp_size
        self._lockstep = Lockstep("hierarchical", group=group, tp_size=self.tp_size)

    @property
    def gemm(self) -> str:
        # GEMMs of half a batch may round differently, so the bits are not those of the inner one.
        return f"{self.inner.gemm}, by node"

    def find_problem(self, experts: Experts, *, top_k: int) -> str:
        return self.inner.find_problem(experts, top_k=min(top_k, self._count_experts(experts)))

    def release(self) -> None:
        self.inner.release()

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        return _list_tasks(shape, predictor, nodes=self.nodes, inner=self.inner)

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        nodes, recorder = self.nodes, self.recorder
        check_inputs(x_TD, experts)
        num_experts = self._count_experts(experts)
        check_routing(routing, num_tokens=x_TD.shape[0], num_experts=num_experts * nodes.num_nodes)
        top_k = routing.topk_idx_TK.shape[1]
        self._lockstep.begin(  # top_k and wire_dtype decide the size of a message
            x_TD, experts, top_k=top_k, wire_dtype=self.wire_dtype, num_nodes=nodes.num_nodes
        )
        if self.group is None or nodes.num_nodes == 1:
            return self._lockstep.end(self.inner.forward(x_TD, routing, experts))

        with recorder.span("route"):
            crossing = plan_crossing(
                routing, nodes=nodes, num_experts=num_experts, group=self.group
            )
        dispatch, combine = crossing.exchanges(nodes, group=self.group, recorder=recorder)
        wire = Wire(
            crossing, dispatch, hidden_size=x_TD.shape[1], top_k=top_k, dtype=self.wire_dtype
        )
        started = send_rows(x_TD, routing, wire=wire)

        own = keep_node(routing, node=nodes.node, num_experts=num_experts)
        half = (x_TD.shape[0] + 1) // 2
        y_first = self.inner.forward(x_TD[:half], _slice(own, 0, half), experts)
        x_RD, received = receive_rows(started, wire=wire)
        returned = combine.start(self.inner.forward(x_RD, received, experts))
        y_second = self.inner.forward(x_TD[half:], _slice(own, half, x_TD.shape[0]), experts)
        y_own_TD = torch.cat([y_first, y_second])
        y_TD = add_returned(y_own_TD, combine.wait(returned), crossing=crossing)
        return self._lockstep.end(y_TD)

    def _count_experts(self, experts: Experts) -> int:
        """Return the number of experts of a node."""
        return experts.num_local_experts * self.nodes.ranks_per_node // self.tp_size


def _list_tasks(
    shape: LayerShape, predictor: Predictor, *, nodes: Nodes, inner: AbstractStrategy
) -> list[Task]:
    """Return the tasks of a layer with balanced routing.

    The inner strategy's tasks occur three times: for both halves of the own tokens and for the
    received ones. Their durations are shares of those of one call with all rows of this rank.
    """
    per_node = shape.num_experts // nodes.num_nodes
    whole = replace(
        shape,
        num_experts=per_node,
        top_k=min(shape.top_k, per_node),
        ep_size=nodes.ranks_per_node,
    )
    tasks = inner.tasks(whole, predictor)
    first = next((i for i, task in enumerate(tasks) if "backward" in task.name), len(tasks))
    forward, backward = tasks[:first], tasks[first:]
    if nodes.num_nodes == 1:
        return tasks
    reach = share_of_tokens(shape, num_experts=per_node)
    crossings = shape.num_tokens * (nodes.num_nodes - 1) * reach
    crossing_us = predictor.all_to_all_us(crossings * shape.hidden_size * shape.itemsize)
    route_us = predictor.memory_us(16.0 * shape.num_tokens * shape.top_k, num_ops=8)
    route_us += predictor.hardware.link_latency_us + predictor.hardware.read_us
    listed = [Task(name="route", stream="compute", duration_us=route_us)]
    half = 0.5 / nodes.num_nodes
    for direction, part in (("", forward), (".backward", backward)):
        sent = f"rail.dispatch{direction}"
        returned = f"rail.combine{direction}"
        listed.append(comm_task(sent, crossing_us, needs=listed[-1].name))
        listed += _scale(part, half, suffix="own.0", needs=listed[-2].name)
        listed += _scale(part, 1.0 - 2 * half, suffix="received", needs=sent)
        listed.append(comm_task(returned, crossing_us, needs=listed[-1].name))
        listed += _scale(part, half, suffix="own.1", needs=listed[-2].name)
        add_us = predictor.memory_us(2.0 * crossings * shape.hidden_size * shape.itemsize)
        needs = (returned, listed[-1].name)
        add = Task(name=f"add{direction}", stream="compute", duration_us=add_us, needs=needs)
        listed.append(add)
    return listed


def _scale(tasks: list[Task], share: float, *, suffix: str, needs: str) -> list[Task]:
    """Return copies of tasks with a share of their durations, behind the task ``needs``."""
    names = {task.name for task in tasks}
    return [
        replace(
            task,
            name=f"{task.name}.{suffix}",
            duration_us=task.duration_us * share,
            needs=tuple(f"{need}.{suffix}" for need in task.needs if need in names) or (needs,),
        )
        for task in tasks
    ]


def _slice(routing: Routing, begin: int, end: int) -> Routing:
    return Routing(
        topk_idx_TK=routing.topk_idx_TK[begin:end],
        topk_weights_TK=routing.topk_weights_TK[begin:end],
    )
