"""Differentiable exchanges of rows, and sums of weight gradients over the replicas of an expert.

An all-to-all is split into start and wait, so that other work can run in between. The backward of
``wait`` starts the all-to-all of the gradient, and the backward of ``start`` waits for it. So code
that pipelines the forward pass pipelines the backward pass too. A ``RuntimeError`` of a collective
names the operation and the ranks.

In this file, S is the number of rows that a rank sends, and N the number of rows of a buffer.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F

from halley.core.placement import ExpertPlacement
from halley.core.timeline import Recorder
from halley.core.types import Experts
from halley.distributed.peers import Collective


# torch 2.13 renamed all_gather_into_tensor and warns about the old name; 2.11 has only the old one.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@final
class Exchange:
    """One all-to-all of rows among a group's ranks; backward sends gradients the opposite way.

    Args:
        send_splits, recv_splits: rows to and from each rank, in order of rank.
        group: the ranks; None for a single rank, which then keeps its rows.
        received: buffer for the rows received in forward; None allocates one.
        name: for errors, and for the spans "<name>.wait" and "<name>.backward.wait" of host waits.
    """

    def __init__(
        self,
        *,
        send_splits: list[int],
        recv_splits: list[int],
        group: dist.ProcessGroup | None,
        name: str,
        recorder: Recorder,
        received: torch.Tensor | None = None,
    ) -> None:
        self.send_splits, self.recv_splits, self.received = send_splits, recv_splits, received
        self.group, self.name, self.recorder = group, name, recorder
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def start(self, rows_SD: torch.Tensor) -> torch.Tensor:
        """Start to send rows, sorted by destination rank already; return the input of ``wait``."""
        if self.group is None:
            return rows_SD
        return _Start.apply(rows_SD, self)  # pyright: ignore[reportReturnType]

    def wait(self, started: torch.Tensor) -> torch.Tensor:
        """Wait for the all-to-all of ``start``; return the received rows, sorted by source rank."""
        if self.group is None:
            return started
        return _Wait.apply(started, self)  # pyright: ignore[reportReturnType]

    def run(self, rows_SD: torch.Tensor) -> torch.Tensor:
        """Send rows, sorted by destination, and wait; return received rows, sorted by source."""
        if self.group is None:
            return rows_SD
        return _Run.apply(rows_SD, self)  # pyright: ignore[reportReturnType]

    def launch(self, rows: torch.Tensor, *, backward: bool) -> torch.Tensor:
        """Start the all-to-all, reversed if ``backward``; return the buffer to receive into."""
        send_splits, recv_splits = self.send_splits, self.recv_splits
        if backward:
            send_splits, recv_splits = recv_splits, send_splits
        # Drop this reference to avoid a cycle: the buffer's autograd graph refers to this exchange.
        buffer, self.received = self.received, None
        if buffer is None:
            buffer = rows.new_empty(sum(recv_splits), rows.shape[1])
        sent = rows.contiguous()
        with Collective(self._title(backward), group=self.group):
            work = dist.all_to_all_single(
                buffer, sent, recv_splits, send_splits, group=self.group, async_op=True
            )
        assert work is not None
        self._pending = (buffer, work)
        num_rows = len(rows) - send_splits[dist.get_rank(self.group)]  # rows to other ranks only
        self.recorder.sent_bytes += num_rows * rows.shape[1] * rows.itemsize
        return buffer

    def finish(self, *, backward: bool) -> torch.Tensor:
        """Wait for the all-to-all in flight; return the buffer with the received rows."""
        assert self._pending is not None, f"{self.name} was waited for twice"
        buffer, work = self._pending
        self._pending = None
        title = self._title(backward)
        with (
            self.recorder.span(f"{title}.wait", stream="exposed"),
            Collective(title, group=self.group),
        ):
            work.wait()
        return buffer

    def _title(self, backward: bool) -> str:
        return f"{self.name}.backward" if backward else self.name


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, exchange):
        ctx.exchange = exchange
        return exchange.launch(rows, backward=False)

    @staticmethod
    def backward(ctx, grad):  # ``grad`` only sets the order; ``finish`` returns the values
        return ctx.exchange.finish(backward=True), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, started, exchange):
        ctx.exchange = exchange
        exchange.finish(backward=False)
        return started.view_as(started)

    @staticmethod
    def backward(ctx, grad):
        ctx.exchange.launch(grad, backward=True)
        return grad, None


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, exchange):
        ctx.exchange = exchange
        exchange.launch(rows, backward=False)
        return exchange.finish(backward=False)

    @staticmethod
    def backward(ctx, grad):
        ctx.exchange.launch(grad, backward=True)
        return ctx.exchange.finish(backward=True), None


def concat_in_place(buffer_ND: torch.Tensor, slices: list[torch.Tensor]) -> torch.Tensor:
    """Return ``buffer_ND``, which already holds ``slices``; its gradient is split among them.

    The buffer itself requires no gradient. ``slices`` are consecutive views of it, in total all
    rows, into which exchanges have written the rows that they received.
    """
    return _ConcatInPlace.apply(buffer_ND, *slices)  # pyright: ignore[reportReturnType]


class _ConcatInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, *slices):
        ctx.sizes = [rows.shape[0] for rows in slices]
        ctx.mark_dirty(buffer)
        return buffer

    @staticmethod
    def backward(ctx, grad):
        return None, *grad.split(ctx.sizes)


def gather_table(values_V: torch.Tensor, *, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-gather a vector of V values from each rank; return ``(W, V)``. Not differentiable."""
    if group is None:
        return values_V[None]
    table_WV = values_V.new_empty(dist.get_world_size(group) * values_V.numel())
    with Collective("route", group=group):
        _all_gather_single(table_WV, values_V, group=group)
    return table_WV.view(-1, values_V.numel())


