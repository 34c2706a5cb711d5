"""Strategy "functional": two all-to-alls, by operators that ``torch.compile`` traces in one graph.

``all_to_all`` reads the routing table with numpy, which breaks a graph in two at each layer. Here,
a functional collective exchanges the counts, and the splits of the all-to-alls are symbolic sizes.
The strategies are separate, because in eager mode traceable operators cost time on the host.
"""

import math
from collections.abc import Callable
from typing import TypeVar, final

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

from halley.core.routing import route_to_shards
from halley.core.types import (
    DROPPED,
    Experts,
    LayerShape,
    Routing,
    Task,
    check_routing,
    check_tp_size,
)
from halley.cost.hardware import Predictor
from halley.distributed.peers import Collective, rank_and_size
from halley.ops.expert_rows import apply_experts, expert_gemm, find_alignment_problem
from halley.ops.packed_rows import exchange_packed
from halley.ops.traceable_routing import (
    MoveRows,
    capacity_rows,
    combine_rows,
    gather_rows,
    group_rows,
    permute_rows,
    read_counts,
    sort_slots,
)
from halley.strategies.all_to_all import all_to_all_tasks
from halley.strategies.base import AbstractStrategy, Lockstep, check_inputs, under_autocast


_T = TypeVar("_T")


@final
class TraceableStrategy(AbstractStrategy):
    """Run experts between two functional all-to-alls, in code that ``torch.compile`` can trace.

    To compile a model in one graph, set ``torch._dynamo.config.capture_scalar_outputs``, as
    ``halley.compile`` does. With ``fixed_sizes``, a rank sends ``capacity`` rows to each expert, so
    the host reads no counts. Then routers need a capacity, the same on all ranks. With
    ``deduplicated``, a token crosses once to each rank that has any of its experts, and one partial
    sum returns; it excludes ``fixed_sizes``. It has fixed sizes with ``max_load``, a multiple of
    the rows of balanced routing, both in messages and for the experts of a rank. If a rank has more
    rows to send or to compute, outputs are NaN. All ranks must have the same number of tokens.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        tp_size: int = 1,
        fixed_sizes: bool = False,
        deduplicated: bool = False,
        max_load: float = 0.0,
    ) -> None:
        if fixed_sizes and deduplicated:
            raise ValueError("fixed_sizes (True) must be False with deduplicated")
        if max_load and not (deduplicated and 1.0 <= max_load < math.inf):
            raise ValueError(
                f"max_load ({max_load}) must be 0, or finite and at least 1 with deduplicated"
            )
        self.ep_size = rank_and_size(group)[1]
        check_tp_size(tp_size, num_ranks=self.ep_size)
        if max_load and tp_size > 1:
            raise ValueError(f"tp_size ({tp_size}) must be 1 with max_load")
        self.group, self.tp_size, self._fixed_sizes = group, tp_size, fixed_sizes
        self._deduplicated, self._max_load = deduplicated, max_load
        name = "functional:deduplicated" if deduplicated else "functional"
        self._lockstep = Lockstep(name, group=group, tp_size=tp_size)

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        num_local = experts.num_local_experts
        num_experts = num_local * self.ep_size
        routing = route_to_shards(routing, num_local=num_local, tp_size=self.tp_size)
        check_inputs(x_TD, experts)
        check_routing(routing, num_tokens=x_TD.shape[0], num_experts=num_experts)
        if experts.up_bias_LG is not None or experts.down_bias_LD is not None:
            raise ValueError("expert_bias (true) must be false for the functional strategy")
        sizes = {}  # that decide the size of a message
        if self._fixed_sizes:
            sizes = {"capacity": routing.capacity if x_TD.shape[0] else 0}
        elif self._max_load:
            sizes = {"num_tokens": x_TD.shape[0]}
        self._lockstep.begin(x_TD, experts, **sizes)
        if self._fixed_sizes:
            return self._lockstep.end(self._run_fixed(x_TD, routing, experts))
        if self._max_load:
            return self._lockstep.end(self._run_bounded(x_TD, routing, experts))
        if self._deduplicated:
            return self._lockstep.end(self._run_deduplicated(x_TD, routing, experts))
        idx_TK, weights_TK = routing.topk_idx_TK, routing.topk_weights_TK

        slots_N, counts_E = sort_slots(idx_TK, num_experts)
        sent_WL = counts_E.view(self.ep_size, num_local)
        received_WL = self._exchange("route", sent_WL)
        send_splits, recv_splits = _read_splits(sent_WL, received_WL)

        rows_ND = gather_rows(x_TD, slots_N, sum(send_splits), idx_TK.shape[1])
        received_RD = self._exchange("dispatch", rows_ND, send_splits, recv_splits)
        order_R, inverse_R, ends_L, _ = group_rows(received_WL, sum(recv_splits))
        x_RD = permute_rows(received_RD, order_R, inverse_R)
        y_RD = apply_experts(x_RD, experts, ends_L=ends_L, gemm=expert_gemm)
        y_RD = permute_rows(y_RD, inverse_R, order_R)
        returned_ND = self._exchange("combine", y_RD, recv_splits, send_splits)
        return self._lockstep.end(combine_rows(returned_ND, slots_N, weights_TK))

    forward_in_graph = forward  # what plug-ins call while ``torch.compile`` traces a model

    def _run_fixed(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        """Run the layer with ``capacity`` rows per expert and rank; rows without slots are zero."""
        if routing.capacity is None:
            raise ValueError("capacity_factor (0) of the router must be above 0 with fixed_sizes")
        if not x_TD.shape[0]:
            raise ValueError("tokens (0) must be at least 1 with fixed_sizes")
        idx_TK, capacity = routing.topk_idx_TK, routing.capacity
        num_local = experts.num_local_experts
        places = capacity_rows(idx_TK, num_experts=num_local * self.ep_size, capacity=capacity)
        x_ND = x_TD.repeat_interleave(idx_TK.shape[1], dim=0)
        x_RD = MoveRows.apply(x_ND, *places)
        splits = [num_local * capacity] * self.ep_size
        x_RD = self._exchange("dispatch", x_RD, splits, splits)
        x_RD = x_RD.unflatten(0, (-1, num_local, capacity)).transpose(0, 1).flatten(0, 2)
        ends_L = torch.arange(1, num_local + 1, device=x_TD.device) * (self.ep_size * capacity)
        y_RD = apply_experts(x_RD, experts, ends_L=ends_L.int(), gemm=expert_gemm)
        y_RD = y_RD.unflatten(0, (num_local, -1, capacity)).transpose(0, 1).flatten(0, 2)
        y_RD = self._exchange("combine", y_RD, splits, splits)
        y_ND = MoveRows.apply(y_RD, *places[2:], *places[:2])
        weights_TK1 = routing.topk_weights_TK.to(x_TD.dtype).unsqueeze(2)
        return (y_ND.view(*idx_TK.shape, -1) * weights_TK1).sum(1)

    def _run_deduplicated(
        self, x_TD: torch.Tensor, routing: Routing, experts: Experts
    ) -> torch.Tensor:
        """Run the layer with one row for each (token, rank) pair; S is the number of rows sent."""
        weights_TK, ep_size = routing.topk_weights_TK, self.ep_size
        num_local, top_k = experts.num_local_experts, weights_TK.shape[1]
        rank_TW, local_TWK = _group_by_rank(routing.topk_idx_TK, num_local, ep_size=ep_size)
        slots_N, rows_W = sort_slots(rank_TW, ep_size)
        slots_W = (local_TWK != DROPPED).sum((0, 2))
        sent_W2 = torch.stack([rows_W, slots_W], dim=1)
        received_W2 = self._exchange("route", sent_W2)
        sent, received = _read_splits(
            *(each.t().reshape(2 * ep_size, 1) for each in (sent_W2, received_W2))
        )
        send_splits, recv_splits = sent[:ep_size], received[:ep_size]

        # Each row has its token, and the weights and local ids of its slots as float32 values.
        words = [weights_TK.float()[:, None].expand(local_TWK.shape), local_TWK.float()]
        rows_SD = gather_rows(x_TD, slots_N, sum(send_splits), ep_size)
        words_SX = gather_rows(torch.cat(words, 2).flatten(0, 1), slots_N, sum(send_splits), 1)
        x_RD = self._exchange("dispatch", rows_SD, send_splits, recv_splits)
        words_RX = self._exchange("dispatch of routing", words_SX, send_splits, recv_splits)
        weights_RK, ids_RK = words_RX.split(top_k, dim=1)

        slots_N2, counts_L = sort_slots(ids_RK.long(), num_local)
        x_ND = gather_rows(x_RD, slots_N2, sum(received[ep_size:]), top_k)
        ends_L = counts_L.cumsum(0).int()
        y_ND = apply_experts(x_ND, experts, ends_L=ends_L, gemm=expert_gemm)
        y_RD = combine_rows(y_ND, slots_N2, weights_RK)
        returned_SD = self._exchange("combine", y_RD, recv_splits, send_splits)
        return combine_rows(returned_SD, slots_N, weights_TK.new_ones(rank_TW.shape))

    def _run_bounded(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        """Run the layer as ``_run_deduplicated``, with sizes that the host knows before.

        S rows of fixed size go to all ranks together, and N slots have rows for the experts.
        """
        weights_TK, ep_size = routing.topk_weights_TK, self.ep_size
        num_local, (num_tokens, top_k) = experts.num_local_experts, weights_TK.shape
        if not num_tokens:
            raise ValueError("tokens (0) must be at least 1 with max_load")
        limit, num_slots = _bound_rows(
            self._max_load, num_tokens, top_k, num_local=num_local, ep_size=ep_size
        )
        rank_TW, local_TWK = _group_by_rank(routing.topk_idx_TK, num_local, ep_size=ep_size)
        fits = ((rank_TW != DROPPED).sum(0) <= limit).all()
        places = capacity_rows(rank_TW.where(fits, DROPPED), num_experts=ep_size, capacity=limit)
        # Ids begin at 1, because an unused row has zeros.
        parts = [weights_TK.float()[:, None].expand(local_TWK.shape), local_TWK.float() + 1.0]
        splits = [limit] * ep_size
        x_SD = MoveRows.apply(x_TD.repeat_interleave(ep_size, dim=0), *places)
        routing_SX = MoveRows.apply(torch.cat(parts, 2).flatten(0, 1), *places)
        x_RD, routing_RX = self._exchange_packed(x_SD, routing_SX, splits)
        # Contiguous, because Inductor does not keep the strides of parts of a larger tensor.
        weights_RK, ids_RK = (each.contiguous() for each in routing_RX.split(top_k, dim=1))

        slots_N, counts_L = sort_slots(ids_RK.long() - 1, num_local)
        ends_L = counts_L.cumsum(0)
        # The GEMMs do not write the rows of unused slots, neither in ``y_ND`` nor, in backward, in
        # the gradient of ``x_ND``.
        unused_N1 = (torch.arange(num_slots, device=x_TD.device) >= ends_L[-1])[:, None]
        x_ND = gather_rows(x_RD, slots_N, num_slots, top_k).masked_fill(unused_N1, 0.0)
        has_all = ends_L[-1] <= num_slots
        ends_L = ends_L.clamp_max(num_slots).int()
        y_ND = apply_experts(x_ND, experts, ends_L=ends_L, gemm=expert_gemm)
        y_RD = combine_rows(y_ND.masked_fill(unused_N1, 0.0), slots_N, weights_RK)
        y_RD = y_RD.masked_fill(~has_all, math.nan)
        y_SD = self._exchange("combine", y_RD, splits, splits)
        y_TD = MoveRows.apply(y_SD, *places[2:], *places[:2]).view(*rank_TW.shape, -1).sum(1)
        return y_TD.masked_fill(~fits, math.nan)

    def find_problem(self, experts: Experts, *, top_k: int) -> str:
        return "experts have biases" if experts.up_bias_LG is not None else ""

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        return all_to_all_tasks(shape, predictor, num_chunks=1)

    def _exchange(
        self,
        name: str,
        rows_NX: torch.Tensor,
        send_splits: list[int] | None = None,
        recv_splits: list[int] | None = None,
    ) -> torch.Tensor:
        """Exchange rows in an all-to-all; without splits, parts are equal and have no gradient."""
        if self.group is None:
            return rows_NX
        exchange = fc.all_to_all_single if send_splits is None else fc.all_to_all_single_autograd
        group = self.group
        return self._run_collective(
            name, lambda: fc.wait_tensor(exchange(rows_NX, recv_splits, send_splits, group))
        )

    def _exchange_packed(
        self, rows_SD: torch.Tensor, routing_SX: torch.Tensor, splits: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange rows and their routing in one all-to-all of equal splits."""
        if self.group is None:
            return rows_SD, routing_SX
        group_name = self.group.group_name
        return self._run_collective(
            "dispatch", lambda: exchange_packed(rows_SD, routing_SX, splits, group_name)
        )

    def _run_collective(self, name: str, run: Callable[[], _T]) -> _T:
        """Return the result of ``run``; in eager mode, an error names the collective and ranks."""
        if torch.compiler.is_compiling():
            return run()
        with Collective(name, group=self.group):
            return run()


