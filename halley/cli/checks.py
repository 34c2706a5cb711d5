"""Check option values, files and folders before ranks start and before long work."""

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from halley.core.types import DTYPES
from halley.distributed.mesh import pick_device
from halley.moe.memory_check import total_memory


MAX_PLANNED_RANKS = 65536

_MAX_COUNT = 10**6  # samples or steps: more would run for days
_MAX_SEED = 2**63 // 1_000_003 - 1  # ranks multiply the seed by this factor, in 64 bits
_MAX_SECONDS = 10**7  # 116 days; the clocks of the threading module end not far above
_PNG = b"\x89PNG\r\n\x1a\n"
_HEAD_BYTES = 4096


def check_package(name: str, *, extra: str, option: str) -> None:
    """Check that an optional package is installed.

    Args:
        name: the package.
        extra: the extra of halley-moe that installs it.
        option: the option that needs it, with its value, for the error.

    Raises:
        ValueError: the package is missing; the message names the command that installs it.
    """
    if find_spec(name) is None:
        raise ValueError(
            f"{option} must have the package {name}: pip install 'halley-moe[{extra}]'"
        )


def read_dtype(name: str, *, on_gpu: bool) -> torch.dtype:
    """Return the dtype of that name.

    Args:
        name: a key of ``DTYPES``, or "default": bfloat16 on GPUs, float32 on CPUs.
        on_gpu: whether the command runs on GPUs.

    Raises:
        ValueError: there is no such dtype.
    """
    if name == "default":
        return torch.bfloat16 if on_gpu else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype ({name}) must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def check_at_least(value: int, least: int, *, option: str) -> None:
    """Raise ``ValueError`` if a number is smaller than ``least``."""
    if value < least:
        raise ValueError(f"{option} ({value}) must be at least {least}")


def check_at_most(value: int, most: int, *, option: str) -> None:
    """Raise ``ValueError`` if a number is larger than ``most``."""
    if value > most:
        raise ValueError(f"{option} ({value}) must be at most {most}")


def check_samples(samples: int, *, option: str = "samples") -> None:
    """Raise ``ValueError`` unless a number of samples or steps is between 1 and a million."""
    check_at_least(samples, 1, option=option)
    check_at_most(samples, _MAX_COUNT, option=option)


def check_seed(seed: int) -> None:
    """Raise ``ValueError`` if a seed is negative, or too large for the generators of all ranks."""
    check_at_least(seed, 0, option="seed")
    check_at_most(seed, _MAX_SEED, option="seed")


def check_seconds(seconds: float) -> float:
    """Return a time limit; raise ``ValueError`` unless it is above 0 and at most 116 days."""
    if not 0 < seconds <= _MAX_SECONDS:
        raise ValueError(f"time_limit ({seconds:g}) must be above 0 and at most {_MAX_SECONDS} s")
    return seconds


def check_rate(value: float, *, option: str, default: str) -> float:
    """Return the rate of a link in GB/s.

    Args:
        value: 0, or at least 0.001.
        option: the option of the command line.
        default: the meaning of 0, for the error.

    Raises:
        ValueError: the rate is neither 0 nor a finite number of at least 0.001.
    """
    if not (value == 0 or 0.001 <= value < math.inf):
        raise ValueError(f"{option} ({value:g}) must be at least 0.001 GB/s, or 0 for {default}")
    return value


def split_names(text: str, *, option: str) -> list[str]:
    """Split a comma-separated list; raise ``ValueError`` if it is empty or repeats a name."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError(f"{option} ({text}) must name at least one")
    _check_distinct(words, text=text, option=option)
    return words


def split_integers(text: str, *, option: str) -> list[int]:
    """Split a comma-separated list of distinct positive integers; raise ``ValueError`` if wrong."""
    words = split_names(text, option=option)
    if not all(word.isascii() and word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{option} ({text}) must be positive integers with commas between")
    numbers = [int(word) for word in words]
    _check_distinct(numbers, text=text, option=option)
    return numbers


def _check_distinct(values: Sequence[object], *, text: str, option: str) -> None:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ValueError(f"{option} ({text}) must name each once, and names {value} twice")


def check_known(names: Sequence[str], allowed: Sequence[str], *, option: str) -> None:
    """Raise ``ValueError`` if a name is not among the allowed ones."""
    if unknown := sorted(set(names) - set(allowed)):
        raise ValueError(f"{option} ({', '.join(unknown)}) must be of {', '.join(allowed)}, or all")


def rank_memory_bytes(num_ranks: int, *, device: str) -> int:
    """Return the memory of this rank's GPU, or this rank's share of the host's memory.

    Args:
        num_ranks: ranks of this host; torchrun's environment overrides it.
        device: "auto", "cpu" or "cuda".
    """
    place = pick_device(device)
    num_bytes = total_memory(place)
    assert num_bytes is not None, f"{place} has memory"
    if place.type == "cuda":
        return num_bytes
    return num_bytes // int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))


def check_readable(path: Path, *, option: str) -> None:
    """Raise ``ValueError`` if a file is missing, is a folder, or cannot be read."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise ValueError(f"{option} ({path}) must be a readable file: {error.strerror}") from error


def check_replaceable(
    path: Path, *, option: str, is_own: Callable[[bytes], bool], what: str
) -> None:
    """Check that a command may write a file; create its folder and leave the file unchanged.

    Args:
        path: the file that the command writes at its end.
        option: the option of the command line.
        is_own: returns whether a file with these first bytes may be replaced.
        what: the content that may be replaced, for the error.

    Raises:
        ValueError: the file is a folder, cannot be written, or holds something else.
    """
    head = b""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with path.open("r+b") as file:
                if path.is_file():  # reading from a pipe would block
                    head = file.read(_HEAD_BYTES)
        else:
            with tempfile.TemporaryFile(dir=path.parent) as file:
                file.write(b"halley")
                file.flush()
    except OSError as error:
        raise ValueError(f"{option} ({path}) must be a file to write: {error.strerror}") from error
    if head and not is_own(head):
        raise ValueError(
            f"{option} ({path}) must be a new file or hold {what}: it holds something else"
        )


def check_picture(path: Path, *, option: str) -> None:
    """Check that a chart may be drawn into a file.

    Raises:
        ValueError: the name does not end in ``.png``, or ``check_replaceable`` refuses the file.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"{option} ({path}) must be named .png")
    check_replaceable(path, option=option, is_own=is_chart, what="a chart of Halley's")


def is_chart(head: bytes) -> bool:
    """Return whether these are the first bytes of a picture that matplotlib has drawn."""
    return head.startswith(_PNG) and b"Matplotlib" in head
