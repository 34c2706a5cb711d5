"""A progress bar of the first rank that leaves measurements alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

from halley.moe.world import World


@contextmanager
def step_progress(world: World) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar; yield a function that takes what is done, how much of it, and of how much.

    The bar is drawn when that function is called, between samples: a thread that drew it would
    hold the interpreter's lock while a sample runs.
    """
    console = Console(stderr=True)
    with Progress(
        console=console, transient=True, auto_refresh=False, disable=not world.is_first
    ) as progress:
        bar = progress.add_task("")

        def update(text: str, done: int, total: int) -> None:
            progress.update(bar, description=text, completed=done, total=total, refresh=True)

        yield update
