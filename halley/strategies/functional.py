"""The sequential strategy in operators that torch.compile traces into one graph, for its passes.

The other strategies read splits with numpy, which breaks a graph in two at each layer. Here counts
travel by a collective of the graph, and splits are sizes that the graph reads from them. A rank
on its own has no splits to read (``run_alone``).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

from halley.core.reference import activate
from halley.core.routing import check_routing
from halley.core.sharding import check_tp_size, route_to_shards
from halley.core.types import Experts, LayerShape, Routing
from halley.cost.predict import Predictor
from halley.cost.simulate import Task
from halley.distributed.peers import Collective
from halley.distributed.ranks import place_in
from halley.ops.expert_forward import check_alignment
from halley.ops.expert_gemm import expert_gemm
from halley.ops.routed_rows import (
    combine_rows,
    gather_rows,
    group_rows,
    permute_rows,
    read_counts,
    sort_slots,
)
from halley.strategies.base import AbstractStrategy, check_inputs, under_autocast
from halley.strategies.lockstep import Lockstep
from halley.strategies.tasks import pipeline_tasks


@final
class FunctionalStrategy(AbstractStrategy):
    """Dispatch, then experts, then combine, by functional collectives with data-dependent splits.

    A model that is compiled sets ``torch._dynamo.config.capture_scalar_outputs``.

    Args:
        group: the ranks over which the experts are spread; None for a rank on its own.
        tp_size: neighbours in rank that share each expert, see ``core.sharding``.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, tp_size: int = 1) -> None:
        self.ep_size = place_in(group)[1]
        check_tp_size(tp_size, num_ranks=self.ep_size)
        self.group, self.tp_size = group, tp_size
        self._lockstep = Lockstep("functional", group=group, tp_size=tp_size)

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        num_local = experts.num_local_experts
        num_experts = num_local * self.ep_size
        routing = route_to_shards(routing, num_local=num_local, tp_size=self.tp_size)
        check_inputs(x_TD, experts)
        check_routing(routing, num_tokens=x_TD.shape[0], num_experts=num_experts)
        if experts.up_bias_LG is not None or experts.down_bias_LD is not None:
            raise ValueError("expert_bias (true) must be false for the functional strategy")
        self._lockstep.begin(x_TD, experts)
        idx_TK, weights_TK = routing.topk_idx_TK, routing.topk_weights_TK

        slots_N, counts_E = sort_slots(idx_TK, num_experts=num_experts)
        sent_WL = counts_E.view(self.ep_size, num_local)
        arrived_WL = self._exchange_counts(sent_WL)
        send_splits, recv_splits = _read_splits(sent_WL, arrived_WL)

        rows_ND = gather_rows(x_TD, slots_N, num_rows=sum(send_splits), top_k=idx_TK.shape[1])
        arrived_RD = self._exchange("dispatch", rows_ND, send_splits, recv_splits)
        grouped = group_rows(arrived_WL, num_rows=sum(recv_splits))
        x_RD = permute_rows(arrived_RD, grouped.order_R, grouped.inverse_R)
        y_RD = _apply_experts(x_RD, experts, grouped.ends_L)
        y_RD = permute_rows(y_RD, grouped.inverse_R, grouped.order_R)
        back_ND = self._exchange("combine", y_RD, recv_splits, send_splits)
        return self._lockstep.end(combine_rows(back_ND, slots_N, weights_TK))

    def find_problem(self, experts: Experts, *, top_k: int) -> str:
        return "experts have biases" if experts.up_bias_LG is not None else ""

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        return pipeline_tasks(shape, predictor, num_chunks=1)

    def _exchange_counts(self, counts_WL: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return counts_WL
        with _named("route", self.group):
            return fc.wait_tensor(fc.all_to_all_single(counts_WL, None, None, self.group))

    def _exchange(
        self, name: str, rows_ND: torch.Tensor, send_splits: list[int], recv_splits: list[int]
    ) -> torch.Tensor:
        if self.group is None:
            return rows_ND
        with _named(name, self.group):
            arrived_RD = fc.all_to_all_single_autograd(
                rows_ND, recv_splits, send_splits, self.group
            )
            return fc.wait_tensor(arrived_RD)


def _named(operation: str, group: dist.ProcessGroup) -> AbstractContextManager[object]:
    """Return the context that names the operation and the ranks in errors; none in a graph."""
    return nullcontext() if torch.compiler.is_compiling() else Collective(operation, group=group)


def _read_splits(sent_WL: torch.Tensor, arrived_WL: torch.Tensor) -> tuple[list[int], list[int]]:
    sent_W, arrived_W = read_counts(sent_WL, arrived_WL)
    splits = sent_W.tolist(), arrived_W.tolist()
    for split in (*splits[0], *splits[1]):
        torch._check(split >= 0)
    return splits


def _apply_experts(x_RD: torch.Tensor, experts: Experts, ends_L: torch.Tensor) -> torch.Tensor:
    h_RG = expert_gemm(x_RD, experts.up_LGD.transpose(1, 2), ends_L)
    h_RF = activate(h_RG, experts.activation)
    return expert_gemm(h_RF, experts.down_LDF.transpose(1, 2), ends_L)


def find_problem_alone(experts: Experts) -> str:
    """Return why ``run_alone`` cannot run experts, or ""."""
    if experts.up_bias_LG is not None or experts.down_bias_LD is not None:
        return "experts have biases"
    _, hidden_size, intermediate_size = experts.down_LDF.shape
    try:
        for name, size in (("hidden", hidden_size), ("intermediate", intermediate_size)):
            check_alignment(size, name=f"{name}_size", dtype=experts.down_LDF.dtype)
    except ValueError as error:
        return str(error)
    return ""


def run_alone(x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
    """Return the weighted sums over the experts of one rank, ``(T, D)``, with nothing read.

    No size depends on data, so a compiler traces it into one graph. Slots that are dropped are rows
    too, the last, which no expert multiplies. Differentiable as ``AbstractStrategy.forward``.

    Args:
        x_TD: tokens, of any floating dtype.
        routing: their experts and weights.
        experts: all of them, without a ``find_problem_alone``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    experts = under_autocast(experts)
    num_experts, dtype = experts.num_local_experts, x_TD.dtype
    x_TD = x_TD.to(experts.up_LGD.dtype)
    check_inputs(x_TD, experts)
    check_routing(routing, num_tokens=x_TD.shape[0], num_experts=num_experts)
    idx_TK = routing.topk_idx_TK
    slots_N, counts_E = sort_slots(idx_TK, num_experts=num_experts)
    ends_E = counts_E.cumsum(0)
    num_slots = idx_TK.numel()
    dropped_N1 = (torch.arange(num_slots, device=idx_TK.device) >= ends_E[-1])[:, None]
    rows_ND = gather_rows(x_TD, slots_N, num_rows=num_slots, top_k=idx_TK.shape[1])
    # The products leave rows of no expert undefined: forward those of y, backward those of x.
    rows_ND = rows_ND.masked_fill(dropped_N1, 0.0)
    y_ND = _apply_experts(rows_ND, experts, ends_E.int()).masked_fill(dropped_N1, 0.0)
    return combine_rows(y_ND, slots_N, routing.topk_weights_TK).to(dtype)
