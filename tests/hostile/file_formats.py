"""The JSON files of a run's plan and measurements: a valid example and the reader of each."""

import warnings
from collections.abc import Callable
from pathlib import Path

from halley.core.placement import (
    ExpertPlacement,
    load_placements,
    read_counts,
    save_placements,
    write_counts,
)
from halley.cost.profiles import Curve, Environment, ProfileTable
from halley.cost.simulate import Contention
from halley.fused.config import ConfigTable, TunedConfig, TunedShape


HERE = Environment(device="cpu", versions="torch 2", topology="ranks 2")
PLACEMENT = ExpertPlacement(num_experts=3, experts_WL=((0, 1), (0, 2)))
SHAPE = TunedShape(hidden_size=64, num_experts=8, top_k=2, dtype="bfloat16", num_tokens=512)


def write_placement(path: Path) -> None:
    save_placements(path, [PLACEMENT, PLACEMENT])


def read_placement(path: Path) -> object:
    return load_placements(path, num_experts=3, num_ranks=2, num_layers=2)


def write_expert_counts(path: Path) -> None:
    write_counts(path, [[3, 0, 5], [1, 2, 3]], first_step=1, last_step=9)


def write_profiles(path: Path) -> None:
    table = ProfileTable(path, HERE)
    table.add_time("mm", 12.5)
    table.add_curve("all_to_all", Curve(((1000, 10.0), (4000, 20.0))))
    table.add_contention(Contention(compute=1.5, comm=1.25))


def read_profiles(path: Path) -> object:
    table = ProfileTable(path, HERE)
    return table.time_us("mm"), table.curve("all_to_all"), table.contention


def write_kernel_configs(path: Path) -> None:
    table = ConfigTable(path, HERE)
    for num_tokens in (512, 1024):
        shape = TunedShape(
            hidden_size=64, num_experts=8, top_k=2, dtype="bfloat16", num_tokens=num_tokens
        )
        tuned = TunedConfig(
            shape=shape,
            settings=("sum_rows=16", "up.run=2"),
            median_us=80.0,
            default_us=100.0,
            sweeps={"sum_rows": {"8": 90.0, "16": 80.0}},
        )
        table.write(tuned)


def read_kernel_configs(path: Path) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of files without a line for this machine
        return ConfigTable(path, HERE).found


# Name of the format: the writer of a valid file, the reader.
FORMATS: dict[str, tuple[Callable[[Path], None], Callable[[Path], object]]] = {
    "placement": (write_placement, read_placement),
    "counts": (write_expert_counts, read_counts),
    "profiles": (write_profiles, read_profiles),
    "tuned kernel configurations": (write_kernel_configs, read_kernel_configs),
}
