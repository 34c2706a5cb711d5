"""Measured times: of each distinct operation once, of a collective by its bytes; kept in a file.

The file has one JSON object a line, so that runs may append to it at the same time and a shared
table is read with any tool. A line holds for one environment (device, versions, topology); the
table of one environment passes over the lines of others. A table that ships with the package is
read with ``offline=True`` and then never measures.
"""

import json
import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast, final

import torch
from torch.cuda import nccl

from halley.core.field_types import build_record, check_fields, show
from halley.core.json_file import read_json_lines
from halley.cost.simulate import Contention


_WARMUP = 10
_COUNT = 10
_FLUSH_BYTES = 64 * 2**20  # more than the L2 cache of any GPU
_MAX_FILE_BYTES = 64 * 2**20  # a line has about 300
_BUSY_CYCLES = 1_000_000  # half a millisecond in which the host gets ahead


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What a measured time depends on beside the operation.

    Attributes:
        device: what the driver calls a GPU, or the kind of another device, such as "cpu".
        versions: of torch, and of CUDA and NCCL where they are; "" looks for any, and for all
            devices whose names begin as this one's does.
        topology: of the ranks, such as "ranks 8"; "" for a rank on its own. A time of one
            operation does not depend on it.
    """

    device: str
    versions: str
    topology: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    def takes(self, other: "Environment") -> bool:
        """Return whether the time of an operation that was measured in another holds here."""
        if self.versions:
            return (self.device, self.versions) == (other.device, other.versions)
        return other.device.startswith(self.device)


def find_environment(device: torch.device, *, topology: str = "") -> Environment:
    """Return the environment of this process.

    Args:
        device: of the graph.
        topology: of the ranks.
    """
    if device.type != "cuda":
        versions = f"torch {torch.__version__}"
        return Environment(device=device.type, versions=versions, topology=topology)
    numbers = cast(tuple[int, ...], nccl.version())  # pyright: ignore[reportUnknownMemberType]
    nccl_version = ".".join(map(str, numbers))
    return Environment(
        device=torch.cuda.get_device_name(device),
        versions=f"torch {torch.__version__}, cuda {torch.version.cuda}, nccl {nccl_version}",
        topology=topology,
    )


def default_path() -> Path:
    """Return where profiles are kept unless a path is given.

    By hand and not by platformdirs, which the package does not depend on: a path that differs from
    a platform's custom is an argument.
    """
    return Path.home() / ".cache" / "halley" / "profiles.jsonl"


def shipped_path(device_name: str) -> Path | None:
    """Return the times of a device's operators that come with the package; None without any.

    Args:
        device_name: as of ``Hardware``, such as "NVIDIA H200".
    """
    path = Path(__file__).parent / "tables" / f"{device_name.lower().replace(' ', '-')}.jsonl"
    return path if path.exists() else None


@dataclass(frozen=True)
class Curve:
    """Time of a collective by its bytes: measured points, in ascending order of bytes.

    Attributes:
        points: (bytes, microseconds), at least one, both above 0, bytes distinct.

    Example: between (1000, 10) and (4000, 20), 2000 bytes are half of the way on a logarithmic
    scale of bytes and of time, so 14.1 us; below 1000 bytes it is 10 us, latency; above 4000 bytes
    the last two points' line in bytes goes on, 30 us at 7000.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = [num_bytes for num_bytes, _ in self.points]
        if not sizes or sizes[0] <= 0 or sizes != sorted(set(sizes)):
            rule = "positive, distinct and ascending"
            raise ValueError(f"points' bytes ({show(sizes)}) must be {rule}")
        if (least_us := min(duration_us for _, duration_us in self.points)) <= 0:
            raise ValueError(f"points' microseconds ({least_us}) must be above 0")

    def at(self, num_bytes: float) -> float:
        """Return the microseconds of ``num_bytes``, interpolated between the points."""
        sizes = [size for size, _ in self.points]
        if num_bytes <= sizes[0]:
            return self.points[0][1]
        index = bisect_left(sizes, num_bytes)
        if index == len(sizes):
            return self._beyond(num_bytes)
        (left, left_us), (right, right_us) = self.points[index - 1 : index + 1]
        share = math.log(num_bytes / left) / math.log(right / left)
        return left_us * (right_us / left_us) ** share

    def _beyond(self, num_bytes: float) -> float:
        last, last_us = self.points[-1]
        if len(self.points) == 1:
            return last_us * num_bytes / last
        before, before_us = self.points[-2]
        return last_us + max(0.0, last_us - before_us) / (last - before) * (num_bytes - last)


