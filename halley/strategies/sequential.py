"""What a torch user writes: sort, all-to-all, grouped GEMMs, all-to-all, sum, one after another.

The baseline that every other strategy is measured against.
"""

from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist
import torch.nn.functional as F

from halley.core.routing import check_routing, plan_dispatch, sort_slots
from halley.core.sharding import check_tp_size, route_to_shards
from halley.core.timeline import Recorder
from halley.core.types import Experts, LayerShape, Routing
from halley.cost.predict import Predictor
from halley.cost.simulate import Task
from halley.distributed.ranks import place_in
from halley.ops.exchange import Exchange
from halley.ops.expert_forward import apply_experts
from halley.ops.permute import Permutation, combine_tokens, gather_tokens, permute_rows
from halley.strategies.base import AbstractStrategy, check_inputs
from halley.strategies.lockstep import Lockstep
from halley.strategies.table import RoutingTable, arrival_order
from halley.strategies.tasks import pipeline_tasks


@final
class SequentialStrategy(AbstractStrategy):
    """Dispatch, then experts, then combine.

    Args:
        group: the ranks over which the experts are spread; None for a rank on its own.
        recorder: marks the parts and the time spent waiting.
        tp_size: neighbours in rank that share each expert, see ``core.sharding``.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, recorder: Recorder, tp_size: int = 1
    ) -> None:
        check_tp_size(tp_size, num_ranks=place_in(group)[1])
        self.group, self.tp_size = group, tp_size
        self.recorder = recorder
        self._lockstep = Lockstep("sequential", group=group, tp_size=tp_size)

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        check_inputs(x_TD, experts)
        self._lockstep.begin(x_TD, experts)
        num_local = experts.num_local_experts
        routing = route_to_shards(routing, num_local=num_local, tp_size=self.tp_size)

        def multiply(x_RD: torch.Tensor, ends_L: torch.Tensor) -> torch.Tensor:
            return apply_experts(x_RD, experts, ends_L=ends_L)

        y_TD = run_in_turn(
            x_TD,
            routing,
            multiply,
            num_local=num_local,
            group=self.group,
            recorder=self.recorder,
        )
        return self._lockstep.end(y_TD)

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        return pipeline_tasks(shape, predictor, num_chunks=1)


def run_in_turn(
    x_TD: torch.Tensor,
    routing: Routing,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    num_local: int,
    group: dist.ProcessGroup | None,
    recorder: Recorder,
) -> torch.Tensor:
    """Dispatch, have the rows that arrive multiplied, combine; return the sums, ``(T, D)``.

    Args:
        x_TD: tokens of this rank.
        routing: global expert ids and weights of each token.
        multiply: from rows sorted by local expert, ``(R, D)``, and where each expert's rows end,
            ``(L,)`` int32, to the rows' outputs, ``(R, D)``.
        num_local: L, the same on all ranks.
        group: the ranks over which the experts are spread; None for a rank on its own.
        recorder: marks the parts and the time spent waiting.

    Raises:
        ValueError: the routing does not fit the tokens or the experts.
    """
    rank = 0 if group is None else dist.get_rank(group)
    num_experts = num_local * (1 if group is None else dist.get_world_size(group))
    check_routing(routing, num_tokens=x_TD.shape[0], num_experts=num_experts)
    idx_TK, weights_TK = routing.topk_idx_TK, routing.topk_weights_TK

    with recorder.span("route"):
        keys_N, slots_N = sort_slots(idx_TK, num_experts)
        table = RoutingTable(keys_N, num_experts=num_experts, group=group)
        slots = Permutation(slots_N)
        rows_ND = gather_tokens(x_TD, slots, top_k=idx_TK.shape[1])
    with recorder.span("route.wait", stream="exposed"):
        starts_WE1 = table.read()
    (plan,) = plan_dispatch(starts_WE1, rank)
    num_dropped = idx_TK.numel() - plan.num_send  # they come last
    sent_ND = rows_ND[: plan.num_send] if num_dropped else rows_ND

    def exchange(send_splits: list[int], recv_splits: list[int], name: str) -> Exchange:
        return Exchange(
            send_splits=send_splits,
            recv_splits=recv_splits,
            group=group,
            name=name,
            recorder=recorder,
        )

    arrived_RD = exchange(plan.send_splits, plan.recv_splits, "dispatch").run(sent_ND)
    order, ends_L = arrival_order(plan, device=x_TD.device)
    with recorder.span("experts"):
        x_RD = permute_rows(arrived_RD, order)
        y_RD = permute_rows(multiply(x_RD, ends_L), order.inverted())
    back_ND = exchange(plan.recv_splits, plan.send_splits, "combine").run(y_RD)

    with recorder.span("restore"):
        if num_dropped:
            back_ND = F.pad(back_ND, (0, 0, 0, num_dropped))
        return combine_tokens(back_ND, weights_TK, slots)
