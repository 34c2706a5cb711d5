"""Run experts between an all-gather of all tokens and a reduce-scatter of the outputs.

An all-to-all sends a token to a rank once for each of the token's experts there. An all-gather
sends each token to each rank once, which is less traffic if ranks share experts (tensor
parallelism), or if a token has several experts on each rank.
"""

from typing import final

import torch
import torch.distributed as dist

from halley.core.routing import expert_starts, sort_keys
from halley.core.timeline import Recorder
from halley.core.types import (
    DROPPED,
    Experts,
    LayerShape,
    Routing,
    Task,
    check_routing,
    check_tp_size,
    local_experts,
)
from halley.cost.hardware import Predictor
from halley.distributed.peers import Collective, rank_and_size
from halley.ops.exchange import all_gather_rows, reduce_scatter_rows
from halley.ops.expert_rows import apply_experts
from halley.ops.traceable_routing import combine_rows, gather_rows
from halley.strategies.base import (
    AbstractStrategy,
    Lockstep,
    check_inputs,
    comm_task,
    compute_task,
    experts_us,
)


@final
class AllGatherStrategy(AbstractStrategy):
    """All-gather the tokens, run the local experts, reduce-scatter their summed outputs."""

    def __init__(
        self, group: dist.ProcessGroup | None, *, recorder: Recorder, tp_size: int = 1
    ) -> None:
        self.rank, self.num_ranks = rank_and_size(group)
        check_tp_size(tp_size, num_ranks=self.num_ranks)
        self.group, self.tp_size, self.recorder = group, tp_size, recorder
        self._lockstep = Lockstep("all_gather", group=group, tp_size=tp_size)

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        num_local, num_tokens = experts.num_local_experts, x_TD.shape[0]
        num_experts = num_local * self.num_ranks // self.tp_size
        check_inputs(x_TD, experts)
        check_routing(routing, num_tokens=num_tokens, num_experts=num_experts)
        idx_TK, weights_TK = routing.topk_idx_TK, routing.topk_weights_TK
        self._lockstep.begin(
            x_TD,
            experts,
            top_k=idx_TK.shape[1],
            ids_dtype=idx_TK.dtype,
            weights_dtype=weights_TK.dtype,
        )

        with self.recorder.span("route.wait", stream="exposed"):
            max_rows = self._max_tokens(num_tokens, x_TD.device)
        with self.recorder.span("dispatch.wait", stream="exposed"):
            x_AD = all_gather_rows(x_TD, max_rows=max_rows, group=self.group)
            weights_AK = all_gather_rows(weights_TK, max_rows=max_rows, group=self.group)
            # The all-gather pads with 0, a valid expert id. So each rank sends id + 1. Subtracting
            # 1 turns the padding into DROPPED (-1).
            idx_AK = all_gather_rows(idx_TK - DROPPED, max_rows=max_rows, group=self.group)
            idx_AK = idx_AK + DROPPED
        with self.recorder.span("route"):
            # Compute local expert ids, and mark the slots of other ranks' experts as dropped.
            own_AK = idx_AK - self.rank // self.tp_size * num_local
            own_AK = torch.where((own_AK >= 0) & (own_AK < num_local), own_AK, DROPPED)
            own_AK = torch.where(idx_AK == DROPPED, DROPPED, own_AK)
            keys_N, slots_N = sort_keys(own_AK, num_local)
            ends_L = expert_starts(keys_N, num_local)[1:].int()
        with self.recorder.span("route.wait", stream="exposed"):
            num_rows = int(ends_L[-1])
        with self.recorder.span("experts"):
            x_RD = gather_rows(x_AD, slots_N, num_rows, idx_TK.shape[1])
            y_RD = apply_experts(x_RD, experts, ends_L=ends_L)
            y_AD = combine_rows(y_RD, slots_N, weights_AK)
        with self.recorder.span("combine.wait", stream="exposed"):
            y_TD = reduce_scatter_rows(y_AD, num_rows=num_tokens, group=self.group)
        return self._lockstep.end(y_TD)

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        return all_gather_tasks(shape, predictor)

    def _max_tokens(self, num_tokens: int, device: torch.device) -> int:
        if self.group is None:
            return num_tokens
        largest = torch.tensor(num_tokens, device=device)
        with Collective("route", group=self.group):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return int(largest)


def all_gather_tasks(shape: LayerShape, predictor: Predictor) -> list[Task]:
    """Return simulator tasks of ``AllGatherStrategy``; its traffic does not depend on routing."""
    rows, hidden_bytes = shape.num_tokens * shape.top_k, shape.hidden_size * shape.itemsize
    crossings = shape.num_tokens * (shape.ep_size - 1)
    link_us = predictor.all_to_all_us(crossings * hidden_bytes)
    route_us = predictor.memory_us(16.0 * rows * shape.ep_size, num_ops=12)
    num_local = local_experts(shape.num_experts, ep_size=shape.ep_size)
    forward_us, backward_us = experts_us(shape, predictor, num_rows=rows, num_groups=num_local)
    # The sum reads the slots of all ranks' tokens, also slots that have no row on this rank.
    sum_us = predictor.memory_us(2.0 * rows * shape.ep_size * hidden_bytes, num_ops=2)
    return [
        comm_task("dispatch", link_us, needs=""),
        compute_task("route", route_us, needs=("dispatch",)),
        compute_task("experts", forward_us + sum_us, needs=("route",)),
        comm_task("combine", link_us, needs="experts"),
        comm_task("combine.backward", link_us, needs="combine"),
        compute_task("experts.backward", backward_us + sum_us, needs=("combine.backward",)),
        comm_task("dispatch.backward", link_us, needs="experts.backward"),
    ]
