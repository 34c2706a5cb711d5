"""Start a command on several ranks of this host, and join these ranks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated

import torch
import typer

from halley.distributed.launcher import default_num_processes, launch
from halley.distributed.mesh import World, check_launcher, is_launched, join_world, pick_device
from halley.distributed.watchdog import Watchdog


_MAX_RANKS = 1024
# The Python module that the launcher runs on each rank, then the arguments of the command.
COMMAND: ContextVar[tuple[str, ...]] = ContextVar("COMMAND")

NprocOption = Annotated[
    int, typer.Option(help="Number of ranks to start; 0: one per GPU, or 2 without GPUs.")
]


def launch_ranks(nproc: int, *, device: str) -> int | None:
    """Run this command on ``nproc`` new processes, unless this process is a rank or one is enough.

    Args:
        nproc: number of ranks; 0 means one rank per GPU, or 2 without GPUs.
        device: "auto", "cpu" or "cuda".

    Returns:
        The exit code of the ranks, or None if the caller must do the work in this process.

    Raises:
        ValueError: as for ``count_ranks``.
    """
    check_launcher()
    if is_launched():
        return None
    num_processes = count_ranks(nproc, device=device)
    if num_processes == 1:
        return None
    return launch(list(COMMAND.get()), num_processes=num_processes)


def count_ranks(nproc: int, *, device: str) -> int:
    """Return the number of ranks on which this command runs.

    Args:
        nproc: as for ``launch_ranks``. Under torchrun, its environment gives the number instead.
        device: "auto", "cpu" or "cuda".

    Raises:
        ValueError: the device does not exist, or there are fewer GPUs than ranks.
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
    num_ranks = nproc or (default_num_processes() if on_gpu else 2)
    if on_gpu and num_ranks > num_gpus:
        raise ValueError(f"nproc ({num_ranks}) must be at most the number of GPUs ({num_gpus})")
    return num_ranks


@contextmanager
def joined(device: str) -> Iterator[tuple[World, Watchdog | None]]:
    """Join the ranks of this command; yield them, and the watchdog if there are several.

    Args:
        device: "auto", "cpu" or "cuda".

    Raises:
        RuntimeError: a rank is lost; the message names the rank and the step.
    """
    with join_world(device) as world:
        if world.store is None:
            yield world, None
            return
        with Watchdog(world.store, rank=world.rank, num_ranks=world.num_ranks) as watchdog:
            yield world, watchdog
