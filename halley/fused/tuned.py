"""Read and write the file of kernel configurations that ``halley tune`` measured to be fastest.

Each line is a JSON object for one machine (device, versions, number of ranks) and one layer shape.
Lines of other machines are skipped. A shape without a line takes the line of the nearest number of
tokens, and without any such line the defaults. Lines that come with the package hold for all
versions; lines that were measured on this machine take precedence over them.
"""

import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import cast, final

import torch

from halley.core.field_types import build_record, check_fields, show, show_name
from halley.core.json_file import read_json_lines
from halley.cost.profiles import Environment, default_path, find_environment
from halley.ops.kernels.gemm_config import Knobs
from halley.symm_mem.access import link_kind


VERSION = 1
PATH_VARIABLE = "HALLEY_KNOBS"
_MAX_BYTES = 16 * 2**20  # a line has about 2,000
SHIPPED = Path(__file__).with_name("shipped_knobs.jsonl")


@dataclass(frozen=True, kw_only=True)
class TunedShape:
    """What knobs are measured for, beside the machine.

    Attributes:
        num_tokens: of each rank.
    """

    hidden_size: int
    num_experts: int
    top_k: int
    dtype: str
    num_tokens: int

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("hidden_size", "num_experts", "top_k"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        if self.num_tokens < 0:
            raise ValueError(f"num_tokens ({self.num_tokens}) must be at least 0")

    def distance(self, other: "TunedShape") -> float:
        """Return the octaves between the numbers of tokens; infinity for layers of other shapes."""
        mine, others = asdict(self) | {"num_tokens": 0}, asdict(other) | {"num_tokens": 0}
        if mine != others:
            return math.inf
        return abs(math.log2(max(1, self.num_tokens) / max(1, other.num_tokens)))


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What was found for a shape.

    Attributes:
        settings: in what the knobs differ from the defaults of the device.
        median_us: forward and backward with them.
        default_us: the same with the defaults, in the same run.
        sweeps: by the name of a knob, its values and what they took, with the others as they were.
    """

    shape: TunedShape
    settings: tuple[str, ...]
    median_us: float
    default_us: float
    sweeps: dict[str, dict[str, float]]

    def __post_init__(self) -> None:
        check_fields(self)
        Knobs().changed(self.settings)
        for name in ("median_us", "default_us"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} ({value}) must be at least 0")


def knobs_path() -> Path:
    """Return where tuned knobs are kept: ``HALLEY_KNOBS``, or beside the other profiles."""
    return Path(os.environ.get(PATH_VARIABLE) or default_path().with_name("knobs.jsonl"))


def tuning_environment(device: torch.device, *, num_ranks: int, tp_size: int = 1) -> Environment:
    """Return what knobs depend on beside the layer: versions, ranks and the links between them."""
    link = link_kind(device) if num_ranks > 1 else ""
    places = [f"ranks {num_ranks}", *([link] if link else [])]
    places += [f"{tp_size} an expert"] if tp_size > 1 else []
    found = find_environment(device, topology=", ".join(places))
    return Environment(
        device=found.device,
        versions=f"{found.versions}, triton {version('triton')}",
        topology=found.topology,
    )


@final
class KnobTable:
    """The tuned knobs of one machine.

    Args:
        path: a file of lines; none is an empty table.
        environment: whose lines count.
        shipped: a file of lines that count with any versions, behind those of the other.

    Raises:
        ValueError: a line is not what ``write`` writes.
    """

    def __init__(self, path: Path, environment: Environment, *, shipped: Path = SHIPPED) -> None:
        self.path, self.environment = path, environment
        self.found: list[Tuned] = []
        for line in _read(shipped):
            place = replace(line.environment, versions=environment.versions)
            if line.tuned is not None and place == environment:
                self._keep(line.tuned)
        others: set[str] = set()
        num_found = 0
        for line in _read(path):
            if line.tuned is None:
                others.add(f"version {show(line.version)} of this file")
            elif line.environment != environment:
                others.add(_told(line.environment))
            else:
                self._keep(line.tuned)
                num_found += 1
        if others and not num_found:
            instead = "those that come with Halley" if self.found else "the defaults"
            warnings.warn(
                f"{path} has no knobs for this machine ({_told(environment)}), but for "
                f"{'; '.join(sorted(others))}: {instead} are used, halley tune measures better",
                stacklevel=2,
            )

    def find(self, shape: TunedShape, *, base: Knobs) -> Knobs:
        """Return the knobs for a shape, those of the nearest number of tokens, or ``base``."""
        near = min(self.found, key=lambda each: each.shape.distance(shape), default=None)
        if near is None or math.isinf(near.shape.distance(shape)):
            return base
        return base.changed(near.settings)

    def write(self, tuned: Tuned) -> None:
        """Keep what was found; it counts from now on instead of what was known for its shape."""
        self._keep(tuned)
        line = json.dumps(_entry(self.environment, tuned)) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise ValueError(_not_writable(self.path, error)) from error

    def _keep(self, tuned: Tuned) -> None:
        self.found = [each for each in self.found if each.shape != tuned.shape] + [tuned]


def merge_tables(sources: Sequence[Path], path: Path) -> int:
    """Write what files hold into one, for each machine and shape the last that is known.

    Args:
        sources: the files, of any machines; what ``path`` holds already comes before them.

    Returns:
        The number of lines.

    Raises:
        ValueError: a source is not there, a line is not what ``KnobTable.write`` writes, or of
            another version.
    """
    merged: dict[tuple[Environment, TunedShape], dict[str, object]] = {}
    for source in (path, *sources):
        if source != path and not os.path.exists(source):
            raise ValueError(f"merge ({source}) must be a file of tuned knobs")
        for line in _read(source):
            if line.tuned is None:
                raise ValueError(f"{source} must be of version {VERSION}, has {show(line.version)}")
            merged[line.environment, line.tuned.shape] = _entry(line.environment, line.tuned)
    text = "".join(json.dumps(entry) + "\n" for entry in merged.values())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ValueError(_not_writable(path, error)) from error
    return len(merged)


@dataclass(frozen=True, kw_only=True)
class _Line:
    """One line of a file: what was found where. ``tuned`` is None in files of other versions."""

    environment: Environment
    version: object
    tuned: Tuned | None


def _entry(environment: Environment, tuned: Tuned) -> dict[str, object]:
    return {"version": VERSION, "environment": asdict(environment), **asdict(tuned)}


def _read(path: Path) -> list[_Line]:
    lines = read_json_lines(path, what="tuned knobs", max_bytes=_MAX_BYTES)
    return [_parse(value, where=where) for where, value in lines]


def _parse(value: object, *, where: str) -> _Line:
    if not isinstance(value, dict):
        raise ValueError(f"{where} value ({show(value)}) must be a table")
    table = cast(dict[str, object], value)
    for name in ("version", "environment"):
        if name not in table:
            raise ValueError(f"{where} {name} is required")
    version, place = table["version"], table["environment"]
    environment = build_record(Environment, place, where=f"{where} environment:")
    if type(version) is not int or version != VERSION:
        return _Line(environment=environment, version=version, tuned=None)
    found = {name: table[name] for name in table if name not in ("version", "environment")}
    tuned = build_record(Tuned, found, where=where)
    return _Line(environment=environment, version=version, tuned=tuned)


def _not_writable(path: Path, error: OSError) -> str:
    return f"tuned knobs ({path}) must be a file to write: {error.strerror}"


def _told(environment: Environment) -> str:
    parts = (environment.device, environment.versions, environment.topology)
    return ", ".join(map(show_name, parts))
