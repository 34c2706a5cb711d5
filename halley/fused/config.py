"""Configuration of the fused kernels, and the file of tuned configurations."""

import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import cast, final

import torch

from halley.core.validation import build_record, check_fields, read_json_lines, show, show_name
from halley.cost.hardware import Environment, default_path, find_environment, link_kind
from halley.ops.kernels.tiles import GemmTile


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Tile sizes and other settings of all fused kernels of one layer.

    Settings change the running time only. Exception: ``block_k`` also changes the last bits of the
    results, because it changes the order of the summation. ``up`` and ``down`` are the tiles of the
    forward GEMMs, ``down_grad`` and ``up_grad`` those of backward with the transposed weights.
    ``weight`` is the tile of the weight-gradient GEMMs; its ``block_k`` divides ``block_m``.
    """

    num_programs: int = 0  # SMs that a persistent launch uses; 0 means all but the reserved SMs
    block_m: int = 128  # rows of an output tile of every GEMM
    up: GemmTile = field(default_factory=GemmTile)
    down: GemmTile = field(default_factory=GemmTile)
    down_grad: GemmTile = field(default_factory=lambda: GemmTile(num_stages=3))
    up_grad: GemmTile = field(default_factory=GemmTile)
    weight: GemmTile = field(default_factory=lambda: GemmTile(run=0, num_stages=3))
    combiners_beside: int = 1  # combining CTAs on each SM that run beside the GEMM's CTAs
    combiners_after: int = 3  # further combining CTAs per SM, which begin when the GEMM's CTAs end
    fetch_elements: int = 2048  # elements that a warp has in flight while it fetches rows
    combine_rows: int = 8  # token copies that a combining CTA sums at once; divides ``TASK_ROWS``
    combine_stages: int = 1  # stages of the summing loop; 1 loads all rows of a token copy at once
    chunk_columns: int = 512  # columns of a chunk; power of two, multiple of the GEMM's block_n
    sum_rows: int = 8  # tokens for which a source rank's task adds the partial sums

    def fetch_block(self, hidden_size: int, *, num_warps: int) -> tuple[int, int]:
        """Return the size (rows, columns) of the block that a row-fetching CTA loads at once."""
        elements = self.fetch_elements * num_warps
        columns = min(4096, 1 << (hidden_size - 1).bit_length(), elements)
        return min(64, elements // columns), columns

    def changed(self, settings: Sequence[str]) -> "KernelConfig":
        """Return this configuration with new values, given as "combine_rows=16" or "up.run=2".

        A setting of another form, or with an unknown name, is a ``ValueError``.
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
        """Return this configuration's settings that differ from ``base``, such as "up.run=2"."""
        others = _by_name(base)
        return [
            f"{name}={value}" for name, value in _by_name(self).items() if value != others[name]
        ]


