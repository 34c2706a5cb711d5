"""Check option values, files and folders before ranks start and before long work."""

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from halley.core.types import DTYPES
from halley.core.validation import check_package
from halley.distributed.mesh import pick_device
from halley.moe.memory_check import total_memory


MAX_PLANNED_RANKS = 65536
# Keyword arguments of ``check_replaceable`` for a chart, which is a PNG of matplotlib.
CHART = {"what": "a chart of Halley's", "start": b"\x89PNG\r\n\x1a\n", "inside": b"Matplotlib"}

_MAX_COUNT = 10**6  # most samples or steps, far more than a measurement needs
_MAX_SEED = 2**63 // 1_000_003 - 1  # ranks multiply the seed by 1_000_003, in 64 bits
_HEAD_BYTES = 4096


def read_dtype(name: str, *, on_gpu: bool) -> torch.dtype:
    """Return the torch dtype of a name; "default" is bfloat16 on GPUs and float32 on CPUs."""
    if name == "default":
        return torch.bfloat16 if on_gpu else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype ({name}) must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def check_range(value: int, least: int, most: float = math.inf, *, option: str) -> None:
    """Raise ``ValueError`` unless ``least`` <= ``value`` <= ``most``; errors name ``option``."""
    if value < least:
        raise ValueError(f"{option} ({value}) must be at least {least}")
    if value > most:
        raise ValueError(f"{option} ({value}) must be at most {most}")


def check_samples(samples: int, *, option: str = "samples") -> None:
    """Raise ``ValueError`` unless a number of samples or steps is between 1 and a million."""
    check_range(samples, 1, _MAX_COUNT, option=option)


def check_seed(seed: int) -> None:
    """Raise ``ValueError`` if a seed is negative, or too large to derive 64-bit seeds of ranks."""
    check_range(seed, 0, _MAX_SEED, option="seed")


def split_names(text: str, *, option: str) -> list[str]:
    """Return the names of a comma-separated list; ``ValueError`` if it is empty or repeats a name.

    Adjacent sizes with different letters, such as "E=8,K=2", are one name, which describes a model.
    """
    words: list[str] = []
    for word in filter(None, map(str.strip, text.split(","))):
        last = words[-1] if words else ""
        joins = "=" in word and "=" in last and f"{word[0]}=" not in last
        words[-1:] = [f"{last},{word}"] if joins else [*words[-1:], word]
    if not words:
        raise ValueError(f"{option} ({text}) must name at least one")
    _check_distinct(words, text=text, option=option)
    return words


def split_integers(text: str, *, option: str) -> list[int]:
    """Split a comma-separated list into integers; ``ValueError`` unless distinct and positive."""
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
    """Raise ``ValueError`` if a name in the list of an option is not among the allowed ones."""
    if unknown := sorted(set(names) - set(allowed)):
        raise ValueError(f"{option} ({', '.join(unknown)}) must be of {', '.join(allowed)}, or all")


def rank_memory_bytes(num_ranks: int, *, device: str) -> int:
    """Return the total bytes of this rank's GPU memory; on a CPU, an equal share of host memory.

    The environment of torchrun overrides ``num_ranks``, the number of ranks of this host.
    """
    place = pick_device(device)
    num_bytes = total_memory(place)
    assert num_bytes is not None, f"{place} has memory"
    if place.type == "cuda":
        return num_bytes
    return num_bytes // int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))


def check_readable(path: Path, *, option: str) -> None:
    """Raise ``ValueError`` if a file cannot be read, for example because it is a folder."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise ValueError(f"{option} ({path}) must be a readable file: {error.strerror}") from error


def check_replaceable(
    path: Path, *, option: str, what: str, start: bytes = b"", inside: bytes = b""
) -> None:
    """Raise ``ValueError`` unless a file can be written, and is new, empty or written by Halley.

    Creates the folder, but does not change the file. Files by Halley begin with ``start`` and have
    ``inside`` in the first 4096 bytes; defaults allow any file. Errors name such files ``what``.
    """
    head = b""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with path.open("r+b") as file:
                if path.is_file():  # a read from a pipe would block
                    head = file.read(_HEAD_BYTES)
        else:
            with tempfile.TemporaryFile(dir=path.parent) as file:
                file.write(b"halley")
                file.flush()
    except OSError as error:
        raise ValueError(f"{option} ({path}) must be a file to write: {error.strerror}") from error
    if head and not (head.startswith(start) and inside in head):
        rule = f"be a new file or hold {what}: it holds something else"
        raise ValueError(f"{option} ({path}) must {rule}")


def check_chart(path: Path | None, *, option: str) -> None:
    """Raise ``ValueError`` unless ``path`` is None, or a .png that Halley can write or replace."""
    if path is None:
        return
    check_package("matplotlib", extra="plot", option=f"{option} ({path})")
    if path.suffix.lower() != ".png":
        raise ValueError(f"{option} ({path}) must be named .png")
    check_replaceable(path, option=option, **CHART)
