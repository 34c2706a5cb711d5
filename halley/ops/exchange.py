"""Uneven all-to-all of rows, split into start and wait, so that other work can run in between.

The two halves are each other's gradient: the backward of ``wait`` starts the all-to-all of the
gradient and the backward of ``start`` waits for it. Autograd runs backward in the reverse order of
forward, so a pipeline written once is a pipeline in both directions.
"""

from typing import final

import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.distributed.peers import Collective
from halley.ops.gather import all_gather_single


@final
class Exchange:
    """One all-to-all of rows among the ranks of a group, for one forward and its backward.

    Args:
        send_splits: rows to each rank, in order of rank.
        recv_splits: rows from each rank.
        group: the ranks; None for a rank on its own, which then keeps its rows.
        received: buffer for the rows received in forward; None for a new one.
        name: what the recorder calls it; waiting is recorded as "<name>.wait" and
            "<name>.backward.wait" on the stream "exposed".
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
        """Send ``rows_SD``, sorted by destination; return a token for ``wait``.

        Args:
            rows_SD: ``(sum(send_splits), D)``.
        """
        if self.group is None:
            return rows_SD
        return _Start.apply(rows_SD, self)  # pyright: ignore[reportReturnType]

    def wait(self, started: torch.Tensor) -> torch.Tensor:
        """Return the rows received, ``(sum(recv_splits), D)``, sorted by source rank.

        Args:
            started: what ``start`` returned.
        """
        if self.group is None:
            return started
        return _Wait.apply(started, self)  # pyright: ignore[reportReturnType]

    def run(self, rows_SD: torch.Tensor) -> torch.Tensor:
        """Send ``rows_SD`` and return the rows received; ``start`` and ``wait`` in one."""
        if self.group is None:
            return rows_SD
        return _Run.apply(rows_SD, self)  # pyright: ignore[reportReturnType]

    def launch(self, rows: torch.Tensor, *, backward: bool) -> torch.Tensor:
        """Begin the all-to-all in one direction; return the buffer that is being filled."""
        to, come = self.send_splits, self.recv_splits
        if backward:
            to, come = come, to
        # Forgotten once it is used: the joined buffer's graph leads back to this exchange.
        buffer, self.received = self.received, None
        if buffer is None:
            buffer = rows.new_empty(sum(come), rows.shape[1])
        with Collective(self._title(backward), group=self.group):
            work = dist.all_to_all_single(
                buffer, rows.contiguous(), come, to, group=self.group, async_op=True
            )
        assert work is not None
        self._pending = (buffer, work)
        return buffer

    def finish(self, *, backward: bool) -> torch.Tensor:
        """Wait for the all-to-all in flight; return its buffer, now filled.

        Raises:
            RuntimeError: the all-to-all failed; names the operation and the ranks.
        """
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
    def backward(ctx, grad):  # grad only marks the order; the rows come from the all-to-all
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


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, whole, *parts):
        ctx.sizes = [part.shape[0] for part in parts]
        ctx.mark_dirty(whole)
        return whole

    @staticmethod
    def backward(ctx, grad):
        return None, *grad.split(ctx.sizes)


def join_rows(whole_ND: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return ``whole_ND``, whose consecutive rows are ``parts``, without a copy.

    Args:
        whole_ND: a buffer that wants no gradient.
        parts: what exchanges received into slices of it.
    """
    return _Join.apply(whole_ND, *parts)  # pyright: ignore[reportReturnType]


def gather_table(values_V: torch.Tensor, *, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the values of all ranks, ``(W, V)``, on each of them.

    Args:
        values_V: this rank's, as many on each rank.

    Raises:
        RuntimeError: the all-gather failed; names the operation and the ranks.
    """
    if group is None:
        return values_V[None]
    table_WV = values_V.new_empty(dist.get_world_size(group) * values_V.numel())
    with Collective("route", group=group):
        all_gather_single(table_WV, values_V, group=group)
    return table_WV.view(-1, values_V.numel())
