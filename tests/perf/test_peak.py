"""The rate that MFU is a share of: the vendor's where it is known, else a measured one."""

import pytest
import torch

from halley.perf.peak import peak_flops_per_s


def test_known_gpu_has_the_rate_of_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak_flops_per_s(torch.device("cuda", 0)) == 989e12


def test_cpu_is_measured_by_its_best_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clock readings in pairs, before and after each of five products of 2 * 512^3 operations."""
    readings = iter([0.0, 2.0, 2.0, 2.5, 3.0, 4.0, 4.0, 5.0, 5.0, 6.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(readings))
    assert peak_flops_per_s(torch.device("cpu")) == pytest.approx(2 * 512**3 / 0.5)
