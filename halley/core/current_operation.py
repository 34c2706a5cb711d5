"""Record which operation this process runs, so that its watchdog can report it to other ranks.

The record is one object per process. Custom ops and autograd threads have no argument to pass it
through, and the watchdog's thread must see all of them.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Final, final


_POLL_LASTS_S = 1.0  # for this time after a poll, the kernel counts as waiting


@final
class CurrentOperation:
    """The operation that this process runs, and whether it waits for other ranks there.

    The threads that run forward and backward write it. The watchdog's thread reads it.

    Attributes:
        name: the operation that began last; "" before the first.
        num_operations: how many operations have begun. The number is the same on all ranks
            that run the same program.
    """

    def __init__(self) -> None:
        self.name = ""
        self.num_operations = 0
        self._wait_depth = 0
        self._polled_s = -_POLL_LASTS_S

    @property
    def is_waiting(self) -> bool:
        """Whether the process is inside a ``waiting`` block or has just called ``poll``."""
        return self._wait_depth > 0 or time.monotonic() - self._polled_s < _POLL_LASTS_S

    def begin(self, name: str) -> None:
        """Record that an operation begins. All ranks must run it."""
        self.name = name
        self.num_operations += 1

    def waiting(
        self, name: str, inside: AbstractContextManager[object] | None = None
    ) -> AbstractContextManager[object]:
        """Return a context in which the process waits for other ranks.

        Args:
            name: name of the operation in messages.
            inside: another context to enter and leave together with this one.
        """
        return _Wait(self, name, inside or nullcontext())

    def poll(self) -> None:
        """Record that an interpreted kernel read a flag that is not set yet."""
        self._polled_s = time.monotonic()

    def enter_wait(self, name: str) -> None:
        """Begin to wait. A wait inside another wait belongs to the outer operation."""
        if self._wait_depth == 0:
            self.begin(name)
        self._wait_depth += 1

    def leave_wait(self) -> None:
        """End the innermost wait."""
        self._wait_depth -= 1


@final
class _Wait:
    """The context that ``CurrentOperation.waiting`` returns; faster to enter than a generator."""

    def __init__(
        self, operation: CurrentOperation, name: str, inside: AbstractContextManager[object]
    ) -> None:
        self._operation, self._name, self._inside = operation, name, inside

    def __enter__(self) -> object:
        self._operation.enter_wait(self._name)
        return self._inside.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Any:
        self._operation.leave_wait()
        return self._inside.__exit__(kind, error, trace)


CURRENT_OPERATION: Final = CurrentOperation()
