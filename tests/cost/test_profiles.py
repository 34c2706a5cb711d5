"""Profiles: interpolation by hand, one measurement a key, a file that others read back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halley.cost import profiles
from halley.cost.hardware import KNOWN
from halley.cost.profiles import (
    Curve,
    Environment,
    ProfileTable,
    find_environment,
    operation_key,
    shipped_path,
)


CPU = torch.device("cpu")
HERE = Environment(device="cpu", versions="torch 1", topology="ranks 2")


@pytest.mark.parametrize("points", [(), ((0, 1.0),), ((2, 1.0), (1, 1.0)), ((1, 1.0), (1, 2.0))])
def test_points_must_ascend(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="must be positive, distinct and ascending"):
        Curve(points)


def test_operation_key_tells_shapes_and_dtypes_apart() -> None:
    key = operation_key("aten.mm.default", [(2, 3), (3, 4)], [torch.float32, torch.bfloat16])
    assert key == "aten.mm.default(float32[2,3], bfloat16[3,4])"


def test_an_operation_is_measured_once(tmp_path: Path) -> None:
    path, calls = tmp_path / "deep" / "profiles.jsonl", []
    table = ProfileTable(path, HERE)
    first = table.measure("op", lambda: calls.append(1), device=CPU)
    assert len(calls) == 20
    assert table.measure("op", lambda: calls.append(1), device=CPU) == first
    assert len(calls) == 20
    assert ProfileTable(path, HERE).time_us("op") == first


def test_file_keeps_environments_apart_and_the_last_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "profiles.jsonl"
    other = Environment(device="cpu", versions="torch 2", topology="ranks 2")
    for environment, duration_us in ((HERE, 1.0), (other, 5.0), (HERE, 2.0)):
        ProfileTable(path, environment).add_time("op", duration_us)
    ProfileTable(path, other).add_curve("all_to_all", Curve(((8, 3.0), (16, 4.0))))
    assert ProfileTable(path, HERE).time_us("op") == 2.0
    assert ProfileTable(path, HERE).curve("all_to_all") is None
    assert ProfileTable(path, other).time_us("op") == 5.0
    assert ProfileTable(path, other).curve("all_to_all") == Curve(((8, 3.0), (16, 4.0)))
    assert all(json.loads(line)["environment"] for line in path.read_text().splitlines())


def test_times_of_operations_hold_for_any_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "profiles.jsonl"
    ProfileTable(path, HERE).add_time("op", 2.0)
    ProfileTable(path, HERE).add_curve("all_to_all", Curve(((8, 3.0), (16, 4.0))))
    table = ProfileTable(path, replace(HERE, topology="ranks 4"))
    assert (table.time_us("op"), table.curve("all_to_all")) == (2.0, None)


def test_a_plan_from_afar_takes_any_versions_of_its_device(tmp_path: Path) -> None:
    path = tmp_path / "profiles.jsonl"
    for device, duration_us in (("NVIDIA H100 80GB HBM3", 2.0), ("NVIDIA H200", 3.0)):
        ProfileTable(path, replace(HERE, device=device)).add_time("op", duration_us)
    for device, duration_us in (("NVIDIA H100", 2.0), ("NVIDIA H200", 3.0), ("NVIDIA A100", None)):
        far = Environment(device=device, versions="", topology="ranks 8")
        assert ProfileTable(path, far, offline=True).time_us("op") == duration_us


def test_tables_of_the_package_are_those_of_known_devices() -> None:
    folder = Path(profiles.__file__).parent / "tables"
    paths = {hardware.name: shipped_path(hardware.name) for hardware in KNOWN}
    assert set(folder.iterdir()) == {path for path in paths.values() if path}
    for name, path in paths.items():
        if path is not None:
            table = ProfileTable(path, Environment(device=name, versions=""), offline=True)
            assert table.time_us("aten.mm.default(bfloat16[16384,4096], bfloat16[4096,4096])")


def test_offline_table_never_measures(tmp_path: Path) -> None:
    path = tmp_path / "profiles.jsonl"
    with pytest.raises(ValueError, match=r"path \(.*\) must be a file when offline"):
        ProfileTable(path, HERE, offline=True)
    ProfileTable(path, HERE).add_time("known", 3.0)
    table = ProfileTable(path, HERE, offline=True)
    assert table.measure("known", pytest.fail, device=CPU) == 3.0
    assert table.measure("unknown", pytest.fail, device=CPU) is None


@pytest.mark.parametrize("line", ["{", "[]", '{"op": "a", "us": 1}', '{"environment": {"a": 1}}'])
def test_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "profiles.jsonl"
    ProfileTable(path, HERE).add_time("op", 1.0)
    with path.open("a") as file:
        file.write(line)
    with pytest.raises(ValueError, match=r"profiles\.jsonl:2 must be a line of profiles"):
        ProfileTable(path, HERE)


def test_environment_of_a_cpu() -> None:
    environment = find_environment(CPU, topology="ranks 4")
    assert environment.device == "cpu"
    assert torch.__version__ in environment.versions
    assert environment.topology == "ranks 4"
