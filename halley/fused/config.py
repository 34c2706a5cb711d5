"""Configuration of the fused kernels, and the file of tuned configurations.

``halley tune`` measures the settings of ``KernelConfig`` and appends the fastest ones to the file.
Layers read it when they allocate their buffers.
"""

import json
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import cast, final

import torch

from halley.core.validation import build_record, check_fields, read_json_lines, show, show_name
from halley.cost.hardware import Environment, default_path, find_environment
from halley.ops.kernels.tiles import GemmTile
from halley.symm_mem.access import link_kind


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Tile sizes and other settings of all fused kernels of one layer.

    Settings change the running time only. Exception: ``block_k`` also changes the last bits of the
    results, because it changes the order of the summation.

    Attributes:
        num_programs: SMs that a persistent launch uses; 0 means all.
        block_m: rows of a tile of both forward GEMMs and of their backward GEMMs.
        up, down: tiles of the forward GEMMs.
        down_grad, up_grad: tiles of the backward GEMMs with the transposed weights.
        weight: tile of the weight-gradient GEMMs; its ``block_k`` divides ``block_m``.
        combiners_beside: combining CTAs on each SM that run beside the GEMM's CTAs.
        combiners_after: further combining CTAs for each SM, which begin when GEMM CTAs have ended.
        fetch_elements: elements that a warp has in flight while it fetches rows.
        combine_rows: token copies that a combining CTA sums at once; divides ``TASK_ROWS``.
        combine_stages: pipeline stages of this sum; a step adds one row of each token copy. 1 loads
            all rows of the token copies at once.
        chunk_columns: columns of a column chunk of the second GEMM: a power of two and a multiple
            of ``down.block_n`` and ``up_grad.block_n``.
        sum_rows: tokens of one task of the sum at the source rank.
    """

    num_programs: int = 0
    block_m: int = 128
    up: GemmTile = field(default_factory=GemmTile)
    down: GemmTile = field(default_factory=GemmTile)
    down_grad: GemmTile = field(default_factory=lambda: GemmTile(num_stages=3))
    up_grad: GemmTile = field(default_factory=GemmTile)
    weight: GemmTile = field(default_factory=lambda: GemmTile(run=0, num_stages=3))
    combiners_beside: int = 1
    combiners_after: int = 3
    fetch_elements: int = 2048
    combine_rows: int = 8
    combine_stages: int = 1
    chunk_columns: int = 512
    sum_rows: int = 8

    def fetch_block(self, hidden_size: int, *, num_warps: int) -> tuple[int, int]:
        """Return rows and columns of the block that a fetching CTA has in flight."""
        elements = self.fetch_elements * num_warps
        columns = min(4096, 1 << (hidden_size - 1).bit_length(), elements)
        return min(64, elements // columns), columns

    def changed(self, settings: Sequence[str]) -> "KernelConfig":
        """Return a configuration with settings such as "combine_rows=16" or "up.run=2" replaced.

        Raises:
            ValueError: a setting has another form, or an unknown name.
        """
        config = self
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in _by_name(config) or not value.isdecimal():
                rule = "the name of a setting, an equals sign and an integer"
                raise ValueError(f"setting ({show_name(setting)}) must be {rule}")
            tile, _, key = name.rpartition(".")
            change: dict[str, object] = {key: int(value)}
            if tile:
                change = {tile: replace(getattr(config, tile), **change)}
            config = replace(config, **change)
        return config

    def settings(self, base: "KernelConfig") -> list[str]:
        """Return the settings that differ from ``base``, as arguments of ``changed``."""
        others = _by_name(base)
        return [
            f"{name}={value}" for name, value in _by_name(self).items() if value != others[name]
        ]


# The interpreter takes about the same time for any block size: use few CTAs and few tasks.
CPU_CONFIG = KernelConfig(
    num_programs=2,
    block_m=16,
    up=GemmTile(block_n=64, block_k=64, group=2),
    down=GemmTile(block_n=64, block_k=64, group=2),
    down_grad=GemmTile(block_n=64, block_k=64, group=2),
    up_grad=GemmTile(block_n=64, block_k=64, group=2),
    weight=GemmTile(block_n=64, block_k=16, group=2),
    fetch_elements=4096,
    combine_rows=64,
    combine_stages=2,
    chunk_columns=64,
    sum_rows=64,
)


def default_config(device: torch.device) -> KernelConfig:
    """Return the configuration to use on a device for which ``halley tune`` has measured none."""
    return CPU_CONFIG if device.type == "cpu" else KernelConfig()


def _by_name(config: KernelConfig) -> dict[str, int]:
    """Return all settings by name, such as "block_m" and "up.block_n"."""
    found: dict[str, int] = {}
    for field_ in fields(config):
        value = getattr(config, field_.name)
        if isinstance(value, GemmTile):
            found |= {
                f"{field_.name}.{part.name}": getattr(value, part.name) for part in fields(value)
            }
        else:
            found[field_.name] = value
    return found


VERSION = 2
PATH_VARIABLE = "HALLEY_KERNEL_CONFIG"
_MAX_BYTES = 16 * 2**20  # a line has about 2,000
_WHAT = "tuned kernel configurations"


@dataclass(frozen=True, kw_only=True)
class TunedShape:
    """Layer shape for which ``halley tune`` measured the fastest configuration."""

    hidden_size: int
    num_experts: int
    top_k: int
    dtype: str
    num_tokens: int  # of each rank

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("hidden_size", "num_experts", "top_k"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        if self.num_tokens < 0:
            raise ValueError(f"num_tokens ({self.num_tokens}) must be at least 0")

    def distance(self, other: "TunedShape") -> float:
        """Return abs(log2) of the ratio of the numbers of tokens; inf if another size differs."""
        mine, others = asdict(self) | {"num_tokens": 0}, asdict(other) | {"num_tokens": 0}
        if mine != others:
            return math.inf
        return abs(math.log2(max(1, self.num_tokens) / max(1, other.num_tokens)))


@dataclass(frozen=True, kw_only=True)
class TunedConfig:
    """Fastest configuration that was measured for a shape.

    Attributes:
        settings: settings that differ from the defaults of the device.
        median_us: time of forward and backward with them.
        default_us: the same with the defaults, in the same run.
        sweeps: for each tuned setting, the time by value, with the other settings fixed.
    """

    shape: TunedShape
    settings: tuple[str, ...]
    median_us: float
    default_us: float
    sweeps: dict[str, dict[str, float]]

    def __post_init__(self) -> None:
        check_fields(self)
        KernelConfig().changed(self.settings)
        for name in ("median_us", "default_us"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} ({value}) must be at least 0")


def config_path() -> Path:
    """Return the file of tuned configurations: ``HALLEY_KERNEL_CONFIG``, or a file in the cache."""
    default = default_path().with_name("kernel_config.jsonl")
    return Path(os.environ.get(PATH_VARIABLE) or default)


def tuning_environment(device: torch.device, *, num_ranks: int, tp_size: int = 1) -> Environment:
    """Return the properties of a machine that tuned configurations depend on."""
    link = link_kind(device) if num_ranks > 1 else ""
    places = [f"ranks {num_ranks}", *([link] if link else [])]
    places += [f"{tp_size} an expert"] if tp_size > 1 else []
    found = find_environment(device, topology=", ".join(places))
    return replace(found, versions=f"{found.versions}, triton {version('triton')}")


@final
class ConfigTable:
    """Tuned configurations of one machine.

    If the file does not exist, the table is empty.

    Raises:
        ValueError: a line is not one that ``write`` writes.
    """

    def __init__(self, path: Path, environment: Environment) -> None:
        self.path, self.environment = path, environment
        self.found: list[TunedConfig] = []
        others: set[str] = set()
        for line in _read(path):
            if line.tuned is None:
                others.add(f"version {show(line.version)} of this file")
            elif line.environment != environment:
                others.add(_describe(line.environment))
            else:
                self._add(line.tuned)
        if others and not self.found:
            warnings.warn(
                f"{path} has no kernel configuration for this machine ({_describe(environment)}), "
                f"but for {'; '.join(sorted(others))}: the defaults are used, halley tune measures "
                "better",
                stacklevel=2,
            )

    def find(self, shape: TunedShape, *, base: KernelConfig) -> KernelConfig:
        """Return the configuration for the nearest number of tokens, or ``base`` without one."""
        near = min(self.found, key=lambda each: each.shape.distance(shape), default=None)
        if near is None or math.isinf(near.shape.distance(shape)):
            return base
        return base.changed(near.settings)

    def write(self, tuned: TunedConfig) -> None:
        """Append a configuration to the file; later calls of ``find`` prefer it for its shape."""
        self._add(tuned)
        _write(self.path, [_entry(self.environment, tuned)], mode="a")

    def _add(self, tuned: TunedConfig) -> None:
        self.found = [each for each in self.found if each.shape != tuned.shape] + [tuned]


def merge_tables(sources: Sequence[Path], path: Path) -> int:
    """Merge files of tuned configurations into ``path``; return its number of lines.

    The last line of each machine and shape wins. The lines of ``path`` itself count first.

    Raises:
        ValueError: a source does not exist, or has an invalid line or another version.
    """
    merged: dict[tuple[Environment, TunedShape], dict[str, object]] = {}
    for source in (path, *sources):
        if source != path and not os.path.exists(source):
            raise ValueError(f"merge ({source}) must be a file of {_WHAT}")
        for line in _read(source):
            if line.tuned is None:
                raise ValueError(f"{source} must be of version {VERSION}, has {show(line.version)}")
            merged[line.environment, line.tuned.shape] = _entry(line.environment, line.tuned)
    _write(path, list(merged.values()), mode="w")
    return len(merged)


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A line of a file of tuned configurations; ``tuned`` is None for other format versions."""

    environment: Environment
    version: object
    tuned: TunedConfig | None


def _entry(environment: Environment, tuned: TunedConfig) -> dict[str, object]:
    return {"version": VERSION, "environment": asdict(environment), **asdict(tuned)}


def _read(path: Path) -> list[_Line]:
    lines = read_json_lines(path, what=_WHAT, max_bytes=_MAX_BYTES)
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
    tuned = build_record(TunedConfig, found, where=where)
    return _Line(environment=environment, version=version, tuned=tuned)


def _write(path: Path, entries: list[dict[str, object]], *, mode: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in entries)
    except OSError as error:
        raise ValueError(f"{_WHAT} ({path}) must be a file to write: {error.strerror}") from error


def _describe(environment: Environment) -> str:
    parts = (environment.device, environment.versions, environment.topology)
    return ", ".join(map(show_name, parts))
