"""Decide, on all ranks alike, when time or a signal asks for a checkpoint."""

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
    """Collects this rank's requests; the training step adds up those of all ranks.

    Slurm sends SIGTERM before it ends a job, a terminal sends SIGINT. A first signal lets the step
    in progress end; a second SIGINT interrupts at once.

    Args:
        every_s: seconds between checkpoints; 0 never asks for one.
    """

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._saved_s = time.monotonic()
        self._signal = 0
        self._agreed = (False, 0)

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into requests while the block runs, in the main thread only."""

        def note(number: int, frame: FrameType | None) -> None:
            if self._signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._signal = self._signal or number

        try:
            before = {n: signal.signal(n, note) for n in _SIGNALS}
        except ValueError:  # not the main thread, which alone gets signals
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def local(self, *, is_first: bool, device: torch.device) -> torch.Tensor:
        """Return the requests of this rank, to be added up over the ranks, ``(3,)`` float32.

        Args:
            is_first: whether this is rank 0, whose clock decides.
        """
        is_due = bool(self._every_s) and time.monotonic() - self._saved_s >= self._every_s
        flags = (is_first and is_due, *(self._signal == number for number in _SIGNALS))
        return torch.tensor(flags, dtype=torch.float32, device=device)

    def agree(self, totals: Sequence[float]) -> None:
        """Take the sums over all ranks of what ``local`` returned."""
        num_due, *num_signalled = totals
        numbers = [n for n, count in zip(_SIGNALS, num_signalled, strict=True) if count]
        self._agreed = (num_due > 0, max(numbers, default=0))

    @property
    def is_due(self) -> bool:
        """Whether the time for a checkpoint had come when the last step was taken."""
        return self._agreed[0]

    @property
    def stop_signal(self) -> int:
        """The signal that asks the run to end, or 0; the same on all ranks."""
        return self._agreed[1]

    def saved(self) -> None:
        """Start to count the time to the next checkpoint."""
        self._saved_s = time.monotonic()
