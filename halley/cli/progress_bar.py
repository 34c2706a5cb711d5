"""Show progress on standard error: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from halley.distributed.world import World


_LINE_INTERVAL_S = 10.0

Update = Callable[[str, int, int], None]  # text, steps done, steps in total (0: unknown)


@contextmanager
def step_progress(world: World) -> Iterator[Update]:
    """Show the progress of the first rank as ``shown_progress`` does; ignore the other ranks."""
    if not world.is_first:
        yield lambda text, done, total: None
        return
    with shown_progress() as update:
        yield update


@contextmanager
def shown_progress() -> Iterator[Update]:
    """Yield a function that shows a text, the steps done and the total; a total of 0 is unknown.

    The bar is redrawn only inside that function, which runs between samples. A thread that redraws
    it would hold the interpreter's lock while a sample is timed.
    """
    console = Console(stderr=True)
    if not console.is_interactive:  # a file, a pipe or a terminal that cannot move its cursor
        yield line_progress()
        return
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        bar = progress.add_task("", total=None)

        def update(text: str, done: int, total: int) -> None:
            size = total or None
            progress.update(bar, description=escape(text), completed=done, total=size, refresh=True)

        yield update


def line_progress(now_s: Callable[[], float] = time.monotonic) -> Update:
    """Return a function that prints a line for a new text, and every ten seconds for a known one.

    Args:
        now_s: the clock, in seconds.
    """
    texts: set[str] = set()
    next_s = 0.0

    def update(text: str, done: int, total: int) -> None:
        nonlocal next_s
        if text in texts and now_s() < next_s:
            return
        texts.add(text)
        next_s = now_s() + _LINE_INTERVAL_S
        share = f" ({done} of {total})" if total else ""
        sys.stderr.write(f"halley: {text}{share}\n")
        sys.stderr.flush()

    return update
