"""Start a command on several ranks of this host, join these ranks, and show their progress."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as ProgressBar
from typer import Option

from halley.distributed.launcher import launch
from halley.distributed.mesh import World, check_launcher, is_launched, join_world, pick_device
from halley.distributed.watchdog import Watchdog
from halley.tools.timer import Progress


_MAX_RANKS = 1024
_LINE_INTERVAL_S = 10.0
# The Python module that the launcher runs on each rank, then the arguments of the command.
COMMAND: ContextVar[tuple[str, ...]] = ContextVar("COMMAND")

NprocOption = Annotated[
    int, Option(help="Number of ranks to start; 0: one per GPU, or 2 without GPUs.")
]


def launch_ranks(nproc: int, *, device: str) -> None:
    """Run this command on new ranks and exit, unless this process is a rank or one rank is enough.

    When the ranks have ended, this process exits with their code (``typer.Exit``).
    """
    num_processes = count_ranks(nproc, device=device)
    if not is_launched() and num_processes > 1:
        command = [sys.executable, "-m", *COMMAND.get()]
        raise typer.Exit(launch(command, num_processes=num_processes))


def count_ranks(nproc: int, *, device: str) -> int:
    """Return the number of ranks of this command: WORLD_SIZE under a launcher, else ``nproc``.

    A device that does not exist, or fewer GPUs than ranks, are a ``ValueError``.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device (cuda) must be one that torch finds: it finds no GPU")
    check_launcher()
    on_gpu = pick_device(device).type == "cuda"
    if is_launched():
        return int(os.environ["WORLD_SIZE"])
    if nproc < 0:
        raise ValueError(f"nproc ({nproc}) must be at least 1, or 0 for one rank a GPU")
    if nproc > _MAX_RANKS:
        raise ValueError(f"nproc ({nproc}) must be at most {_MAX_RANKS} on one host")
    num_gpus = torch.cuda.device_count() if on_gpu else 0
    num_ranks = nproc or (num_gpus if on_gpu else 2)
    if on_gpu and num_ranks > num_gpus:
        raise ValueError(f"nproc ({num_ranks}) must be at most the number of GPUs ({num_gpus})")
    return num_ranks


@contextmanager
def joined(device: str) -> Iterator[tuple[World, Watchdog | None]]:
    """Join the process group; yield the rank's ``World`` and watchdog (None without a launcher)."""
    with join_world(device) as world:
        if world.store is None:
            yield world, None
            return
        with Watchdog(world.store, rank=world.rank, num_ranks=world.num_ranks) as watchdog:
            yield world, watchdog


@contextmanager
def step_progress(world: World | None = None) -> Iterator[Progress]:
    """Yield a function ``(text, done, total)`` that shows progress; total 0 means unknown.

    Only the first rank of a world shows progress. Only calls of the function redraw the bar: a
    thread that redraws it would hold the global interpreter lock while a sample is timed.
    """
    if world is not None and not world.is_first:
        yield lambda text, done, total: None
        return
    console = Console(stderr=True)
    if not console.is_interactive:  # stderr is a file, a pipe or a terminal without a cursor
        yield line_progress()
        return
    with ProgressBar(console=console, transient=True, auto_refresh=False) as progress:
        bar = progress.add_task("", total=None)

        def update(text: str, done: int, total: int) -> None:
            size, label = total or None, escape(text + _number(done, total))
            progress.update(bar, description=label, completed=done, total=size, refresh=True)

        yield update


def _number(done: int, total: int) -> str:
    return f" ({done})" if done and not total else ""


def line_progress(now_s: Callable[[], float] = time.monotonic) -> Progress:
    """Return a function that prints new texts at once, and repeated texts at most every 10 s."""
    texts: set[str] = set()
    next_s = 0.0

    def update(text: str, done: int, total: int) -> None:
        nonlocal next_s
        if text in texts and now_s() < next_s:
            return
        texts.add(text)
        next_s = now_s() + _LINE_INTERVAL_S
        share = f" ({done} of {total})" if total else _number(done, total)
        sys.stderr.write(f"halley: {text}{share}\n")
        sys.stderr.flush()

    return update
