"""Join the ranks of a run by the launcher's environment variables, and leave them at its end."""

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous


@dataclass(frozen=True, kw_only=True)
class World:
    """This rank and its run.

    Attributes:
        rank, num_ranks: as set by the launcher; 0 and 1 without one.
        device: the device that this rank computes on.
        store: the store of the rendezvous; None without a launcher.
    """

    rank: int
    num_ranks: int
    device: torch.device
    store: Store | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes for all ranks."""
        return self.rank == 0


def is_launched() -> bool:
    """Return whether a launcher (torchrun, halley, srun with the same names) started this rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_launcher() -> None:
    """Check the environment variables that a launcher has set for this rank, if there is one.

    Raises:
        ValueError: a variable is missing, is not a number or does not fit the others.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if not given:
        return
    if len(given) == 1:
        name = given[0]
        raise ValueError(
            f"environment variable {name} ({os.environ[name]}) must be set together with RANK and "
            "WORLD_SIZE, as torchrun does, or be unset"
        )
    num_ranks = _read_number("WORLD_SIZE", least=1)
    _read_number("RANK", least=0, below=num_ranks)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(f"environment variable {name} must be set where RANK is")
    _read_number("MASTER_PORT", least=0, below=1 << 16)
    if "LOCAL_RANK" in os.environ:
        _read_number("LOCAL_RANK", least=0)
    if "LOCAL_WORLD_SIZE" in os.environ:
        _read_number("LOCAL_WORLD_SIZE", least=1)


def _read_number(name: str, *, least: int, below: int | None = None) -> int:
    text = os.environ[name]
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
    if value < least or (below is not None and value >= below):
        rule = f"at least {least}" + ("" if below is None else f" and below {below}")
        raise ValueError(f"environment variable {name} ({text}) must be an integer, {rule}")
    return value


def pick_device(choice: str) -> torch.device:
    """Return this rank's device.

    Args:
        choice: "cpu", "cuda" (the device of LOCAL_RANK), or "auto" for CUDA if there is any.

    Raises:
        ValueError: the choice is unknown, or there is no CUDA device for this rank.
    """
    if choice not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device ({choice}) must be one of auto, cpu, cuda")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "cpu" or (choice == "auto" and num_devices == 0):
        return torch.device("cpu")
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local_size > num_devices:  # all ranks of a host raise alike
        raise ValueError(f"nproc ({local_size}) must be at most the number of GPUs ({num_devices})")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def join_world(device_choice: str, *, timeout_s: float = 600.0) -> Iterator[World]:
    """Initialize the process group (NCCL on CUDA, gloo on CPU) and destroy it at the end.

    Without a launcher there is one rank and no process group.

    Args:
        device_choice: as for ``pick_device``.
        timeout_s: time limit of a collective.
    """
    check_launcher()
    device = pick_device(device_choice)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not is_launched():
        yield World(rank=0, num_ranks=1, device=device)
        return
    store, rank, num_ranks = next(rendezvous("env://"))
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("world", store),
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    yield World(rank=rank, num_ranks=num_ranks, device=device, store=store)
    # Not in a finally block: after the loss of a rank this call would wait for it.
    dist.destroy_process_group()
