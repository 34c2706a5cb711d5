"""The same steps as sequential in n chunks: one chunk communicates while another computes.

A chunk is a range of each rank's local experts, not of its tokens: every expert's rows stay
together, so weights are read once, weight gradients are not added over chunks, and the result is
that of sequential bit for bit. Peers that chunk tokens (Tutel, FasterMoE) read all weights in
every chunk.
"""

from typing import final

import numpy as np
import torch
import torch.distributed as dist

from halley.core.routing import (
    check_routing,
    local_experts,
    order_by_chunk,
    plan_dispatch,
    sort_slots,
)
from halley.core.sharding import check_tp_size, route_to_shards
from halley.core.timeline import Recorder
from halley.core.types import DispatchPlan, Experts, LayerShape, Routing
from halley.cost.predict import Predictor
from halley.cost.simulate import Task, makespan_us
from halley.distributed.ranks import place_in
from halley.ops.exchange import Exchange, join_rows
from halley.ops.expert_forward import apply_experts
from halley.ops.permute import Permutation, combine_tokens, gather_tokens, permute_rows
from halley.strategies.base import AbstractStrategy, check_inputs
from halley.strategies.lockstep import Lockstep
from halley.strategies.table import RoutingTable, arrival_order
from halley.strategies.tasks import pipeline_tasks


_CANDIDATES = (1, 2, 3, 4, 6, 8)


