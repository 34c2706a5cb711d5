"""The rate that MFU is a share of: the vendor's where it is known, else a measured one."""

import pytest
import torch

from halley.tools import peak
from halley.tools.peak import peak_flops_per_s


def test_known_gpu_has_the_rate_of_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops_per_s(torch.device("cuda", 0)) == 989e12


def test_unknown_gpu_is_measured_by_its_fastest_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clock readings in pairs, before and after each of five matmuls of 2 * 4^3 operations."""
    readings = iter([0.0, 2.0, 2.0, 2.5, 3.0, 4.0, 4.0, 5.0, 5.0, 6.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(readings))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(peak, "_SIZE", 4)
    assert peak._measure_matmul(torch.device("cpu")) == pytest.approx(2 * 4**3 / 0.5)


def test_cpu_has_none() -> None:
    """With a rate of a CPU, its training steps would show a utilisation of no meaning."""
    assert peak_flops_per_s(torch.device("cpu")) is None
