"""Measured times of operations and collectives, kept in a file of JSON lines.

Several runs may append to the file at the same time. Each line is valid for one environment
(device, versions, topology), and a table ignores the lines of other environments. The tables that
ship with the package are read with ``offline=True``, so that they are never extended.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast, final

import torch
from torch.cuda import nccl

from halley.core.field_types import build_record, check_fields
from halley.core.json_file import read_json_lines
from halley.cost.measure import Curve, measure_us
from halley.cost.simulate import Contention


_MAX_FILE_BYTES = 64 * 2**20  # a line has about 300


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Device, versions and topology, on which a measured time depends.

    Attributes:
        device: name of the GPU, or the type of another device, such as "cpu".
        versions: of torch, and on GPUs of CUDA and NCCL. "" matches all versions, and all devices
            whose names start with ``device``.
        topology: of the ranks, such as "ranks 8"; "" for a single rank. Only the times of
            collectives depend on it.
    """

    device: str
    versions: str
    topology: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    def takes(self, other: "Environment") -> bool:
        """Return whether times of operations from another environment are valid in this one."""
        if self.versions:
            return (self.device, self.versions) == (other.device, other.versions)
        return other.device.startswith(self.device)


def find_environment(device: torch.device, *, topology: str = "") -> Environment:
    """Return the environment of this process.

    Args:
        device: the device that is measured.
        topology: of the ranks, as in ``Environment``.
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
    """Return the path of profiles for which the user gives no path."""
    return Path.home() / ".cache" / "halley" / "profiles.jsonl"


def shipped_path(device_name: str) -> Path | None:
    """Return the table of a device that ships with the package, or None.

    Args:
        device_name: ``Hardware.name``, such as "NVIDIA H200".
    """
    path = Path(__file__).parent / "tables" / f"{device_name.lower().replace(' ', '-')}.jsonl"
    return path if path.exists() else None


def operation_key(
    name: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], *, rest: str = ""
) -> str:
    """Return the key of an operation; operations that take equally long have equal keys.

    Args:
        name: the operator with its overload, such as "aten.mm.default".
        shapes, dtypes: of its tensor arguments, in order.
        rest: the other arguments, if the time depends on them.
    """
    operands = [
        f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    return f"{name}({', '.join(operands)}){' ' if rest else ''}{rest}"


@dataclass(frozen=True, kw_only=True)
class _OperationLine:
    """A line of the file with the time of an operation."""

    op: str
    us: float
    environment: Environment

    def __post_init__(self) -> None:
        if self.us < 0:
            raise ValueError(f"us ({self.us}) must be at least 0")


@dataclass(frozen=True, kw_only=True)
class _CurveLine:
    """A line of the file with the curve of a collective."""

    collective: str
    points: tuple[tuple[int, float], ...]
    environment: Environment

    def __post_init__(self) -> None:
        Curve(self.points)  # raises for wrong points


@dataclass(frozen=True, kw_only=True)
class _ContentionLine:
    """A line of the file with the contention of computation and communication."""

    contention: Contention
    environment: Environment


@final
class ProfileTable:
    """A table of times measured in one environment, read from a file and appended to it.

    Args:
        path: the file, created at the first measurement; None keeps the times in memory only.
        environment: lines of other environments are ignored.
        offline: never measure an operation that is missing in the file.

    Attributes:
        contention: of computation and communication; None if it is unknown.

    Raises:
        ValueError: a line of the file is malformed, or ``offline`` is set without a file.
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
                self._read(value, where=where)

    def time_us(self, key: str) -> float | None:
        """Return the time of an operation, or None if it is unknown."""
        return self._times_us.get(key)

    def curve(self, key: str) -> Curve | None:
        """Return the curve of a collective, or None if it is unknown."""
        return self._curves.get(key)

    def measure(self, key: str, run: Callable[[], object], *, device: torch.device) -> float | None:
        """Return the time of an operation; measure it if it is missing and the table is online.

        Args:
            key: the result of ``operation_key``.
            run: runs the operation once.
            device: the device of the operation.
        """
        if key not in self._times_us and not self.offline:
            self.add_time(key, measure_us(run, device=device))
        return self._times_us.get(key)

    def add_time(self, key: str, duration_us: float) -> None:
        """Store the time of an operation; it replaces an earlier one."""
        self._times_us[key] = duration_us
        self._write({"op": key, "us": duration_us})

    def add_curve(self, key: str, curve: Curve) -> None:
        """Store the curve of a collective; it replaces an earlier one."""
        self._curves[key] = curve
        self._write({"collective": key, "points": curve.points})

    def add_contention(self, contention: Contention) -> None:
        """Store by what factors computation and communication slow each other down."""
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

    def _read(self, value: object, *, where: str) -> None:
        """Store a line of the file if it is valid for this environment."""
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
