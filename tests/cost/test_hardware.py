"""Hardware tables, predictions by hand on round numbers, and the peak rate that MFU uses."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halley.cost import hardware
from halley.cost.hardware import (
    A100,
    CPU,
    H100,
    H200,
    KNOWN,
    Hardware,
    Predictor,
    find_hardware,
    peak_flops_per_s,
)


ROUND = Hardware(
    name="round",
    gemm_flops_per_s=1e12,
    peak_flops_per_s=None,
    memory_bytes_per_s=1e9,
    fused_bytes_per_s=1e9,
    link_bytes_per_s=1e8,
    link_latency_us=20.0,
    launch_us=5.0,
    graph_us=0.0,
    call_us=0.0,
    collective_us=0.0,
    kernel_us=1.0,
    split_sum_us=0.0,
    read_us=2.0,
)


@pytest.mark.parametrize(
    ("device_name", "expected"),
    [
        ("cpu", CPU),
        ("NVIDIA H200", H200),
        ("NVIDIA H100 80GB HBM3", H100),
        ("NVIDIA A100-SXM4-80GB", A100),
    ],
)
def test_hardware_is_found_by_the_name_of_the_driver(device_name: str, expected: Hardware) -> None:
    assert find_hardware(device_name) is expected


@pytest.mark.parametrize("device_name", ["", "CPU", "NVIDIA A10", "NVIDIA GeForce RTX 4090"])
def test_error_for_an_unknown_device_lists_known_ones(device_name: str) -> None:
    names = "NVIDIA H200, NVIDIA H100, NVIDIA A100, cpu"
    with pytest.raises(ValueError, match=rf"device \({device_name}\) must be .*: {names}"):
        find_hardware(device_name)


def test_every_device_is_found_by_its_own_name() -> None:
    for known in KNOWN:
        assert find_hardware(known.name) is known


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_gemm_rate_is_below_the_peak(known: Hardware) -> None:
    assert known.peak_flops_per_s is not None
    assert 0.5 * known.peak_flops_per_s < known.gemm_flops_per_s < known.peak_flops_per_s


def test_large_grouped_gemm_is_bound_by_arithmetic() -> None:
    # 2 * 4000 * 1000 * 2000 = 16e9 operations at 1e12 a second. The bytes, 28e6, take 280 us.
    fast = Predictor(dataclasses.replace(ROUND, memory_bytes_per_s=1e11))
    assert fast.grouped_gemm_us(4000, 1, inner=1000, outer=2000, itemsize=2) == 16005.0


def test_small_grouped_gemm_is_bound_by_its_weights() -> None:
    # 3 groups of 100 x 200 and 10 rows of 100 + 200, 4 bytes each: 252000 bytes at 1e9 a second.
    us = Predictor(ROUND).grouped_gemm_us(10, 3, inner=100, outer=200, itemsize=4)
    assert us == 252.0 + 5.0


def test_all_to_all_is_latency_plus_bytes_over_bandwidth() -> None:
    assert Predictor(ROUND).all_to_all_us(0) == 20.0
    assert Predictor(ROUND).all_to_all_us(1_000_000) == 20.0 + 10_000.0


def test_memory_time_is_at_least_the_launches() -> None:
    predictor = Predictor(ROUND)
    assert predictor.memory_us(1_000_000) == 1000.0
    assert predictor.memory_us(1000) == 5.0  # at least one launch
    assert predictor.memory_us(1000, num_ops=12) == 60.0
    assert predictor.memory_us(1_000_000, num_ops=12) == 1000.0


_SIZES = st.integers(0, 1 << 20)


@given(_SIZES, _SIZES, st.integers(1, 4096), st.integers(1, 4096), st.sampled_from((2, 4)))
def test_more_work_never_takes_less_time(
    rows: int, more: int, inner: int, outer: int, itemsize: int
) -> None:
    predictor = Predictor(H200)
    size = {"inner": inner, "outer": outer, "itemsize": itemsize}
    base_us = predictor.grouped_gemm_us(rows, 4, **size)
    assert predictor.grouped_gemm_us(rows + more, 4, **size) >= base_us
    assert predictor.grouped_gemm_us(rows, 4 + more, **size) >= base_us
    for name in ("inner", "outer", "itemsize"):
        assert predictor.grouped_gemm_us(rows, 4, **size | {name: size[name] + 1}) >= base_us
    assert predictor.all_to_all_us(rows + more) >= predictor.all_to_all_us(rows)
    assert predictor.memory_us(rows + more) >= predictor.memory_us(rows)


def test_peak_of_a_known_gpu_is_that_of_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops_per_s(torch.device("cuda", 0)) == 989e12


def test_peak_of_an_unknown_gpu_is_that_of_the_fastest_matmul(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five matmuls of 2 * 4^3 operations; the clock is read before and after each of them."""
    readings = iter([0.0, 2.0, 2.0, 2.5, 3.0, 4.0, 4.0, 5.0, 5.0, 6.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(readings))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(hardware, "_MATMUL_SIZE", 4)
    assert hardware._measure_matmul(torch.device("cpu")) == pytest.approx(2 * 4**3 / 0.5)


def test_cpu_has_no_peak() -> None:
    """No vendor publishes such a rate, so the MFU of a CPU would mean nothing."""
    assert peak_flops_per_s(torch.device("cpu")) is None
