"""Decide, equally on all ranks, when time or a signal requires a checkpoint."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import final

import torch


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@final
class SaveRequests:
    """Records the requests of this rank; the training step sums those of all ranks.

    Slurm sends SIGTERM before it ends a job; a terminal sends SIGINT. After the first signal, the
    current step is completed. A second SIGINT interrupts at once.

    Args:
        every_s: seconds between checkpoints; 0 requests none by time.
    """

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._saved_s = time.monotonic()
        self._signal = 0
        self._agreed = (False, 0)

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into requests during the block, in the main thread only."""

        def note(number: int, frame: FrameType | None) -> None:
            if self._signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._signal = self._signal or number

        try:
            before = {n: signal.signal(n, note) for n in _SIGNALS}
        except ValueError:  # only the main thread receives signals
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def local(self, *, is_first: bool, device: torch.device) -> torch.Tensor:
        """Return the requests of this rank, ``(3,)`` float32, for the sum over ranks.

        Args:
            is_first: whether this is rank 0, whose clock decides.
        """
        is_due = bool(self._every_s) and time.monotonic() - self._saved_s >= self._every_s
        flags = (is_first and is_due, *(self._signal == number for number in _SIGNALS))
        return torch.tensor(flags, dtype=torch.float32, device=device)

    def agree(self, totals: Sequence[float]) -> None:
        """Set the requests to the sums over all ranks of the results of ``local``."""
        num_due, *num_signalled = totals
        numbers = [n for n, count in zip(_SIGNALS, num_signalled, strict=True) if count]
        self._agreed = (num_due > 0, max(numbers, default=0))

    @property
    def is_due(self) -> bool:
        """Whether the time for a checkpoint had come in the last step."""
        return self._agreed[0]

    @property
    def stop_signal(self) -> int:
        """The signal that asks the run to end, or 0; the same on all ranks."""
        return self._agreed[1]

    def saved(self) -> None:
        """Restart the time until the next checkpoint."""
        self._saved_s = time.monotonic()
