"""Differentiable moves of rows: collectives between ranks, and permutations on one rank.

An all-to-all is split into start and wait, so that other work can run in between. The backward of
``wait`` starts the all-to-all of the gradient, and the backward of ``start`` waits for it. Autograd
runs backward in the reverse order of forward, so code that pipelines the forward pass pipelines the
backward pass too.

Every collective may raise ``RuntimeError``, which names the operation and the ranks.
"""

from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F

from halley.core.timeline import Recorder
from halley.distributed.peers import Collective


# torch 2.13 renamed the function and warns about the old name; torch 2.11 has only the old one.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@final
class Exchange:
    """One all-to-all of rows among the ranks of a group, for one forward and its backward.

    Args:
        send_splits: rows to each rank, in order of rank.
        recv_splits: rows from each rank.
        group: the ranks; None for a single rank, which then keeps its rows.
        received: buffer for the rows received in forward; None allocates one.
        recorder: records the host's waits as spans "<name>.wait" and "<name>.backward.wait" of the
            stream "exposed".
        name: see ``recorder``; errors contain it too.
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
        self.send_splits = send_splits
        self.recv_splits = recv_splits
        self.group = group
        self.name = name
        self.recorder = recorder
        self.received = received
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def start(self, rows_SD: torch.Tensor) -> torch.Tensor:
        """Send rows, sorted by destination, and return a tensor to pass to ``wait``.

        Args:
            rows_SD: ``(sum(send_splits), D)``.
        """
        if self.group is None:
            return rows_SD
        return _Start.apply(rows_SD, self)  # pyright: ignore[reportReturnType]

    def wait(self, started: torch.Tensor) -> torch.Tensor:
        """Return the rows received, ``(sum(recv_splits), D)``, sorted by source rank.

        Args:
            started: the result of ``start``.
        """
        if self.group is None:
            return started
        return _Wait.apply(started, self)  # pyright: ignore[reportReturnType]

    def run(self, rows_SD: torch.Tensor) -> torch.Tensor:
        """Do ``start`` and ``wait`` in one autograd function."""
        if self.group is None:
            return rows_SD
        return _Run.apply(rows_SD, self)  # pyright: ignore[reportReturnType]

    def launch(self, rows: torch.Tensor, *, backward: bool) -> torch.Tensor:
        """Start the all-to-all in one direction; return the buffer that receives the rows."""
        send_splits, recv_splits = self.send_splits, self.recv_splits
        if backward:
            send_splits, recv_splits = recv_splits, send_splits
        # Keep no reference to the buffer: its autograd graph refers to this exchange, a cycle.
        buffer, self.received = self.received, None
        if buffer is None:
            buffer = rows.new_empty(sum(recv_splits), rows.shape[1])
        with Collective(self._title(backward), group=self.group):
            work = dist.all_to_all_single(
                buffer,
                rows.contiguous(),
                recv_splits,
                send_splits,
                group=self.group,
                async_op=True,
            )
        assert work is not None
        self._pending = (buffer, work)
        return buffer

    def finish(self, *, backward: bool) -> torch.Tensor:
        """Wait for the all-to-all in flight and return its buffer."""
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
    def backward(ctx, grad):  # ``grad`` only fixes the order: the all-to-all received the values
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


class _ConcatInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, *slices):
        ctx.sizes = [rows.shape[0] for rows in slices]
        ctx.mark_dirty(buffer)
        return buffer

    @staticmethod
    def backward(ctx, grad):
        return None, *grad.split(ctx.sizes)


def concat_in_place(buffer_ND: torch.Tensor, slices: list[torch.Tensor]) -> torch.Tensor:
    """Return ``buffer_ND`` as the concatenation of its slices, without a copy; differentiable.

    Args:
        buffer_ND: a buffer that requires no gradient.
        slices: consecutive slices of the buffer that exchanges have received; all rows of it.
    """
    return _ConcatInPlace.apply(buffer_ND, *slices)  # pyright: ignore[reportReturnType]


def gather_table(values_V: torch.Tensor, *, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-gather the values of all ranks; return ``(W, V)``. Not differentiable.

    Args:
        values_V: values of this rank, equally many on all ranks.
        group: the ranks; None for a single rank.
    """
    if group is None:
        return values_V[None]
    table_WV = values_V.new_empty(dist.get_world_size(group) * values_V.numel())
    with Collective("route", group=group):
        _all_gather_single(table_WV, values_V, group=group)
    return table_WV.view(-1, values_V.numel())


