"""Bound the time that a command takes, even where it waits for other ranks or inside a kernel."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from halley.distributed.failures import tell_failure


_EXIT_CODE = 1


@contextmanager
def time_limit(limit_s: float, *, explain: Callable[[], str]) -> Iterator[None]:
    """End this process with exit code 1 where the block takes longer than a limit.

    A thread ends the process: an exception would wait for the collective or kernel that runs.

    Args:
        limit_s: seconds.
        explain: returns what runs now, as "running this", and what to do about it.
    """
    timer = threading.Timer(limit_s, _end, args=(limit_s, explain))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(limit_s: float, explain: Callable[[], str]) -> None:
    tell_failure(f"the time limit of {limit_s:g} s is over while {explain()}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_EXIT_CODE)
