"""Hardware tables, predictions by hand on round numbers, and the peak rate that MFU uses."""

import dataclasses

import pytest
import torch

from halley.cost import hardware
from halley.cost.hardware import A100, CPU, H100, H200, Predictor, find_hardware, peak_flops_per_s


RATES = {"gemm_flops_per_s": 1e12, "memory_bytes_per_s": 1e9, "link_bytes_per_s": 1e8}
ROUND = dataclasses.replace(CPU, **RATES, link_latency_us=20.0, launch_us=5.0)


def test_hardware_is_found_by_the_name_of_the_driver() -> None:
    assert find_hardware("cpu") is CPU
    assert find_hardware("NVIDIA H200") is H200
    assert find_hardware("NVIDIA H100 80GB HBM3") is H100
    assert find_hardware("NVIDIA A100-SXM4-80GB") is A100
    names = "NVIDIA H200, NVIDIA H100, NVIDIA A100, cpu"
    for device_name in ("", "NVIDIA A10"):
        with pytest.raises(ValueError, match=rf"device \({device_name}\) must be .*: {names}"):
            find_hardware(device_name)


def test_large_grouped_gemm_is_bound_by_arithmetic_and_a_small_one_by_its_weights() -> None:
    # 2 * 4000 * 1000 * 2000 = 16e9 operations at 1e12 a second. The bytes, 28e6, take 280 us.
    fast = Predictor(dataclasses.replace(ROUND, memory_bytes_per_s=1e11))
    assert fast.grouped_gemm_us(4000, 1, inner=1000, outer=2000, itemsize=2) == 16005.0
    # 3 groups of 100 x 200 and 10 rows of 100 + 200, 4 bytes each: 252000 bytes at 1e9 a second.
    us = Predictor(ROUND).grouped_gemm_us(10, 3, inner=100, outer=200, itemsize=4)
    assert us == 252.0 + 5.0


def test_bytes_take_time_after_a_latency_or_beside_launches() -> None:
    predictor = Predictor(ROUND)
    assert predictor.all_to_all_us(0) == 20.0
    assert predictor.all_to_all_us(1_000_000) == 20.0 + 10_000.0
    assert predictor.memory_us(1_000_000) == 1000.0
    assert predictor.memory_us(1000) == 5.0  # at least one launch
    assert predictor.memory_us(1000, num_ops=12) == 60.0
    assert predictor.memory_us(1_000_000, num_ops=12) == 1000.0


def test_peak_is_that_of_the_table_or_of_the_fastest_matmul(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops_per_s(torch.device("cuda", 0)) == 989e12
    assert peak_flops_per_s(torch.device("cpu")) is None  # vendors publish no rate for CPUs
    # Five matmuls of 2 * 4^3 operations; the clock is read before and after each of them.
    readings = iter([0.0, 2.0, 2.0, 2.5, 3.0, 4.0, 4.0, 5.0, 5.0, 6.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(readings))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(hardware, "_MATMUL_SIZE", 4)
    assert hardware._measure_matmul(torch.device("cpu")) == pytest.approx(2 * 4**3 / 0.5)