def all_gather_rows(
    rows_TX: torch.Tensor, *, max_rows: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """All-gather different numbers of rows; return ``(W * max_rows, X)``. Differentiable.

    Args:
        rows_TX: rows of this rank.
        max_rows: the largest number of rows of any rank. Shorter ones are padded with zeros.
        group: the ranks; None for a single rank, which gets its own rows.
    """
    if group is None:
        return rows_TX
    return _AllGatherRows.apply(rows_TX, max_rows, group)  # pyright: ignore[reportReturnType]


def reduce_scatter_rows(
    rows_AX: torch.Tensor, *, num_rows: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Sum the rows over all ranks; return the sums for this rank, ``(num_rows, X)``.

    Differentiable: the gradient is an all-gather. It uses an all-to-all and a float32 sum in order
    of rank: NCCL may reduce inside the network, which is not deterministic on every network.

    Args:
        rows_AX: a partial sum for each row of each rank, as ``all_gather_rows`` orders the rows.
        num_rows: rows of this rank.
        group: the ranks; None for a single rank.
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


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slots, inverse, top_k):
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x.index_select(0, slots // top_k)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        by_slot = grad.index_select(0, inverse)
        return by_slot.view(-1, ctx.top_k, grad.shape[1]).sum(1), None, None, None


class _CombineTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, slots, inverse):
        num_tokens, top_k = weights.shape
        by_slot = rows.index_select(0, inverse).view(num_tokens, top_k, rows.shape[1])
        ctx.save_for_backward(by_slot, weights, slots)
        # A (1, K) x (K, D) GEMM for each token: one pass over the rows, accumulated in float32.
        return torch.bmm(weights.to(rows.dtype).unsqueeze(1), by_slot).squeeze(1)

    @staticmethod
    def backward(ctx, grad):
        by_slot, weights, slots = ctx.saved_tensors
        weights_of_row = weights.to(grad.dtype).reshape(-1, 1).index_select(0, slots)
        grad_rows = grad.index_select(0, slots // weights.shape[1]).mul_(weights_of_row)
        grad_weights = torch.bmm(by_slot, grad.unsqueeze(2)).squeeze(2)
        return grad_rows, grad_weights.to(weights.dtype), None, None


def invert_permutation(order_N: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a permutation, int64 ``(N,)``."""
    places_N = torch.arange(order_N.numel(), device=order_N.device)
    return torch.empty_like(places_N).scatter_(0, order_N.long(), places_N)


def reorder_rows(
    rows_RD: torch.Tensor, order_R: torch.Tensor, *, inverse_R: torch.Tensor
) -> torch.Tensor:
    """Return ``rows_RD[order_R]``, ``(R, D)``; ``inverse_R`` is the inverse permutation."""
    return _PermuteRows.apply(rows_RD, order_R, inverse_R)  # pyright: ignore[reportReturnType]


def gather_tokens(
    x_TD: torch.Tensor, slots_N: torch.Tensor, *, inverse_N: torch.Tensor, top_k: int
) -> torch.Tensor:
    """Return the token of each slot, ``x_TD[slots_N // top_k]``, ``(N, D)``.

    The gradient of a token is the sum over its slots in order of slot, accumulated in float32.

    Args:
        x_TD: tokens.
        slots_N: a permutation of all slots; slot ``t * top_k + k`` is the k-th choice of token t.
        inverse_N: its inverse.
        top_k: K.
    """
    return _GatherTokens.apply(  # pyright: ignore[reportReturnType]
        x_TD, slots_N, inverse_N, top_k
    )


def combine_tokens(
    rows_ND: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    slots_N: torch.Tensor,
    inverse_N: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sum of each token's rows, ``(T, D)``; accumulated in float32.

    Args:
        rows_ND: row i belongs to slot ``slots_N[i]``.
        weights_TK: one weight for each slot, rounded to the dtype of the rows.
        slots_N: a permutation of all slots, as for ``gather_tokens``.
        inverse_N: its inverse.
    """
    return _CombineTokens.apply(  # pyright: ignore[reportReturnType]
        rows_ND, weights_TK, slots_N, inverse_N
    )
