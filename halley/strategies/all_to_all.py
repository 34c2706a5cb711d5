"""Run experts between two all-to-alls: sort, dispatch, grouped GEMMs, combine, weighted sum.

With one chunk the steps follow each other: the strategy "sequential", the baseline that every other
strategy is measured against. With several chunks, the strategy "chunked", the all-to-alls of one
chunk run while another chunk computes.

A chunk is a range of each rank's local experts, not of its tokens. Every expert has its rows in one
chunk, so each weight is read once and each weight gradient is computed once. The result equals that
of one chunk bit for bit. Tutel and FasterMoE chunk tokens instead and read all weights in every
chunk.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from halley.core.routing import (
    check_routing,
    expert_starts,
    order_by_chunk,
    order_by_expert,
    plan_dispatch,
    sort_keys,
)
from halley.core.sharding import check_tp_size, route_to_shards
from halley.core.timeline import Recorder
from halley.core.types import DispatchPlan, Experts, LayerShape, Routing
from halley.cost.hardware import Predictor
from halley.cost.simulate import Task
from halley.distributed.peers import rank_and_size
from halley.ops.exchange import (
    Exchange,
    combine_tokens,
    concat_in_place,
    gather_table,
    gather_tokens,
    invert_permutation,
    reorder_rows,
)
from halley.ops.expert_gemm import apply_experts
from halley.strategies.base import (
    AbstractStrategy,
    all_to_all_tasks,
    check_inputs,
    choose_num_chunks,
)
from halley.strategies.lockstep import Lockstep


# From rows sorted by expert, (R, D), and the end of each expert's rows, (L,) int32, to the expert
# output of each row, (R, D).
ComputeRows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@final
class AllToAllStrategy(AbstractStrategy):
    """All-to-all, experts, all-to-all; as a pipeline over ranges of local experts if asked for.

    Args:
        group: the ranks over which the experts are spread; None for a single rank.
        recorder: takes a span for each step and for the host's waits.
        tp_size: adjacent ranks that share each expert, see ``core.sharding``.
        num_chunks: number of chunks, at most the number of local experts; 0 lets the cost model
            choose it for the average number of tokens of a rank.
        predictor: the cost model, the same on all ranks; required if ``num_chunks`` is 0.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        recorder: Recorder,
        tp_size: int = 1,
        num_chunks: int = 1,
        predictor: Predictor | None = None,
    ) -> None:
        self.ep_size = rank_and_size(group)[1]
        check_tp_size(tp_size, num_ranks=self.ep_size)
        self.group, self.tp_size = group, tp_size
        self.recorder = recorder
        self.num_chunks = num_chunks
        self.predictor = predictor
        name = "sequential" if num_chunks == 1 else "chunked"
        self._lockstep = Lockstep(name, group=group, tp_size=tp_size)
        self._chosen: dict[LayerShape, int] = {}

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        num_local = experts.num_local_experts
        check_inputs(x_TD, experts)
        routing = route_to_shards(routing, num_local=num_local, tp_size=self.tp_size)
        self._begin(x_TD, routing, experts)
        choose = partial(self._choose, top_k=routing.topk_idx_TK.shape[1], experts=experts)
        y_TD = run_all_to_all(
            x_TD,
            routing,
            partial(_split_experts, experts),
            num_local=num_local,
            group=self.group,
            recorder=self.recorder,
            choose_num_chunks=None if self.num_chunks == 1 else choose,
        )
        return self._lockstep.end(y_TD)

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        num_chunks = self.num_chunks or choose_num_chunks(shape, predictor)
        return all_to_all_tasks(shape, predictor, num_chunks=num_chunks)

    def _begin(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> None:
        """Compare across ranks the values that decide the number of chunks."""
        values: dict[str, object] = {}
        if self.num_chunks != 1:
            values["num_chunks"] = self.num_chunks
        if self.num_chunks == 0:
            values |= {
                "intermediate_size": experts.down_LDF.shape[2],
                "top_k": routing.topk_idx_TK.shape[1] // self.tp_size,
                "activation": experts.activation,
            }
        self._lockstep.begin(x_TD, experts, **values)

    def _choose(self, starts_WE1: np.ndarray, *, top_k: int, experts: Experts) -> int:
        """Return the number of chunks, from values that are the same on all ranks."""
        if self.num_chunks:
            return self.num_chunks
        rows = int(starts_WE1[:, -1].sum()) // (self.ep_size * top_k)
        shape = LayerShape(
            num_tokens=1 << max(rows - 1, 0).bit_length(),  # powers of two: few simulations
            hidden_size=experts.down_LDF.shape[1],
            intermediate_size=experts.down_LDF.shape[2],
            num_experts=starts_WE1.shape[1] - 1,
            top_k=top_k,
            ep_size=self.ep_size,
            itemsize=experts.down_LDF.itemsize,
            activation=experts.activation,
        )
        if shape not in self._chosen:
            assert self.predictor is not None, "num_chunks 0 needs a predictor"
            self._chosen[shape] = choose_num_chunks(shape, self.predictor)
        return self._chosen[shape]


def run_all_to_all(
    x_TD: torch.Tensor,
    routing: Routing,
    split_experts: Callable[[list[int]], Sequence[ComputeRows]],
    *,
    num_local: int,
    group: dist.ProcessGroup | None,
    recorder: Recorder,
    choose_num_chunks: Callable[[np.ndarray], int] | None = None,
) -> torch.Tensor:
    """Dispatch tokens to their experts, compute, combine; return the weighted sums, ``(T, D)``.

    Takes experts of any kind, as functions. Differentiable; a collective, forward and backward.

    Args:
        x_TD: tokens of this rank.
        routing: global expert ids and weights of each token.
        split_experts: from the number of local experts of each chunk to one function a chunk.
        num_local: L, the same on all ranks.
        group: the ranks over which the experts are spread; None for a single rank.
        recorder: takes a span for each step and for the host's waits.
        choose_num_chunks: from the routing table, ``(W, E + 1)``, to the number of chunks; None for
            one chunk, for which the rows are gathered before the host has the table.

    Raises:
        ValueError: the routing does not fit the tokens or the experts.
    """
    rank, ep_size = rank_and_size(group)
    num_experts = num_local * ep_size
    check_routing(routing, num_tokens=x_TD.shape[0], num_experts=num_experts)
    idx_TK, weights_TK = routing.topk_idx_TK, routing.topk_weights_TK
    gather = partial(gather_tokens, x_TD, top_k=idx_TK.shape[1])

    with recorder.span("route"):
        keys_N, slots_N = sort_keys(idx_TK, num_experts)
        table = _RoutingTable(keys_N, num_experts=num_experts, group=group)
        if choose_num_chunks is None:
            inverse_N = invert_permutation(slots_N)
            rows_ND = gather(slots_N, inverse_N=inverse_N)
    with recorder.span("route.wait", stream="exposed"):
        starts_WE1 = table.read()
    if choose_num_chunks is None:
        plans = plan_dispatch(starts_WE1, rank)
    else:
        with recorder.span("route"):
            num_chunks = choose_num_chunks(starts_WE1)
            plans = plan_dispatch(starts_WE1, rank, num_chunks=num_chunks)
            if num_chunks > 1:
                slots_N = order_by_chunk(
                    slots_N, starts_WE1[rank], ep_size=ep_size, num_chunks=num_chunks
                )
            inverse_N = invert_permutation(slots_N)
            rows_ND = gather(slots_N, inverse_N=inverse_N)

    experts = split_experts([plan.num_local for plan in plans])
    run = _run_one_chunk if len(plans) == 1 else _run_pipeline
    returned_ND = run(plans, rows_ND, experts, group=group, recorder=recorder)
    with recorder.span("restore"):
        return combine_tokens(returned_ND, weights_TK, slots_N=slots_N, inverse_N=inverse_N)


def _run_one_chunk(
    plans: list[DispatchPlan],
    rows_ND: torch.Tensor,
    experts: Sequence[ComputeRows],
    *,
    group: dist.ProcessGroup | None,
    recorder: Recorder,
) -> torch.Tensor:
    """Return the expert output of each row, with zeros for the dropped rows, which come last."""
    (plan,), (compute,) = plans, experts
    num_dropped = rows_ND.shape[0] - plan.num_send
    sent_ND = rows_ND[: plan.num_send] if num_dropped else rows_ND
    dispatch, combine = _build_exchanges(plan, group=group, recorder=recorder)
    received_RD = dispatch.run(sent_ND)
    order_R, inverse_R, ends_L = _copy_order(plan, device=rows_ND.device)
    with recorder.span("experts"):
        x_RD = reorder_rows(received_RD, order_R, inverse_R=inverse_R)
        y_RD = reorder_rows(compute(x_RD, ends_L), inverse_R, inverse_R=order_R)
    returned_ND = combine.run(y_RD)
    return F.pad(returned_ND, (0, 0, 0, num_dropped)) if num_dropped else returned_ND


def _run_pipeline(
    plans: list[DispatchPlan],
    rows_ND: torch.Tensor,
    experts: Sequence[ComputeRows],
    *,
    group: dist.ProcessGroup | None,
    recorder: Recorder,
) -> torch.Tensor:
    """Return the expert output of each row, with zeros for the dropped rows, which come last.

    All dispatches start first. NCCL runs them in order, before any combine, so the rows of the next
    chunk never queue behind a combine whose result nobody needs yet.
    """
    sizes = [plan.num_send for plan in plans]
    splits = [*sizes, rows_ND.shape[0] - sum(sizes)]
    returned_ND = torch.empty_like(rows_ND)
    *received, dropped_ND = returned_ND.split(splits)
    dropped_ND.zero_()  # before any part enters the autograd graph
    exchanges = [
        _build_exchanges(plan, group=group, recorder=recorder, returned=part)
        for plan, part in zip(plans, received, strict=True)
    ]
    sent = [
        dispatch.start(rows)
        for (dispatch, _), rows in zip(exchanges, rows_ND.split(splits), strict=False)
    ]
    started: list[torch.Tensor] = []
    for chunk, plan in enumerate(plans):
        dispatch, combine = exchanges[chunk]
        order_R, inverse_R, ends_L = _copy_order(plan, device=rows_ND.device)
        received_RD = dispatch.wait(sent[chunk])
        with recorder.span("experts"):
            x_RD = reorder_rows(received_RD, order_R, inverse_R=inverse_R)
            y_RD = reorder_rows(experts[chunk](x_RD, ends_L), inverse_R, inverse_R=order_R)
        started.append(combine.start(y_RD))
    parts = [combine.wait(rows) for (_, combine), rows in zip(exchanges, started, strict=True)]
    parts.append(dropped_ND)
    # A single rank exchanges nothing, so no all-to-all has written into the buffer.
    return torch.cat(parts) if group is None else concat_in_place(returned_ND, parts)


def _build_exchanges(
    plan: DispatchPlan,
    *,
    group: dist.ProcessGroup | None,
    recorder: Recorder,
    returned: torch.Tensor | None = None,
) -> tuple[Exchange, Exchange]:
    """Return the dispatch and the combine of a chunk; ``returned`` receives the combined rows."""
    dispatch = Exchange(
        send_splits=plan.send_splits,
        recv_splits=plan.recv_splits,
        group=group,
        name="dispatch",
        recorder=recorder,
    )
    combine = Exchange(
        send_splits=plan.recv_splits,
        recv_splits=plan.send_splits,
        group=group,
        name="combine",
        recorder=recorder,
        received=returned,
    )
    return dispatch, combine


def _split_experts(experts: Experts, sizes: list[int]) -> list[ComputeRows]:
    def compute(part: Experts, x_RD: torch.Tensor, ends_L: torch.Tensor) -> torch.Tensor:
        return apply_experts(x_RD, part, ends_L=ends_L)

    # One chunk takes the weights themselves: the gradient of a split is a copy.
    parts = [experts] if len(sizes) == 1 else experts.split(sizes)
    return [partial(compute, part) for part in parts]


@final
class _RoutingTable:
    """The first slot of each expert on each rank: gathered at once, read by the host later.

    Args:
        keys_N: this rank's sorted keys, as from ``sort_keys``.
        num_experts: experts of all ranks.
        group: the ranks; None for a single rank.
    """

    def __init__(
        self, keys_N: torch.Tensor, *, num_experts: int, group: dist.ProcessGroup | None
    ) -> None:
        starts_WE1 = gather_table(expert_starts(keys_N, num_experts), group=group)
        # An asynchronous copy and an event: later work may be queued before the host has read it.
        self._starts_WE1 = starts_WE1.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if starts_WE1.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> np.ndarray:
        """Wait for the copy; return it, ``(W, E + 1)`` int64."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._starts_WE1.numpy()


def _copy_order(
    plan: DispatchPlan, *, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the order by expert of a chunk's received rows, its inverse, and the experts' ends.

    The host computes them while the rows are in flight. They are in pinned memory, because a copy
    from pageable memory would wait for the all-to-all.

    Returns:
        int32 ``(R,)``, ``(R,)`` and ``(L,)``, on ``device``.
    """
    num_local, num_recv = plan.num_local, plan.num_recv
    host = torch.empty(
        num_local + 2 * num_recv, dtype=torch.int32, pin_memory=device.type == "cuda"
    )
    order_by_expert(plan, host.numpy())
    ends_L, order_R, inverse_R = host.to(device, non_blocking=True).split(
        [num_local, num_recv, num_recv]
    )
    return order_R, inverse_R, ends_L
