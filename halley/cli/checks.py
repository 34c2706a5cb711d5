"""Check, before ranks start, what several commands take: numbers, lists, dtypes and packages."""

import math
import os
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from halley.core.types import DTYPES
from halley.distributed.world import pick_device
from halley.moe.memory_check import total_memory


MAX_RANKS = 65536  # of a plan

_MAX_COUNT = 10**6  # of samples and steps: more would run for days
_MAX_SEED = 2**63 // 1_000_003 - 1  # seeds of ranks are multiples of it, in 64 bits
_MAX_SECONDS = 10**7  # 116 days: threading's clocks end not far above


def check_package(name: str, *, extra: str, option: str) -> None:
    """Check that an optional package is installed, before the work that ends in its use.

    Args:
        name: of the package.
        extra: of halley-moe, which brings it.
        option: what the user gave that needs it, with its value.

    Raises:
        ValueError: it is not installed; names the command that installs it.
    """
    if find_spec(name) is None:
        raise ValueError(
            f"{option} must have the package {name}: pip install 'halley-moe[{extra}]'"
        )


def read_dtype(name: str, *, on_gpu: bool) -> torch.dtype:
    """Return the dtype of that name.

    Args:
        name: a key of ``DTYPES``, or "default": bfloat16 on GPUs, float32 on CPUs.

    Raises:
        ValueError: there is no such dtype.
    """
    if name == "default":
        return torch.bfloat16 if on_gpu else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype ({name}) must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def check_at_least(value: int, least: int, *, option: str) -> None:
    """Check a number that has no upper bound of its own.

    Raises:
        ValueError: it is smaller than ``least``.
    """
    if value < least:
        raise ValueError(f"{option} ({value}) must be at least {least}")


def check_at_most(value: int, most: int, *, option: str) -> None:
    """Check a number against an upper bound.

    Raises:
        ValueError: it is larger than ``most``.
    """
    if value > most:
        raise ValueError(f"{option} ({value}) must be at most {most}")


def check_samples(samples: int, *, option: str = "samples") -> None:
    """Check a number of samples or steps.

    Raises:
        ValueError: there is none, or there are more than a million.
    """
    check_at_least(samples, 1, option=option)
    check_at_most(samples, _MAX_COUNT, option=option)


def check_seed(seed: int) -> None:
    """Check a seed.

    Raises:
        ValueError: it is negative, or larger than the generators of all ranks take.
    """
    check_at_least(seed, 0, option="seed")
    check_at_most(seed, _MAX_SEED, option="seed")


def check_seconds(seconds: float) -> float:
    """Return a time limit.

    Raises:
        ValueError: it is not above 0, not a number, or longer than a hundred days.
    """
    if not 0 < seconds <= _MAX_SECONDS:
        raise ValueError(f"time_limit ({seconds:g}) must be above 0 and at most {_MAX_SECONDS} s")
    return seconds


def check_rate(value: float, *, option: str, default: str) -> float:
    """Return a rate of a link in GB/s.

    Args:
        option: of the command line.
        default: what 0 stands for, as the text of the error names it.

    Raises:
        ValueError: it is neither 0 nor a rate from 0.001 on.
    """
    if not (value == 0 or 0.001 <= value < math.inf):
        raise ValueError(f"{option} ({value:g}) must be at least 0.001 GB/s, or 0 for {default}")
    return value


def split_names(text: str, *, option: str) -> list[str]:
    """Return the words between commas.

    Raises:
        ValueError: there is none, or one is there twice.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError(f"{option} ({text}) must name at least one")
    check_distinct(words, text=text, option=option)
    return words


def split_integers(text: str, *, option: str) -> list[int]:
    """Return the positive integers between commas.

    Raises:
        ValueError: there is none, one is no such number, or one is there twice.
    """
    words = split_names(text, option=option)
    if not all(word.isascii() and word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{option} ({text}) must be positive integers with commas between")
    numbers = [int(word) for word in words]
    check_distinct(numbers, text=text, option=option)
    return numbers


def check_distinct(values: Sequence[object], *, text: str, option: str) -> None:
    """Check that a list holds nothing twice, which would be measured twice.

    Raises:
        ValueError: it does; names the first.
    """
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ValueError(f"{option} ({text}) must name each once, and names {value} twice")


def check_known(names: Sequence[str], allowed: Sequence[str], *, option: str) -> None:
    """Check that all names are known.

    Raises:
        ValueError: some are not.
    """
    if unknown := sorted(set(names) - set(allowed)):
        raise ValueError(f"{option} ({', '.join(unknown)}) must be of {', '.join(allowed)}, or all")


def rank_memory_bytes(num_ranks: int, *, device: str) -> int:
    """Return the memory of this rank's GPU, or its share of the host's.

    Args:
        num_ranks: of this host, unless a launcher tells.
        device: "auto", "cpu" or "cuda".
    """
    place = pick_device(device)
    num_bytes = total_memory(place)
    assert num_bytes is not None, f"{place} has memory"
    if place.type == "cuda":
        return num_bytes
    return num_bytes // int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