def operation_key(
    name: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], *, rest: str = ""
) -> str:
    """Return the key of an operation: equal for operations that take equally long.

    Args:
        name: of the operator, overload included.
        shapes, dtypes: of its tensor arguments, in order.
        rest: its other arguments, if they matter.
    """
    operands = [
        f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    return f"{name}({', '.join(operands)}){' ' if rest else ''}{rest}"


@dataclass(frozen=True, kw_only=True)
class _OperationLine:
    """A line of a file: the time of an operation."""

    op: str
    us: float
    environment: Environment

    def __post_init__(self) -> None:
        if self.us < 0:
            raise ValueError(f"us ({self.us}) must be at least 0")


@dataclass(frozen=True, kw_only=True)
class _CurveLine:
    """A line of a file: the curve of a collective."""

    collective: str
    points: tuple[tuple[int, float], ...]
    environment: Environment

    def __post_init__(self) -> None:
        Curve(self.points)  # refuses wrong points


@dataclass(frozen=True, kw_only=True)
class _ContentionLine:
    """A line of a file: how much computation and communication slow each other down."""

    contention: Contention
    environment: Environment


@final
class ProfileTable:
    """Times measured in one environment, read from a file and added to it.

    Args:
        path: the file, made at the first measurement; None keeps times in memory alone.
        environment: whose lines count.
        offline: never measure: what the file lacks is unknown.

    Attributes:
        contention: of computation and communication, or None if it is unknown.

    Raises:
        ValueError: a line of the file is not what this class writes, or offline without a file.
    """

    def __init__(
        self, path: Path | None, environment: Environment, *, offline: bool = False
    ) -> None:
        if offline and (path is None or not os.path.exists(path)):
            raise ValueError(f"path ({path}) must be a file when offline")
        self.environment = environment
        self.offline = offline
        self._path = path
        self._times_us: dict[str, float] = {}
        self._curves: dict[str, Curve] = {}
        self.contention: Contention | None = None
        if path is not None:
            lines = read_json_lines(path, what="profiles", max_bytes=_MAX_FILE_BYTES)
            for where, value in lines:
                self._keep(value, where=where)

    def time_us(self, key: str) -> float | None:
        """Return the time of an operation, or None if it is unknown."""
        return self._times_us.get(key)

    def curve(self, key: str) -> Curve | None:
        """Return the curve of a collective, or None if it is unknown."""
        return self._curves.get(key)

    def measure(self, key: str, run: Callable[[], object], *, device: torch.device) -> float | None:
        """Return the time of an operation, measured if it is unknown and the table not offline.

        Args:
            key: of the operation.
            run: the operation, on arguments that are there.
            device: where it runs.
        """
        if key not in self._times_us and not self.offline:
            self.add_time(key, measure_us(run, device=device))
        return self._times_us.get(key)

    def add_time(self, key: str, duration_us: float) -> None:
        """Keep the time of an operation, the latest if there are several."""
        self._times_us[key] = duration_us
        self._write({"op": key, "us": duration_us})

    def add_curve(self, key: str, curve: Curve) -> None:
        """Keep the curve of a collective, the latest if there are several."""
        self._curves[key] = curve
        self._write({"collective": key, "points": curve.points})

    def add_contention(self, contention: Contention) -> None:
        """Keep how much computation and communication slow each other down."""
        self.contention = contention
        self._write({"contention": asdict(contention)})

    def _write(self, entry: dict[str, object]) -> None:
        if self._path is None:
            return
        line = json.dumps({**entry, "environment": asdict(self.environment)})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            raise ValueError(
                f"profiles ({self._path}) must be a file to write: {error.strerror}"
            ) from error

    def _keep(self, value: object, *, where: str) -> None:
        """Keep what a line of the file says if it holds for this environment."""
        table = cast(dict[str, object], value) if isinstance(value, dict) else {}
        kinds = {"op": _OperationLine, "contention": _ContentionLine}
        kind = next((kinds[key] for key in kinds if key in table), _CurveLine)
        line = build_record(kind, cast(object, value), where=where)
        if not self.environment.takes(line.environment):
            return
        if isinstance(line, _OperationLine):
            self._times_us[line.op] = line.us
        elif line.environment.topology != self.environment.topology:
            return
        elif isinstance(line, _ContentionLine):
            self.contention = line.contention
        else:
            self._curves[line.collective] = Curve(line.points)


def measure_us(run: Callable[[], object], *, device: torch.device) -> float:
    """Return the trimmed mean of 10 runs after 10 for warm-up, in microseconds.

    The fastest and the slowest run do not count. On a GPU the L2 cache is overwritten before each
    run, and time is taken between two events, with the GPU kept busy until the host has issued all:
    what the host takes is not the operation's.

    Source: Lancet (arXiv:2404.19429), whose code profiles an operation by 10 runs after 10.
    """
    for _ in range(_WARMUP):
        run()
    timed = _event_us if device.type == "cuda" else _wall_us
    samples = sorted(timed(run, device) for _ in range(_COUNT))
    return sum(samples[1:-1]) / (_COUNT - 2)


def measure_curve(
    run: Callable[[int], object], sizes: Sequence[int], *, device: torch.device
) -> Curve:
    """Return the curve of a collective; itself a collective of the same ranks.

    Args:
        run: the collective with that many bytes sent by each rank.
        sizes: bytes, ascending.
        device: where it runs.
    """
    times_us = [measure_us(partial(run, size), device=device) for size in sizes]
    return Curve(tuple(zip(sizes, times_us, strict=True)))


def _wall_us(run: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begin) / 1e3


def _event_us(run: Callable[[], object], device: torch.device) -> float:
    torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device).zero_()
    torch.cuda._sleep(_BUSY_CYCLES)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3