@final
class ChunkedStrategy(AbstractStrategy):
    """A pipeline over ranges of local experts, forward and, mirrored, backward.

    Args:
        group: the ranks over which the experts are spread; None for a rank on its own.
        recorder: marks the parts and the time spent waiting.
        predictor: chooses the number of chunks where none is given; the same on all ranks.
        tp_size: neighbours in rank that share each expert, see ``core.sharding``.
        num_chunks: number of chunks, at most the number of local experts; 0 lets the cost model
            choose for the average number of tokens a rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        recorder: Recorder,
        predictor: Predictor,
        tp_size: int = 1,
        num_chunks: int = 0,
    ) -> None:
        self.rank, self.ep_size = place_in(group)
        check_tp_size(tp_size, num_ranks=self.ep_size)
        self.group, self.tp_size = group, tp_size
        self.recorder = recorder
        self.predictor = predictor
        self.num_chunks = num_chunks
        self._lockstep = Lockstep("chunked", group=group, tp_size=tp_size)
        self._chosen: dict[LayerShape, int] = {}

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        num_local = experts.num_local_experts
        num_experts = num_local * self.ep_size
        routing = route_to_shards(routing, num_local=num_local, tp_size=self.tp_size)
        check_inputs(x_TD, experts)
        self._compare(x_TD, routing, experts)
        check_routing(routing, num_tokens=x_TD.shape[0], num_experts=num_experts)
        idx_TK, weights_TK = routing.topk_idx_TK, routing.topk_weights_TK

        with self.recorder.span("route"):
            keys_N, slots_N = sort_slots(idx_TK, num_experts)
            table = RoutingTable(keys_N, num_experts=num_experts, group=self.group)
        with self.recorder.span("route.wait", stream="exposed"):
            starts_WE1 = table.read()
        with self.recorder.span("route"):
            num_chunks = self.num_chunks or self._choose(starts_WE1, idx_TK.shape[1], experts)
            plans = plan_dispatch(starts_WE1, self.rank, num_chunks=num_chunks)
            if num_chunks > 1:
                slots_N = order_by_chunk(
                    slots_N, starts_WE1[self.rank], ep_size=self.ep_size, num_chunks=num_chunks
                )
            slots = Permutation(slots_N)
            rows_ND = gather_tokens(x_TD, slots, top_k=idx_TK.shape[1])

        back_ND = torch.empty_like(rows_ND)
        dropped_ND = back_ND[sum(plan.num_send for plan in plans) :].zero_()  # they come last
        parts = self._run_pipeline(plans, rows_ND, experts, back_ND=back_ND)
        with self.recorder.span("restore"):
            parts.append(dropped_ND)
            # A rank on its own exchanges nothing, so nothing has been put into the buffer.
            back_ND = torch.cat(parts) if self.group is None else join_rows(back_ND, parts)
            return self._lockstep.end(combine_tokens(back_ND, weights_TK, slots))

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        num_chunks = self.num_chunks or choose_num_chunks(shape, predictor)
        return pipeline_tasks(shape, predictor, num_chunks=num_chunks)

    def _compare(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> None:
        """Compare with the other ranks what the number of chunks depends on."""
        values: dict[str, object] = {"num_chunks": self.num_chunks}
        if self.num_chunks == 0:
            values |= {
                "intermediate_size": experts.down_LDF.shape[2],
                "top_k": routing.topk_idx_TK.shape[1] // self.tp_size,
                "activation": experts.activation,
            }
        self._lockstep.begin(x_TD, experts, **values)

    def _run_pipeline(
        self,
        plans: list[DispatchPlan],
        rows_ND: torch.Tensor,
        experts: Experts,
        *,
        back_ND: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Return the rows that come back, chunk by chunk, as slices of ``back_ND``.

        All dispatches are issued first: they queue up on the wire before any combine, so the next
        chunk's rows are never behind rows that nobody waits for yet.
        """
        sizes = [plan.num_send for plan in plans]
        rest = rows_ND.shape[0] - sum(sizes)
        dispatches = [self._exchange(plan, "dispatch") for plan in plans]
        combines = [
            self._exchange(plan, "combine", received=part)
            for plan, part in zip(plans, back_ND.split([*sizes, rest]), strict=False)
        ]
        ranges = experts.split([plan.num_local for plan in plans])
        sent = rows_ND.split([*sizes, rest])
        arriving = [d.start(rows) for d, rows in zip(dispatches, sent, strict=False)]
        returning: list[torch.Tensor] = []
        for c, plan in enumerate(plans):
            order, ends_L = arrival_order(plan, device=rows_ND.device)
            arrived_RD = dispatches[c].wait(arriving[c])
            with self.recorder.span("experts"):
                x_RD = permute_rows(arrived_RD, order)
                y_RD = apply_experts(x_RD, ranges[c], ends_L=ends_L)
                y_RD = permute_rows(y_RD, order.inverted())
            returning.append(combines[c].start(y_RD))
        return [combines[c].wait(rows) for c, rows in enumerate(returning)]

    def _exchange(
        self, plan: DispatchPlan, name: str, *, received: torch.Tensor | None = None
    ) -> Exchange:
        there, back = plan.send_splits, plan.recv_splits
        if name == "combine":
            there, back = back, there
        return Exchange(
            send_splits=there,
            recv_splits=back,
            group=self.group,
            name=name,
            recorder=self.recorder,
            received=received,
        )

    def _choose(self, starts_WE1: np.ndarray, top_k: int, experts: Experts) -> int:
        """Choose from what all ranks know, so that all choose alike."""
        rows = int(starts_WE1[:, -1].sum()) // (self.ep_size * top_k)
        shape = LayerShape(
            num_tokens=1 << max(rows - 1, 0).bit_length(),  # few sizes: each is simulated once
            hidden_size=experts.down_LDF.shape[1],
            intermediate_size=experts.down_LDF.shape[2],
            num_experts=starts_WE1.shape[1] - 1,
            top_k=top_k,
            ep_size=self.ep_size,
            itemsize=experts.down_LDF.itemsize,
            activation=experts.activation,
        )
        if shape not in self._chosen:
            self._chosen[shape] = choose_num_chunks(shape, self.predictor)
        return self._chosen[shape]


def choose_num_chunks(shape: LayerShape, predictor: Predictor) -> int:
    """Return the number of chunks with the shortest simulated forward and backward pass."""
    num_local = local_experts(shape.num_experts, ep_size=shape.ep_size)
    candidates = [n for n in _CANDIDATES if n <= num_local]
    return min(
        candidates, key=lambda n: makespan_us(pipeline_tasks(shape, predictor, num_chunks=n))
    )
