"""Run experts between two all-to-alls: sort, dispatch, grouped GEMMs, combine, weighted sum.

With one chunk, this is the strategy "sequential", the baseline of all measurements. With several,
it is the strategy "chunked": the all-to-alls of one chunk run while another chunk computes.

A chunk is a range of each rank's local experts. All rows of an expert are in one chunk, so each
weight is read once and the result equals that of one chunk bit for bit. Tutel and FasterMoE split
the tokens instead and read all weights in each chunk.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from halley.core.routing import (
    chunk_sizes,
    expert_starts,
    order_by_chunk,
    order_by_expert,
    plan_dispatch,
    route_to_shards,
    sort_keys,
)
from halley.core.timeline import Recorder
from halley.core.types import (
    DispatchPlan,
    Experts,
    LayerShape,
    Routing,
    Task,
    check_routing,
    check_tp_size,
    local_experts,
)
from halley.cost.hardware import Predictor
from halley.cost.simulate import HOST, makespan_us
from halley.distributed.peers import rank_and_size
from halley.ops.exchange import Exchange, concat_in_place, gather_table
from halley.ops.expert_rows import (
    apply_experts,
    combine_tokens,
    gather_tokens,
    invert_permutation,
    reorder_rows,
)
from halley.strategies.base import BESIDE, AbstractStrategy, Lockstep, check_inputs, experts_us


# Type of a function that returns the expert output of each row, (R, D). Its arguments are rows
# sorted by expert, (R, D), and the end of each expert's rows, (L,) int32.
ComputeRows = Callable[..., torch.Tensor]

_BMM = 3.8  # time of ``bmm`` to read rows / time of other kernels: docs/LOG.md
_NUM_CHUNKS = (1, 2, 3, 4, 6, 8)  # candidates of choose_num_chunks


@final
class AllToAllStrategy(AbstractStrategy):
    """Run experts between two all-to-alls; with several chunks, all-to-alls overlap computation.

    ``num_chunks`` is at most the number of local experts. With 0, the cost model ``predictor``, the
    same on all ranks, chooses it for the average number of tokens of a rank.
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
        self.group, self.tp_size, self.recorder = group, tp_size, recorder
        self.num_chunks, self.predictor = num_chunks, predictor
        name = "sequential" if num_chunks == 1 else "chunked"
        self._lockstep = Lockstep(name, group=group, tp_size=tp_size)
        self._chosen: dict[LayerShape, int] = {}

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        num_local = experts.num_local_experts
        check_inputs(x_TD, experts)
        routing = route_to_shards(routing, num_local=num_local, tp_size=self.tp_size)
        top_k = routing.topk_idx_TK.shape[1]
        # ``Lockstep`` checks that values which decide the number of chunks are equal on all ranks.
        values: dict[str, object] = {} if self.num_chunks == 1 else {"num_chunks": self.num_chunks}
        if self.num_chunks == 0:
            values |= {
                "intermediate_size": experts.down_LDF.shape[2],
                "top_k": top_k // self.tp_size,
                "activation": experts.activation,
            }
        self._lockstep.begin(x_TD, experts, **values)
        choose = partial(self._choose, top_k=top_k, experts=experts)
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

    def _choose(self, starts_WE1: np.ndarray, *, top_k: int, experts: Experts) -> int:
        if self.num_chunks:
            return self.num_chunks
        num_tokens = int(starts_WE1[:, -1].sum()) // (self.ep_size * top_k)
        shape = LayerShape(
            # Round up to a power of two, so that few different shapes are simulated.
            num_tokens=1 << max(num_tokens - 1, 0).bit_length(),
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
    """Dispatch tokens, run the experts, combine; return each token's weighted sum, ``(T, D)``.

    The experts are given as functions. Differentiable; a collective, forward and backward.

    Args:
        x_TD, routing: tokens of this rank, with global expert ids.
        split_experts: takes each chunk's number of local experts; returns a function for each.
        num_local: L, the same on all ranks.
        choose_num_chunks: takes the routing table, ``(W, E + 1)``; returns the number of chunks.
            None for one chunk: then the rows are gathered before the host has read the table.
    """
    rank, ep_size = rank_and_size(group)
    num_experts = num_local * ep_size
    check_routing(routing, num_tokens=x_TD.shape[0], num_experts=num_experts)
    idx_TK, weights_TK = routing.topk_idx_TK, routing.topk_weights_TK

    def gather(slots_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inverse_N = invert_permutation(slots_N)
        return gather_tokens(x_TD, slots_N, inverse_N=inverse_N, top_k=idx_TK.shape[1]), inverse_N

    with recorder.span("route"):
        keys_N, slots_N = sort_keys(idx_TK, num_experts)
        read_table = _start_table(keys_N, num_experts=num_experts, group=group)
        if choose_num_chunks is None:
            rows_ND, inverse_N = gather(slots_N)
    with recorder.span("route.wait", stream="exposed"):
        starts_WE1 = read_table()
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
            rows_ND, inverse_N = gather(slots_N)
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
    """Dispatch, run experts and combine in one chunk; return ``(N, D)``, 0 for dropped slots."""
    (plan,), (compute,) = plans, experts
    num_dropped = rows_ND.shape[0] - plan.num_send
    sent_ND = rows_ND[: plan.num_send] if num_dropped else rows_ND
    dispatch, combine = _build_exchanges(plan, group=group, recorder=recorder)
    received_RD = dispatch.run(sent_ND)
    order_R, inverse_R, ends_L = _copy_order(plan, device=rows_ND.device)
    with recorder.span("experts"):
        x_RD = reorder_rows(received_RD, order_R, inverse_R=inverse_R)
        y_RD = reorder_rows(compute(x_RD, ends_L=ends_L), inverse_R, inverse_R=order_R)
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
    """Overlap a chunk's all-to-alls with experts of other chunks; return the output of each row.

    Dropped rows come last, and their output is zero. All dispatches start before the first combine:
    NCCL runs the collectives of a group in order, so no dispatch waits for a combine.
    """
    sizes = [plan.num_send for plan in plans]
    splits = [*sizes, rows_ND.shape[0] - sum(sizes)]
    returned_ND = torch.empty_like(rows_ND)
    *received, dropped_ND = returned_ND.split(splits)
    dropped_ND.zero_()  # writes in place, so it must precede autograd's operations on the buffer
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
            y_RD = experts[chunk](x_RD, ends_L=ends_L)
            y_RD = reorder_rows(y_RD, inverse_R, inverse_R=order_R)
        started.append(combine.start(y_RD))
    parts = [combine.wait(rows) for (_, combine), rows in zip(exchanges, started, strict=True)]
    parts.append(dropped_ND)
    # On a single rank no all-to-all writes into the buffer, so the chunks are concatenated.
    return torch.cat(parts) if group is None else concat_in_place(returned_ND, parts)


def _build_exchanges(
    plan: DispatchPlan,
    *,
    group: dist.ProcessGroup | None,
    recorder: Recorder,
    returned: torch.Tensor | None = None,
) -> tuple[Exchange, Exchange]:
    exchange = partial(Exchange, group=group, recorder=recorder)
    there, back = plan.send_splits, plan.recv_splits
    dispatch = exchange(name="dispatch", send_splits=there, recv_splits=back)
    combine = exchange(name="combine", send_splits=back, recv_splits=there, received=returned)
    return dispatch, combine


def _split_experts(experts: Experts, sizes: list[int]) -> list[ComputeRows]:
    # One chunk uses the weights without a split, because a split copies gradients in backward.
    parts = [experts] if len(sizes) == 1 else experts.split(sizes)
    return [partial(apply_experts, experts=part) for part in parts]


def _start_table(
    keys_N: torch.Tensor, *, num_experts: int, group: dist.ProcessGroup | None
) -> Callable[[], np.ndarray]:
    """All-gather the row numbers at which experts begin; return a function that waits for them.

    The table, ``(W, E + 1)`` int64 on the host, has the ``expert_starts`` of each rank.
    """
    starts_WE1 = gather_table(expert_starts(keys_N, num_experts), group=group)
    host_WE1 = starts_WE1.to("cpu", non_blocking=True)
    if not starts_WE1.is_cuda:
        return host_WE1.numpy
    # With this event, ``read`` waits for the copy, but not for work queued after the copy.
    copied = torch.cuda.Event()
    copied.record()

    def read() -> np.ndarray:
        copied.synchronize()
        return host_WE1.numpy()

    return read


def _copy_order(
    plan: DispatchPlan, *, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the order that sorts received rows by expert, its inverse, and experts' row ends."""
    num_local, num_recv = plan.num_local, plan.num_recv
    # The host computes the order while the all-to-all runs. It does so in pinned memory: a copy
    # from pageable memory would make the host wait for the all-to-all.
    host = torch.empty(
        num_local + 2 * num_recv, dtype=torch.int32, pin_memory=device.type == "cuda"
    )
    order_by_expert(plan, host.numpy())
    ends_L, order_R, inverse_R = host.to(device, non_blocking=True).split(
        [num_local, num_recv, num_recv]
    )
    return order_R, inverse_R, ends_L


def all_to_all_tasks(shape: LayerShape, predictor: Predictor, *, num_chunks: int) -> list[Task]:
    """Return forward and backward simulator tasks of the strategy with ``num_chunks`` chunks.

    The host launches each task before it starts. ``num_ops`` counts operations of the code, also
    of NumPy but not views; operations of backward count twice, because autograd calls them.
    """
    hardware, rows = predictor.hardware, shape.num_tokens * shape.top_k
    row_bytes, is_split = shape.hidden_size * shape.itemsize, num_chunks > 1
    pass_us = rows * row_bytes / hardware.fused_bytes_per_s * 1e6  # to read or write all rows
    num_local = local_experts(shape.num_experts, ep_size=shape.ep_size)
    exchange_us: list[float] = []
    experts: list[tuple[float, float]] = []
    for size in chunk_sizes(num_local, num_chunks):
        moved = rows * size / num_local
        exchange_us.append(predictor.all_to_all_us(moved * row_bytes * (1 - 1 / shape.ep_size)))
        experts.append(experts_us(shape, predictor, num_rows=moved, num_groups=size))
    # Beside the experts of a chunk run the dispatch of the next and the combine of the one before.
    beside = [sum(exchange_us[max(c - 1, 0) : c + 2]) - exchange_us[c] for c in range(num_chunks)]
    experts = [
        (forward + BESIDE * min(forward, us), backward + BESIDE * min(backward, us))
        for (forward, backward), us in zip(experts, beside, strict=True)
    ]
    # Autograd concatenates the weight gradients of several chunks: count the time of the copy.
    num_weights = num_local * (shape.up_size + shape.intermediate_size) * shape.hidden_size
    concat_us = predictor.memory_us(2.0 * num_weights * shape.itemsize) if is_split else 0.0
    tasks: list[Task] = []

    def add(stream: str, name: str, duration_us: float, *needs: str, num_ops: int = 0) -> None:
        host_us = num_ops * hardware.eager_us + (stream == "comm") * hardware.collective_us
        start = Task(name=f"start.{name}", stream=HOST, duration_us=host_us)
        needs = (start.name, *needs)
        tasks.extend([start, Task(name=name, stream=stream, duration_us=duration_us, needs=needs)])

    chunks = range(num_chunks)
    add("comm", "route", hardware.link_latency_us, num_ops=7)
    tasks.append(Task(name="read", stream=HOST, duration_us=hardware.read_us, needs=("route",)))
    add("compute", "gather", 2 * pass_us, num_ops=9 if is_split else 5)
    for c in chunks:
        add("comm", f"dispatch.{c}", exchange_us[c], "gather")
    for c in chunks:
        add("compute", f"experts.{c}", experts[c][0], f"dispatch.{c}", num_ops=12)
        add("comm", f"combine.{c}", exchange_us[c], f"experts.{c}", num_ops=7)
    returned = [f"combine.{c}" for c in chunks]
    add("compute", "restore", (2 + _BMM) * pass_us, *returned, num_ops=3)
    add("compute", "restore.backward", (6 + _BMM) * pass_us, "restore", num_ops=14)
    for c in reversed(chunks):
        add("comm", f"combine.backward.{c}", exchange_us[c], "restore.backward")
    for c in reversed(chunks):
        name = f"experts.backward.{c}"
        add("compute", name, experts[c][1], f"combine.backward.{c}", num_ops=24)
        add("comm", f"dispatch.backward.{c}", exchange_us[c], name)
    returned, num_ops = [f"dispatch.backward.{c}" for c in chunks], 12 if is_split else 4
    add("compute", "gather.backward", 3 * pass_us + concat_us, *returned, num_ops=num_ops)
    return tasks


def choose_num_chunks(shape: LayerShape, predictor: Predictor) -> int:
    """Return the number of chunks with the shortest predicted time of forward plus backward."""
    num_local = local_experts(shape.num_experts, ep_size=shape.ep_size)
    candidates = [n for n in _NUM_CHUNKS if n <= num_local]
    return min(
        candidates, key=lambda n: makespan_us(all_to_all_tasks(shape, predictor, num_chunks=n))
    )
