"""Track the operation that this process is in, which its watchdog tells the other ranks."""

import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Final, final


_POLL_LASTS_S = 1.0  # for how long a poll says that a kernel waits


@final
class Position:
    """Tells which operation this process is in, and whether it waits there for other ranks.

    The threads that run forward and backward write it, the watchdog's thread reads it.

    Attributes:
        name: the operation that was entered last; "" before the first.
        num_operations: waits and fused passes so far, the same on ranks that are in step.
    """

    def __init__(self) -> None:
        self.name = ""
        self.num_operations = 0
        self._wait_depth = 0
        self._polled_s = -_POLL_LASTS_S

    @property
    def is_waiting(self) -> bool:
        """Whether this process is inside of ``waiting``, or has called ``poll`` just now."""
        return self._wait_depth > 0 or time.monotonic() - self._polled_s < _POLL_LASTS_S

    def begin(self, name: str) -> None:
        """Note that an operation begins that all ranks run."""
        self.name = name
        self.num_operations += 1

    def waiting(
        self, name: str, inside: AbstractContextManager[object] | None = None
    ) -> AbstractContextManager[object]:
        """Note that the process waits for other ranks inside ``with``.

        Args:
            name: of the operation.
            inside: another context, entered and left with this one.
        """
        return _Wait(self, name, inside or nullcontext())

    def poll(self) -> None:
        """Note that an interpreted kernel finds again that what it waits for is not there."""
        self._polled_s = time.monotonic()

    def _enter_wait(self, name: str) -> None:
        if self._wait_depth == 0:  # a wait inside of another one is part of it
            self.begin(name)
        self._wait_depth += 1

    def _leave_wait(self) -> None:
        self._wait_depth -= 1


@final
class _Wait:
    """The context of ``Position.waiting``; a generator would take longer to enter."""

    def __init__(
        self, position: Position, name: str, inside: AbstractContextManager[object]
    ) -> None:
        self._position, self._name, self._inside = position, name, inside

    def __enter__(self) -> object:
        self._position._enter_wait(self._name)  # pyright: ignore[reportPrivateUsage]
        return self._inside.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Any:
        self._position._leave_wait()  # pyright: ignore[reportPrivateUsage]
        return self._inside.__exit__(kind, error, trace)


# One for the process: operators of torch know no objects, and layers of any model write it.
POSITION: Final = Position()
