"""Every token to every rank: what few ranks do where nearly all of them want it anyway.

With tensor parallelism, or with many experts a token on few ranks, an all-to-all sends a token to a
rank once for each of its experts there. An all-gather sends it once; each rank then takes what its
experts want and sends a sum of each token home.
"""

from typing import final

import torch
import torch.distributed as dist

from halley.core.routing import check_routing, expert_starts, sort_slots
from halley.core.sharding import check_tp_size
from halley.core.timeline import Recorder
from halley.core.types import DROPPED, Experts, LayerShape, Routing
from halley.cost.predict import Predictor
from halley.cost.simulate import Task
from halley.distributed.peers import Collective
from halley.distributed.ranks import place_in
from halley.ops.expert_forward import apply_experts
from halley.ops.gather import gather_rows_of_all, sum_at_home
from halley.ops.routed_rows import combine_rows, gather_rows
from halley.strategies.base import AbstractStrategy, check_inputs
from halley.strategies.lockstep import Lockstep
from halley.strategies.tasks import gathered_tasks


@final
class GatheredStrategy(AbstractStrategy):
    """All-gather, then experts, then sums home.

    Args:
        group: the ranks over which the experts are spread; None for a rank on its own.
        recorder: marks the parts and the time spent waiting.
        tp_size: neighbours in rank that share each expert, see ``core.sharding``.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, recorder: Recorder, tp_size: int = 1
    ) -> None:
        self.rank, self.num_ranks = place_in(group)
        check_tp_size(tp_size, num_ranks=self.num_ranks)
        self.group, self.tp_size = group, tp_size
        self.recorder = recorder
        self._lockstep = Lockstep("gathered", group=group, tp_size=tp_size)

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        num_local, num_tokens = experts.num_local_experts, x_TD.shape[0]
        num_experts = num_local * self.num_ranks // self.tp_size
        check_inputs(x_TD, experts)
        check_routing(routing, num_tokens=num_tokens, num_experts=num_experts)
        idx_TK, weights_TK = routing.topk_idx_TK, routing.topk_weights_TK
        # All of these are gathered as they are.
        self._lockstep.begin(
            x_TD,
            experts,
            top_k=idx_TK.shape[1],
            ids_dtype=idx_TK.dtype,
            weights_dtype=weights_TK.dtype,
        )

        with self.recorder.span("route.wait", stream="exposed"):
            most = self._most(num_tokens, x_TD.device)
        place = {"most": most, "group": self.group}
        with self.recorder.span("dispatch.wait", stream="exposed"):
            x_AD = gather_rows_of_all(x_TD, **place)
            weights_AK = gather_rows_of_all(weights_TK, **place)
            # Zeros behind a rank's tokens stand for no expert: ids are moved up by one for the way.
            idx_AK = gather_rows_of_all(idx_TK - DROPPED, **place) + DROPPED
        with self.recorder.span("route"):
            own_AK = idx_AK - self.rank // self.tp_size * num_local
            own_AK = torch.where((own_AK >= 0) & (own_AK < num_local), own_AK, DROPPED)
            own_AK = torch.where(idx_AK == DROPPED, DROPPED, own_AK)
            keys_N, slots_N = sort_slots(own_AK, num_local)
            ends_L = expert_starts(keys_N, num_local)[1:].int()
        with self.recorder.span("route.wait", stream="exposed"):
            num_rows = int(ends_L[-1])
        with self.recorder.span("experts"):
            x_RD = gather_rows(x_AD, slots_N, num_rows=num_rows, top_k=idx_TK.shape[1])
            y_RD = apply_experts(x_RD, experts, ends_L=ends_L)
            y_AD = combine_rows(y_RD, slots_N, weights_AK)
        with self.recorder.span("combine.wait", stream="exposed"):
            y_TD = sum_at_home(y_AD, num_rows=num_tokens, group=self.group)
        return self._lockstep.end(y_TD)

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        return gathered_tasks(shape, predictor)

    def _most(self, num_tokens: int, device: torch.device) -> int:
        """Return the most tokens of a rank."""
        if self.group is None:
            return num_tokens
        most = torch.tensor(num_tokens, device=device)
        with Collective("route", group=self.group):
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return int(most)