def all_gather_rows(
    rows_TX: torch.Tensor, *, max_rows: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """All-gather rows, padded by zeros to ``max_rows`` per rank; return ``(W * max_rows, X)``.

    ``max_rows`` is the largest number of rows of any rank. Differentiable.
    """
    if group is None:
        return rows_TX
    return _AllGatherRows.apply(rows_TX, max_rows, group)  # pyright: ignore[reportReturnType]


def reduce_scatter_rows(
    rows_AX: torch.Tensor, *, num_rows: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Sum rows over all ranks; return the sums of this rank's rows, ``(num_rows, X)``.

    ``rows_AX`` are partial sums for the rows of all ranks, in the order of ``all_gather_rows``.
    Differentiable: the gradient is an all-gather. Forward is an all-to-all and a float32 sum in
    order of rank: NCCL may reduce inside the network, which is not deterministic on every network.
    """
    if group is None:
        return rows_AX
    return _ReduceScatterRows.apply(rows_AX, num_rows, group)  # pyright: ignore[reportReturnType]


def _all_gather(rows: torch.Tensor, max_rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    padded = F.pad(rows, (0, 0, 0, max_rows - rows.shape[0])).contiguous()
    out = padded.new_empty(dist.get_world_size(group) * max_rows, rows.shape[1])
    with Collective("all-gather of rows", group=group):
        _all_gather_single(out, padded, group=group)
    return out


def _reduce_scatter(rows: torch.Tensor, num_rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    received = torch.empty_like(rows, memory_format=torch.contiguous_format)
    with Collective("all-to-all of sums", group=group):
        dist.all_to_all_single(received, rows.contiguous(), group=group)
    by_rank = received.view(dist.get_world_size(group), -1, rows.shape[1])
    return by_rank.float().sum(0)[:num_rows].to(rows.dtype)


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, max_rows, group):
        ctx.num_rows, ctx.group = rows.shape[0], group
        return _all_gather(rows, max_rows, group)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.num_rows, ctx.group), None, None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, num_rows, group):
        ctx.max_rows, ctx.group = rows.shape[0] // dist.get_world_size(group), group
        return _reduce_scatter(rows, num_rows, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_gather(grad, ctx.max_rows, ctx.group), None, None


@final
class Replicas:
    """Sums the gradients of an expert's replicas over ranks, or copies the lowest rank's gradient.

    ``rank`` is this rank in the expert-parallel ``group``. The host waits in span "replicas.wait".

    Attributes:
        first: local indices of the experts of this rank that no lower rank holds, int64.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        *,
        rank: int,
        group: dist.ProcessGroup,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        self.rank, self.group, self.recorder = rank, group, recorder
        own = placement.experts_WL[rank]
        ranks_of = {place: placement.ranks_of(expert) for place, expert in enumerate(own)}
        firsts = [place for place, ranks in ranks_of.items() if ranks[0] == rank]
        self.first = torch.tensor(firsts, dtype=torch.int64, device=device)
        # For each expert on several ranks, by local index: the ranks that hold it, ascending.
        self._ranks = {place: ranks for place, ranks in ranks_of.items() if len(ranks) > 1}
        # The gradients to exchange, as (other rank, local index), in order of rank. Two ranks both
        # order their common experts by expert id, so that sent and received gradients match.
        shared = sorted(self._ranks, key=lambda place: own[place])
        self._pairs = [
            (other, place)
            for other in range(placement.num_ranks)
            for place in shared
            if other != rank and other in self._ranks[place]
        ]

    def sum(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return expert gradients, summed over the replicas of each expert; a collective.

        The sum is in float32, in order of rank, and rounded once: bitwise equal on all replicas.
        Gradients are ``(L, ...)``, of one dtype.
        """
        return self._merge(gradients, _sum_into)

    def take_first(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return gradients; all replicas get the gradient of their lowest rank. A collective.

        Needed if gradients were reduced again after ``sum``: each rank may round differently.
        """
        return self._merge(gradients, lambda out, sources: out.copy_(sources[0]))

    def _merge(
        self,
        gradients: Sequence[torch.Tensor],
        merge: Callable[[torch.Tensor, Sequence[torch.Tensor]], object],
    ) -> list[torch.Tensor]:
        received = self._exchange(gradients)
        # The copies are contiguous, because ``view`` below requires it.
        merged = [g.clone(memory_format=torch.contiguous_format) for g in gradients]
        for place, ranks in self._ranks.items():
            for index, gradient in enumerate(gradients):
                own = gradient[place].flatten()
                sources = [own if r == self.rank else received[r, place][index] for r in ranks]
                merge(merged[index][place].view(-1), sources)
        return merged

    def _exchange(
        self, gradients: Sequence[torch.Tensor]
    ) -> dict[tuple[int, int], Sequence[torch.Tensor]]:
        """Return gradients received from other ranks, by (source rank, local expert index)."""
        flat = [gradient.flatten(1) for gradient in gradients]
        sizes = [gradient.shape[1] for gradient in flat]
        splits = [0] * self.group.size()
        for other, _ in self._pairs:
            splits[other] += sum(sizes)
        rows = [gradient[place] for _, place in self._pairs for gradient in flat]
        sent = torch.cat(rows) if rows else gradients[0].new_empty(0)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(
            received, sent, splits, splits, group=self.group, async_op=True
        )
        assert work is not None
        with self.recorder.span("replicas.wait", stream="exposed"):
            work.wait()
        # ``strict`` must be False: without pairs, ``split`` still returns one (empty) piece.
        pieces = zip(self._pairs, received.split(sum(sizes)), strict=False)
        return {pair: piece.split(sizes) for pair, piece in pieces}


def _sum_into(out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
    if len(sources) == 2:  # one pass over memory; torch.add adds in float32 and rounds once
        torch.add(sources[0], sources[1], out=out)
        return
    total = sources[0].to(torch.float32, copy=True)  # a copy: the input stays unchanged
    for source in sources[1:]:
        total += source
    out.copy_(total)


def share_gradients(experts: Experts, replicas: Replicas) -> Experts:
    """Return the experts; in backward, sum the gradients of replicas over their ranks.

    Equal replicas receive equal gradients, so they stay equal with any optimizer. Backward is
    a collective. A weight with ``main_grad``, a buffer outside of autograd, is a ``ValueError``.
    """
    weights = {name: t for name, t in experts.tensors().items() if t.requires_grad}
    if any(getattr(weight, "main_grad", None) is not None for weight in weights.values()):
        raise ValueError(
            "main_grad (a buffer) must be None on experts of which other ranks hold replicas: "
            "their gradients are summed by autograd, which does not see the buffer"
        )
    if not weights:
        return experts
    shared: Any = _ShareGradients.apply(replicas, *weights.values())
    return experts.with_tensors(dict(zip(weights, shared, strict=True)))


class _ShareGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, replicas, *weights):
        ctx.replicas = replicas
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients):
        return None, *ctx.replicas.sum(gradients)
