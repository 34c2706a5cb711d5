"""Run routed experts across nodes: a token crosses the network once for each destination node.

The ranks form a mesh of nodes and local ranks. A rail is the group of ranks with the same local
rank, one in each node. A strategy over the ranks of one node runs the experts of the node; this
strategy sends tokens to the nodes of their experts, and returns the partial sums:

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

Backward runs the steps in reverse order: gradients of the sums leave first, gradients of the rows
return, and the weight gradients of all steps follow at the end. There are other orders, see
``part_orders.PIPELINES``: if a rank has few tokens for each expert, each step takes the time of
reading the weights, so own and received tokens should run together.

With nodes of one rank this sends each token once to each destination rank: the strategy
"deduplicated".
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import comb
from typing import final, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F

from halley.core.timeline import Recorder
from halley.core.types import DROPPED, Experts, LayerShape, Routing, Task, check_routing
from halley.core.validation import check_choice
from halley.cost.hardware import Predictor
from halley.distributed.nodes import Nodes
from halley.distributed.peers import all_gather_objects
from halley.ops.crossing import Crossing, FixedCrossing, NodeTables, plan_crossing
from halley.ops.wire import Wire, WireDtype
from halley.strategies.base import AbstractStrategy, Lockstep, PartRunner, check_inputs
from halley.strategies.part_orders import SPLIT, Pipeline, list_tasks


# Standard deviations of the tokens that cross: with few tokens, chance exceeds ``max_load``.
_MARGIN = 6.0


@final
class HierarchicalStrategy(AbstractStrategy):
    """Run routed experts across nodes; send each token at most once to each other node.

    Args:
        nodes: the ranks of ``group``, as nodes of equal size.
        inner: the strategy over ``nodes.local``, for the experts of one node.
        max_load: if not 0, messages have fixed sizes, so the host reads no counts and a CUDA graph
            can capture a layer. A message holds at most ``max_load`` times the tokens that cross
            with balanced routing, for the most tokens of any rank in the first call. A rank with
            more tokens in a later call raises a ``ValueError``, and a process ends if more tokens
            cross; other ranks then wait until their time limit.
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
        pipeline: Pipeline = SPLIT,
        max_load: float = 0.0,
        wire_dtype: WireDtype = "",
    ) -> None:
        check_choice(wire_dtype, get_args(WireDtype), name="wire_dtype")
        self.wire_dtype: WireDtype = wire_dtype
        self.group, self.nodes = group, nodes
        self.inner, self.recorder = inner, recorder
        self.pipeline, self.tp_size = pipeline, inner.tp_size
        self.max_load = max_load
        self._tables: dict[int, NodeTables] = {}  # by number of experts per node
        self._fixed: dict[tuple[object, ...], FixedCrossing] = {}  # by kind of layer
        self._lockstep = Lockstep("hierarchical", group=group, tp_size=self.tp_size)

    @property
    def gemm(self) -> str:
        # GEMMs of fewer tokens may round differently, so the bits depend on the pipeline.
        return f"{self.inner.gemm}, by node, {self.pipeline.name}"

    def find_problem(self, experts: Experts, *, top_k: int) -> str:
        return self.inner.find_problem(experts, top_k=min(top_k, self._count_experts(experts)))

    def release(self) -> None:
        self.inner.release()

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        if self.nodes.num_nodes == 1:
            return self.inner.tasks(shape, predictor)
        return list_tasks(
            shape, predictor, num_nodes=self.nodes.num_nodes, inner=self.inner.tasks,
            pipeline=self.pipeline, wire_dtype=self.wire_dtype,
        )  # fmt: skip

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

        if num_experts not in self._tables:
            made = NodeTables(nodes, num_experts=num_experts, device=x_TD.device)
            self._tables[num_experts] = made
        tables, num_tokens = self._tables[num_experts], x_TD.shape[0]
        if self.max_load:
            x_TD, routing, crossing = self._pad_tokens(x_TD, routing, tables)
        else:
            with recorder.span("route"):
                crossing = plan_crossing(
                    routing, tables, num_chunks=self.pipeline.num_chunks, group=self.group
                )
        wire = Wire(
            crossing,
            tables=tables,
            group=self.group,
            recorder=recorder,
            hidden_size=x_TD.shape[1],
            dtype=self.wire_dtype,
        )
        started = wire.send_rows(x_TD, routing)
        run, own = self.inner.open_parts(experts), tables.keep_own(routing)
        y_TD = _run_parts(self.pipeline, run, x_TD, own, wire=wire, started=started)
        return self._lockstep.end(y_TD[:num_tokens])

    def _pad_tokens(
        self, x_TD: torch.Tensor, routing: Routing, tables: NodeTables
    ) -> tuple[torch.Tensor, Routing, Crossing]:
        """Pad to the most tokens that any rank had in the first call, which is a collective."""
        idx_TK, weights_TK = routing.topk_idx_TK, routing.topk_weights_TK
        num_tokens = len(x_TD)
        kind = (x_TD.shape[1], x_TD.dtype, idx_TK.shape[1], tables.num_experts)
        if kind not in self._fixed:
            operation = "the first call with fixed sizes"
            most = max(all_gather_objects(num_tokens, group=self.group, operation=operation))
            self._fixed[kind] = FixedCrossing(
                tables,
                num_tokens=most,
                num_chunks=self.pipeline.num_chunks,
                limit=partial(self._limit_rows, tables=tables, top_k=idx_TK.shape[1]),
            )
        fixed = self._fixed[kind]
        most = fixed.num_tokens
        if num_tokens > most:
            raise ValueError(
                f"num_tokens ({num_tokens}) must be at most {most}, the largest number of the "
                "first call, with fixed sizes (max_load)"
            )
        if num_tokens < most:
            pad = (0, 0, 0, most - num_tokens)
            x_TD = F.pad(x_TD, pad)
            idx_TK, weights_TK = F.pad(idx_TK, pad, value=DROPPED), F.pad(weights_TK, pad)
        routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK)
        return x_TD, routing, fixed.plan(routing)

    def _limit_rows(self, num_tokens: int, *, tables: NodeTables, top_k: int) -> int:
        """Return the most tokens of a chunk that may cross to one other node."""
        here = tables.num_experts
        total = here * self.nodes.num_nodes
        share = 1 - comb(total - here, top_k) / comb(total, top_k)
        mean, deviation = num_tokens * share, math.sqrt(num_tokens * share * (1 - share))
        return min(num_tokens, math.ceil(max(self.max_load * mean, mean + _MARGIN * deviation)))

    def _count_experts(self, experts: Experts) -> int:
        return experts.num_local_experts * self.nodes.ranks_per_node // self.tp_size