def _group_by_rank(
    idx_TK: torch.Tensor, num_local: int, *, ep_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ranks that have any expert of a token, ``(T, W)``, and local ids, ``(T, W, K)``.

    Both are ``DROPPED`` where a rank has no such expert.
    """
    rank_W = torch.arange(ep_size, device=idx_TK.device)
    local_TWK = idx_TK[:, None, :] - (rank_W * num_local)[:, None]
    is_there_TWK = (local_TWK >= 0) & (local_TWK < num_local)
    return rank_W.where(is_there_TWK.any(2), DROPPED), local_TWK.where(is_there_TWK, DROPPED)


def _bound_rows(
    max_load: float, num_tokens: int, top_k: int, *, num_local: int, ep_size: int
) -> tuple[int, int]:
    """Return the most rows that a rank sends to each rank, and the most slots of its experts."""
    num_experts = num_local * ep_size
    share = 1 - math.comb(num_experts - num_local, top_k) / math.comb(num_experts, top_k)
    limit = min(num_tokens, math.ceil(max_load * share * num_tokens))
    most = ep_size * limit * min(top_k, num_local)
    return limit, min(most, math.ceil(max_load * num_tokens * top_k))


def _read_splits(sent_WL: torch.Tensor, received_WL: torch.Tensor) -> tuple[list[int], list[int]]:
    sent_W, received_W = read_counts(sent_WL, received_WL)
    splits = sent_W.tolist(), received_W.tolist()
    for split in (*splits[0], *splits[1]):
        torch._check(split >= 0)  # lets the compiler use the number as a size
    return splits


def find_one_rank_problem(experts: Experts) -> str:
    """Return the reason why ``run_on_one_rank`` cannot run these experts, or ""."""
    if experts.up_bias_LG is not None or experts.down_bias_LD is not None:
        return "experts have biases"
    return find_alignment_problem(experts)


def run_on_one_rank(x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
    """Run the experts of one rank, traceable as one graph; return weighted sums, ``(T, D)``.

    The host reads nothing, and no size depends on data. So dropped slots have rows too, after all
    other rows, and no expert multiplies them. Differentiable as ``AbstractStrategy.forward``, with
    the same errors. Tokens may have any floating dtype. ``find_one_rank_problem`` must return ""
    for the experts.
    """
    experts = under_autocast(experts)
    num_experts, dtype = experts.num_local_experts, x_TD.dtype
    x_TD = x_TD.to(experts.up_LGD.dtype)
    check_inputs(x_TD, experts)
    check_routing(routing, num_tokens=x_TD.shape[0], num_experts=num_experts)
    idx_TK = routing.topk_idx_TK
    slots_N, counts_E = sort_slots(idx_TK, num_experts)
    ends_E = counts_E.cumsum(0)
    num_slots = idx_TK.numel()
    dropped_N1 = (torch.arange(num_slots, device=idx_TK.device) >= ends_E[-1])[:, None]
    rows_ND = gather_rows(x_TD, slots_N, num_slots, idx_TK.shape[1])
    # The GEMMs do not write the rows of dropped slots, neither in ``y_ND`` nor, in backward, in the
    # gradient of ``rows_ND``. The masks set these rows to zero.
    rows_ND = rows_ND.masked_fill(dropped_N1, 0.0)
    y_ND = apply_experts(rows_ND, experts, ends_L=ends_E.int(), gemm=expert_gemm)
    y_ND = y_ND.masked_fill(dropped_N1, 0.0)
    return combine_rows(y_ND, slots_N, routing.topk_weights_TK).to(dtype)
