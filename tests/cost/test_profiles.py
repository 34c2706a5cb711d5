"""Measured times and contention of work with known times, curves, and the file of profiles."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halley.cost import profiles
from halley.cost.hardware import KNOWN, Environment, find_environment
from halley.cost.profiles import (
    Curve,
    ProfileTable,
    measure_contention,
    measure_curve,
    measure_us,
    operation_key,
    shipped_path,
)
from halley.cost.simulate import Contention


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
    least_us = measure_us(lambda: small @ small, device=CPU)
    assert least_us < measure_us(lambda: large @ large, device=CPU)
    curve = measure_curve(lambda size: torch.ones(size // 4).sum(), [4, 4_000_000], device=CPU)
    assert [size for size, _ in curve.points] == [4, 4_000_000]
    assert curve.points[0][1] < curve.points[1][1]


class _Clock:
    """A clock that GEMMs and collectives advance, in place of the clock of the machine."""

    def __init__(self) -> None:
        self.now_ns = 0

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def run(self, duration_ms: float) -> None:
        self.now_ns += round(duration_ms * 1e6)


class _Collective:
    def __init__(self, clock: _Clock, duration_ms: float) -> None:
        self._clock, self._end_ns = clock, clock.now_ns + round(duration_ms * 1e6)
        self.is_polled = False

    def is_completed(self) -> bool:
        self.is_polled = True
        return self._clock.now_ns >= self._end_ns

    def wait(self) -> None:
        self._clock.now_ns = max(self._clock.now_ns, self._end_ns)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(profiles, "time", clock)
    return clock


def test_ranks_synchronise_before_each_trial(clock: _Clock) -> None:
    started: list[_Collective] = []

    def exchange() -> _Collective:
        started.append(_Collective(clock, 2.0))
        return started[-1]

    measure_contention(lambda _: clock.run(0.5), exchange, device=CPU)
    # GEMMs overlap every second of the last collectives. The first 20 are measured alone.
    assert [each.is_polled for each in started] == [False] * 20 + [False, True] * 5


def test_best_number_of_reserved_sms_is_chosen(clock: _Clock) -> None:
    """GEMMs beside a collective are slow with 4 reserved SMs, fastest with 8, slow with 16."""

    def gemm(reserved_sms: int) -> None:
        clock.run({0: 2.0, 4: 6.0, 8: 3.0, 16: 5.0}[reserved_sms])

    def exchange() -> _Collective:
        return _Collective(clock, 40.0)

    # With 8 reserved SMs, 14 GEMMs of 3 ms run beside the collective, which is found after 42 ms.
    found = measure_contention(gemm, exchange, device=CPU, reserved_sms=(4, 8, 16))
    assert found == Contention(compute=1.5, comm=1.05, sm_margin=8)
    assert measure_contention(gemm, exchange, device=CPU) == Contention()


def test_operation_key_contains_shapes_and_dtypes() -> None:
    shapes, dtypes = [(2, 3), (3, 4)], [torch.float32, torch.bfloat16]
    key = operation_key("aten.mm.default", shapes, dtypes)
    assert key == "aten.mm.default(float32[2,3], bfloat16[3,4])"
    assert operation_key("aten.mm.default", shapes, dtypes, rest="a=1") == f"{key} a=1"


def test_an_operation_is_measured_once(tmp_path: Path) -> None:
    path, calls = tmp_path / "deep" / "profiles.jsonl", []
    table = ProfileTable(path, HERE)
    first = table.measure("op", lambda: calls.append(1), device=CPU)
    assert table.measure("op", lambda: calls.append(1), device=CPU) == first
    assert len(calls) == 20
    assert ProfileTable(path, HERE).time_us("op") == first


def test_file_separates_environments_and_its_last_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "profiles.jsonl"
    other = Environment(device="cpu", versions="torch 2", topology="ranks 2")
    for environment, duration_us in ((HERE, 1.0), (other, 5.0), (HERE, 2.0)):
        ProfileTable(path, environment).add_time("op", duration_us)
    curve = Curve(((8, 3.0), (16, 4.0)))
    ProfileTable(path, other).add_curve("all_to_all", curve)
    more_ranks = replace(other, topology="ranks 4")  # times of operations do not depend on it
    wanted = {HERE: (2.0, None), other: (5.0, curve), more_ranks: (5.0, None)}
    for environment, want in wanted.items():
        table = ProfileTable(path, environment)
        assert (table.time_us("op"), table.curve("all_to_all")) == want


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


def test_environment_of_a_cpu() -> None:
    want = Environment(device="cpu", versions=f"torch {torch.__version__}", topology="ranks 4")
    assert find_environment(CPU, topology="ranks 4") == want