def _run_parts(
    pipeline: Pipeline,
    run: PartRunner,
    x_TD: torch.Tensor,
    own: Routing,
    *,
    wire: Wire,
    started: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Run a pipeline's parts in order; return each token's sum over the experts of all nodes.

    ``own`` routes this rank's tokens within its node; ``started`` is from ``Wire.send_rows``.
    """
    num_tokens = x_TD.shape[0]
    ends = [round(num_tokens * end) for end in accumulate(part.own for part in pipeline.parts)]
    sizes = [end - begin for begin, end in pairwise([0, *ends])]
    split = [each.split(sizes) for each in (x_TD, own.topk_idx_TK, own.topk_weights_TK)]
    y_own: list[torch.Tensor] = []
    returned: list[torch.Tensor] = []
    for part, tokens in zip(pipeline.parts, zip(*split, strict=True), strict=True):
        rows = [tokens] if part.own else []
        if part.chunk is not None:
            x_RD, routing = wire.receive_rows(started[part.chunk], chunk=part.chunk)
            rows.append((x_RD, routing.topk_idx_TK, routing.topk_weights_TK))
        x, idx, weights = map(_concat, zip(*rows, strict=True))
        y = run(x, Routing(topk_idx_TK=idx, topk_weights_TK=weights))
        y_part, y_RD = y.split([len(tokens[0]), len(y) - len(tokens[0])])
        if part.own:
            y_own.append(y_part)
        if part.chunk is not None:
            returned.append(wire.return_sums(y_RD, chunk=part.chunk))
    return wire.add_returned(_concat(y_own), returned)


def _concat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
