"""Measured times and contention of work with known times, curves, and the file of profiles."""

import json
import math
import threading
import time
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
    measure_contention,
    measure_curve,
    measure_us,
    operation_key,
    shipped_path,
)


CPU = torch.device("cpu")
HERE = Environment(device="cpu", versions="torch 1", topology="ranks 2")


def test_curve_below_between_and_above_its_points() -> None:
    curve = Curve(((1000, 10.0), (4000, 20.0), (8000, 60.0)))
    assert curve.at(0) == curve.at(1000) == 10.0
    assert math.isclose(curve.at(2000), 10.0 * math.sqrt(2.0))  # half of the way from 1000 to 4000
    assert math.isclose(curve.at(4000), 20.0)
    assert math.isclose(curve.at(9000), 70.0)  # 40 us for 4000 bytes, and 1000 more
    assert math.isclose(Curve(((1000, 10.0),)).at(3000), 30.0)
    # A curve that falls at its end, because of noise, stays constant above its last point.
    assert Curve(((1000, 10.0), (2000, 8.0))).at(100_000) == 8.0


def test_slower_work_is_measured_slower() -> None:
    small, large = torch.ones(8, 8), torch.ones(512, 512)
    assert measure_us(lambda: small @ small, device=CPU) < measure_us(
        lambda: large @ large, device=CPU
    )
    curve = measure_curve(lambda size: torch.ones(size // 4).sum(), [4, 4_000_000], device=CPU)
    assert [size for size, _ in curve.points] == [4, 4_000_000]
    assert curve.points[0][1] < curve.points[1][1]


class _Sleep:
    """A collective that sleeps on its own thread."""

    def __init__(self, seconds: float) -> None:
        self._thread = threading.Thread(target=time.sleep, args=(seconds,))
        self._thread.start()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()


def test_ranks_synchronise_before_each_trial() -> None:
    polled: list[bool] = []  # for each collective, whether GEMMs overlapped it

    class Short(_Sleep):
        def __init__(self) -> None:
            super().__init__(0.002)
            self.number = len(polled)
            polled.append(False)

        def is_completed(self) -> bool:
            polled[self.number] = True
            return super().is_completed()

    measure_contention(lambda _: time.sleep(0.0005), Short, device=CPU)
    first = polled.index(True)
    assert polled[first - 1 :] == [False, True] * 5
    assert first - 1 == 20  # runs that measure the collective alone


def test_best_number_of_reserved_sms_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """GEMMs beside a collective are slow with 4 reserved SMs, fastest with 8, slow with 16."""
    monkeypatch.setattr(profiles, "_WARMUP", 1)
    monkeypatch.setattr(profiles, "_COUNT", 3)
    monkeypatch.setattr(profiles, "_TRIALS", 3)

    def gemm(reserved_sms: int) -> None:
        time.sleep({0: 0.002, 4: 0.006, 8: 0.003, 16: 0.005}[reserved_sms])

    found = measure_contention(gemm, lambda: _Sleep(0.04), device=CPU, reserved_sms=(4, 8, 16))
    assert found.sm_margin == 8
    assert found.compute == pytest.approx(1.5, abs=0.25)  # 0.003 s over 0.002 s
    assert found.comm == pytest.approx(1.0, abs=0.3)
    alone = measure_contention(gemm, lambda: _Sleep(0.04), device=CPU)
    assert alone.compute == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize("points", [(), ((0, 1.0),), ((2, 1.0), (1, 1.0)), ((1, 1.0), (1, 2.0))])
def test_bytes_of_points_must_ascend(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="must be positive, distinct and ascending"):
        Curve(points)


def test_operation_key_contains_shapes_and_dtypes() -> None:
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


def test_file_separates_environments_and_its_last_line_counts(tmp_path: Path) -> None:
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


def test_times_of_operations_are_valid_for_any_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "profiles.jsonl"
    ProfileTable(path, HERE).add_time("op", 2.0)
    ProfileTable(path, HERE).add_curve("all_to_all", Curve(((8, 3.0), (16, 4.0))))
    table = ProfileTable(path, replace(HERE, topology="ranks 4"))
    assert (table.time_us("op"), table.curve("all_to_all")) == (2.0, None)


def test_environment_without_versions_accepts_all_versions_of_its_device(tmp_path: Path) -> None:
    path = tmp_path / "profiles.jsonl"
    for device, duration_us in (("NVIDIA H100 80GB HBM3", 2.0), ("NVIDIA H200", 3.0)):
        ProfileTable(path, replace(HERE, device=device)).add_time("op", duration_us)
    for device, duration_us in (("NVIDIA H100", 2.0), ("NVIDIA H200", 3.0), ("NVIDIA A100", None)):
        any_version = Environment(device=device, versions="", topology="ranks 8")
        assert ProfileTable(path, any_version, offline=True).time_us("op") == duration_us


def test_tables_of_the_package_belong_to_known_devices() -> None:
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
