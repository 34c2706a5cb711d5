"""Record which operation this process runs, so that its watchdog can report it to other ranks.

``CURRENT_OPERATION`` is global, because no caller could pass it on: PyTorch calls the custom ops
and starts the autograd threads that write it. The watchdog's thread reads it. It changes no result:
it appears in error messages only.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Final, final


_POLL_LASTS_S = 1.0  # a process counts as waiting for this time after a poll


@final
class CurrentOperation:
    """The operation that this process runs, and whether it waits for other ranks in it.

    Attributes:
        name: the operation that began last; "" before the first.
        num_operations: how many operations have begun. Ranks that run the same program have the
            same number at the same point.
        wait_depth: how many ``waiting`` contexts are open, one inside the other.
    """

    def __init__(self) -> None:
        self.name = ""
        self.num_operations = 0
        self.wait_depth = 0
        self._polled_s = -_POLL_LASTS_S

    @property
    def is_waiting(self) -> bool:
        """Whether the process is inside a ``waiting`` block or has just called ``poll``."""
        return self.wait_depth > 0 or time.monotonic() - self._polled_s < _POLL_LASTS_S

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
        """Record that an interpreted kernel has read a flag that another rank has not yet set."""
        self._polled_s = time.monotonic()


@final
class _Wait:
    """The context of ``CurrentOperation.waiting``.

    A class, because a ``contextmanager`` takes longer to enter, and each collective enters one.
    """

    def __init__(
        self, operation: CurrentOperation, name: str, inside: AbstractContextManager[object]
    ) -> None:
        self._operation, self._name, self._inside = operation, name, inside

    def __enter__(self) -> object:
        if self._operation.wait_depth == 0:  # an inner wait belongs to the outer operation
            self._operation.begin(self._name)
        self._operation.wait_depth += 1
        return self._inside.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Any:
        self._operation.wait_depth -= 1
        return self._inside.__exit__(kind, error, trace)


CURRENT_OPERATION: Final = CurrentOperation()
