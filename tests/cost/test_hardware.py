"""Hardware tables, predictions by hand on round numbers, and the peak rate that MFU uses."""

import dataclasses

import pytest
import torch

from halley.cost import hardware
from halley.cost.hardware import A100, CPU, H100, H200, Predictor, find_hardware, peak_flops_per_s


RATES = {"gemm_flops_per_s": 1e12, "memory_bytes_per_s": 1e9, "link_bytes_per_s": 1e8}
ROUND = dataclasses.replace(CPU, **RATES, link_latency_us=20.0, launch_us=5.0)


def test_hardware_is_found_by_the_name_of_the_driver() -> None:
    known = {"cpu": CPU, "NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100, "A100": A100}
    assert {name: find_hardware(name) for name in known} == known
    names = "NVIDIA H200, NVIDIA H100, NVIDIA B200, NVIDIA A100, .*, cpu"
    for device_name in ("", "NVIDIA A10"):
        with pytest.raises(ValueError, match=rf"device \({device_name}\) must be .*: {names}"):
            find_hardware(device_name)


@pytest.mark.parametrize(("num_sms", "gemm_us"), [(0, 16000.0), (2, 16321.536)])
def test_grouped_gemm_computes_whole_tiles_and_reads_its_weights(num_sms, gemm_us) -> None:
    # 16e9 operations take 16 ms, 28e6 bytes 12 ms. With 2 SMs, 64 x 2000 + 128 x 256 outputs more.
    predictor = Predictor(dataclasses.replace(ROUND, memory_bytes_per_s=7e9 / 3, num_sms=num_sms))
    us = predictor.grouped_gemm_us(4000, 1, inner=1000, outer=2000, itemsize=2)
    assert us == pytest.approx((gemm_us**2 + 12000.0**2) ** 0.5 + 5.0)


def test_bytes_take_time_after_a_latency_or_beside_launches() -> None:
    predictor = Predictor(ROUND)
    assert predictor.all_to_all_us(0) == 20.0
    assert predictor.all_to_all_us(1_000_000) == 20.0 + 10_000.0
    assert predictor.memory_us(1_000_000) == 1000.0
    assert predictor.memory_us(1000, num_ops=12) == 60.0  # at least the launches
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
