"""Halley's sequential strategy in operations that torch.compile traces into one graph.

The strategies that Halley trains with read splits on the host with numpy, which breaks a graph in
two at each layer. This one is what a model that is compiled as a whole does instead: counts travel
by a collective of the graph, and splits are sizes that the graph reads from them.
"""

from typing import final

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F

from halley.core.reference import activate
from halley.core.types import DROPPED, Experts, LayerShape, Routing
from halley.cost.predict import Predictor
from halley.cost.simulate import Task
from halley.strategies.base import AbstractStrategy
from halley.strategies.sketch import pipeline_tasks


@final
class FunctionalStrategy(AbstractStrategy):
    """Dispatch, experts, combine, as functional collectives with data-dependent splits."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ep_size = dist.get_world_size(group)

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        num_local, top_k = experts.num_local_experts, routing.topk_idx_TK.shape[1]
        num_experts = num_local * self.ep_size
        idx_N = routing.topk_idx_TK.flatten()
        keys_N = torch.where(idx_N == DROPPED, num_experts, idx_N)  # dropped slots sort last
        slots_N = keys_N.argsort(stable=True)
        counts_E = F.one_hot(keys_N, num_experts + 1).sum(dim=0)[:-1]

        counts_WL = self._exchange(counts_E.view(self.ep_size, num_local))
        send_splits = counts_E.view(self.ep_size, num_local).sum(dim=1).tolist()
        recv_splits = counts_WL.sum(dim=1).tolist()
        for split in (*send_splits, *recv_splits):
            torch._check(split >= 0)
        num_sent, num_received = sum(send_splits), sum(recv_splits)
        torch._check(num_sent <= idx_N.shape[0])

        sent_N = slots_N[:num_sent]
        arrived_RD = fc.all_to_all_single_autograd(
            x_TD[sent_N // top_k], recv_splits, send_splits, self.group
        )
        arrived_RD = fc.wait_tensor(arrived_RD)
        y_RD = _apply_experts(arrived_RD, experts, _expert_of_row(counts_WL, num_received))
        back_ND = fc.all_to_all_single_autograd(y_RD, send_splits, recv_splits, self.group)
        back_ND = fc.wait_tensor(back_ND)

        weights_N = routing.topk_weights_TK.flatten()[sent_N]
        out_TD = torch.zeros_like(x_TD)
        return out_TD.index_add(0, sent_N // top_k, back_ND * weights_N[:, None])

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        return pipeline_tasks(shape, predictor, num_chunks=1)

    def _exchange(self, counts_WL: torch.Tensor) -> torch.Tensor:
        return fc.wait_tensor(fc.all_to_all_single(counts_WL, None, None, self.group))


def _expert_of_row(counts_WL: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the local expert of each row, rows sorted by source rank, then by expert."""
    expert_WL = torch.arange(counts_WL.shape[1]).expand_as(counts_WL)
    return expert_WL.flatten().repeat_interleave(counts_WL.flatten(), output_size=num_rows)


def _apply_experts(x_RD: torch.Tensor, experts: Experts, expert_R: torch.Tensor) -> torch.Tensor:
    """Return each row's expert output; every expert multiplies all rows, those of others as zeros.

    Batched GEMMs, because torch traces its grouped GEMM in bfloat16 only. Zeros stay zeros, so the
    sum over experts is exact.
    """
    mine_LR = torch.arange(experts.num_local_experts)[:, None] == expert_R
    rows_LRD = x_RD * mine_LR[:, :, None].to(x_RD.dtype)
    h_LRF = activate(torch.bmm(rows_LRD, experts.up_LGD.transpose(1, 2)), experts.activation)
    return torch.bmm(h_LRF, experts.down_LDF.transpose(1, 2)).sum(dim=0)