# The interpreter takes about the same time for a block of any size: use few, large blocks.
_CPU_TILE = GemmTile(block_n=64, block_k=64, group=2)
CPU_CONFIG = KernelConfig(
    num_programs=2,
    block_m=16,
    up=_CPU_TILE,
    down=_CPU_TILE,
    down_grad=_CPU_TILE,
    up_grad=_CPU_TILE,
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
_MAX_BYTES = 16 * 2**20  # largest file that is read; one line has about 2,000 bytes
_WHAT = "tuned kernel configurations"


@dataclass(frozen=True, kw_only=True)
class TunedShape:
    """Layer shape and number of tokens for which ``halley tune`` measures a configuration."""

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
        """Return the absolute log2 of the ratio of token counts; inf if another field differs."""
        mine, others = asdict(self) | {"num_tokens": 0}, asdict(other) | {"num_tokens": 0}
        if mine != others:
            return math.inf
        return abs(math.log2(max(1, self.num_tokens) / max(1, other.num_tokens)))


@dataclass(frozen=True, kw_only=True)
class TunedConfig:
    """Fastest kernel configuration that ``halley tune`` measured for a shape, and its times."""

    shape: TunedShape
    settings: tuple[str, ...]  # only settings that differ from the device's defaults
    median_us: float  # of forward and backward with these settings
    default_us: float  # of forward and backward with the defaults, in the same run
    sweeps: dict[str, dict[str, float]]  # time in us by settings group and value ("" = unchanged)

    def __post_init__(self) -> None:
        check_fields(self)
        KernelConfig().changed(self.settings)
        for name in ("median_us", "default_us"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} ({value}) must be at least 0")


def config_path() -> Path:
    """Return the file of tuned configurations: $HALLEY_KERNEL_CONFIG, else a file in ~/.cache."""
    default = default_path().with_name("kernel_config.jsonl")
    return Path(os.environ.get(PATH_VARIABLE) or default)


def tuning_environment(device: torch.device, *, num_ranks: int, tp_size: int = 1) -> Environment:
    """Return device, versions, link and numbers of ranks that tuned configurations depend on."""
    link = link_kind(device) if num_ranks > 1 else ""
    places = [f"ranks {num_ranks}", *([link] if link else [])]
    places += [f"{tp_size} an expert"] if tp_size > 1 else []
    found = find_environment(device, topology=", ".join(places))
    return replace(found, versions=f"{found.versions}, triton {version('triton')}")


@final
class ConfigTable:
    """The configurations in a file of tuned kernels for one GPU model, number of ranks and tp_size.

    An invalid line is a ``ValueError``; lines of other versions or machines are skipped.
    """

    def __init__(self, path: Path, environment: Environment) -> None:
        self.path, self.environment = path, environment
        self.found: list[TunedConfig] = []
        others: set[str] = set()
        for number, place, tuned in _read(path):
            if tuned is None:
                others.add(f"version {show(number)} of this file")
            elif place != environment:
                others.add(_describe(place))
            else:
                self._add(tuned)
        if others and not self.found:
            warnings.warn(
                f"{path} has no kernel configuration for this machine ({_describe(environment)}), "
                f"but for {'; '.join(sorted(others))}: the defaults are used, halley tune measures "
                "better",
                stacklevel=2,
            )

    @classmethod
    def load(cls, device: torch.device, *, num_ranks: int, tp_size: int = 1) -> "ConfigTable":
        """Return the configurations in ``config_path()`` for this machine and the given sizes."""
        environment = tuning_environment(device, num_ranks=num_ranks, tp_size=tp_size)
        return cls(config_path(), environment)

    def find(self, shape: TunedShape, *, base: KernelConfig) -> KernelConfig:
        """Return ``base`` with the settings tuned for these sizes at the nearest token count."""
        near = min(self.found, key=lambda each: each.shape.distance(shape), default=None)
        if near is None or math.isinf(near.shape.distance(shape)):
            return base
        return base.changed(near.settings)

    def write(self, tuned: TunedConfig) -> None:
        """Append a configuration to the file; it overrides earlier ones of the same shape."""
        self._add(tuned)
        _write(self.path, [_entry(self.environment, tuned)], mode="a")

    def _add(self, tuned: TunedConfig) -> None:
        self.found = [each for each in self.found if each.shape != tuned.shape] + [tuned]


def merge_tables(sources: Sequence[Path], path: Path) -> int:
    """Merge files of tuned configurations into ``path``; return the number of lines written.

    Of lines for the same machine and shape, the last is kept; the lines of ``path`` are read first.
    A source that is missing, or has an invalid line or another version, is a ``ValueError``.
    """
    merged: dict[tuple[Environment, TunedShape], dict[str, object]] = {}
    for source in (path, *sources):
        if source != path and not os.path.exists(source):
            raise ValueError(f"merge ({source}) must be a file of {_WHAT}")
        for number, place, tuned in _read(source):
            if tuned is None:
                raise ValueError(f"{source} must be of version {VERSION}, has {show(number)}")
            merged[place, tuned.shape] = _entry(place, tuned)
    _write(path, list(merged.values()), mode="w")
    return len(merged)


def _entry(environment: Environment, tuned: TunedConfig) -> dict[str, object]:
    return {"version": VERSION, "environment": asdict(environment), **asdict(tuned)}


def _read(path: Path) -> Iterator[tuple[object, Environment, TunedConfig | None]]:
    for where, value in read_json_lines(path, what=_WHAT, max_bytes=_MAX_BYTES):
        if not isinstance(value, dict):
            raise ValueError(f"{where} value ({show(value)}) must be a table")
        table = dict(cast(dict[str, object], value))
        for name in ("version", "environment"):
            if name not in table:
                raise ValueError(f"{where} {name} is required")
        number, place = table.pop("version"), table.pop("environment")
        environment = build_record(Environment, place, where=f"{where} environment:")
        tuned = None
        if type(number) is int and number == VERSION:
            tuned = build_record(TunedConfig, table, where=where)
        yield number, environment, tuned


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
