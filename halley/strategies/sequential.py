"""What a torch user writes: sort, all-to-all, grouped GEMMs, all-to-all, sum, one after another.

The baseline that every other strategy is measured against.
"""

from typing import final

import torch
import torch.distributed as dist
import torch.nn.functional as F

from halley.core.routing import check_routing, plan_dispatch, sort_slots
from halley.core.timeline import Recorder
from halley.core.types import Experts, LayerShape, Routing
from halley.cost.predict import Predictor
from halley.cost.simulate import Task
from halley.ops.exchange import Exchange
from halley.ops.experts import apply_experts
from halley.ops.permute import Permutation, combine_tokens, gather_tokens, permute_rows
from halley.strategies.base import AbstractStrategy, check_inputs
from halley.strategies.sketch import pipeline_tasks
from halley.strategies.table import RoutingTable, arrival_order


@final
class SequentialStrategy(AbstractStrategy):
    """Dispatch, then experts, then combine.

    Args:
        group: the ranks over which the experts are spread; None for a rank on its own.
        recorder: marks the parts and the time spent waiting.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, recorder: Recorder) -> None:
        self.group = group
        self.recorder = recorder
        self.rank = 0 if group is None else dist.get_rank(group)
        self.ep_size = 1 if group is None else dist.get_world_size(group)

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        num_experts = experts.num_local_experts * self.ep_size
        check_inputs(x_TD, experts)
        check_routing(routing, num_tokens=x_TD.shape[0], num_experts=num_experts)
        idx_TK, weights_TK = routing.topk_idx_TK, routing.topk_weights_TK

        with self.recorder.span("route"):
            keys_N, slots_N = sort_slots(idx_TK, num_experts)
            table = RoutingTable(keys_N, num_experts=num_experts, group=self.group)
            slots = Permutation(slots_N)
            rows_ND = gather_tokens(x_TD, slots, top_k=idx_TK.shape[1])
        with self.recorder.span("route.wait", stream="exposed"):
            starts_WE1 = table.read()
        (plan,) = plan_dispatch(starts_WE1, self.rank)
        num_dropped = idx_TK.numel() - plan.num_send  # they come last
        sent_ND = rows_ND[: plan.num_send] if num_dropped else rows_ND

        arrived_RD = self._exchange(plan.send_splits, plan.recv_splits, "dispatch").run(sent_ND)
        order, ends_L = arrival_order(plan, device=x_TD.device)
        with self.recorder.span("experts"):
            x_RD = permute_rows(arrived_RD, order)
            y_RD = apply_experts(x_RD, experts, ends_L=ends_L)
            y_RD = permute_rows(y_RD, order.inverted())
        back_ND = self._exchange(plan.recv_splits, plan.send_splits, "combine").run(y_RD)

        with self.recorder.span("restore"):
            if num_dropped:
                back_ND = F.pad(back_ND, (0, 0, 0, num_dropped))
            return combine_tokens(back_ND, weights_TK, slots)

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        return pipeline_tasks(shape, predictor, num_chunks=1)

    def _exchange(self, send_splits: list[int], recv_splits: list[int], name: str) -> Exchange:
        return Exchange(
            send_splits=send_splits,
            recv_splits=recv_splits,
            group=self.group,
            name=name,
            recorder=self.recorder,
        )
