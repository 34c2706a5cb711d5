"""Figures of devices are found by the names that drivers give."""

import pytest

from halley.cost.hardware import A100, CPU, H100, H200, KNOWN, Hardware, find_hardware


@pytest.mark.parametrize(
    ("device_name", "hardware"),
    [
        ("cpu", CPU),
        ("NVIDIA H200", H200),
        ("NVIDIA H100 80GB HBM3", H100),
        ("NVIDIA A100-SXM4-80GB", A100),
    ],
)
def test_find_hardware(device_name: str, hardware: Hardware) -> None:
    assert find_hardware(device_name) is hardware


@pytest.mark.parametrize("device_name", ["", "CPU", "NVIDIA A10", "NVIDIA GeForce RTX 4090"])
def test_unknown_device_names_those_with_figures(device_name: str) -> None:
    names = "NVIDIA H200, NVIDIA H100, NVIDIA A100, cpu"
    with pytest.raises(ValueError, match=rf"device \({device_name}\) must be .*: {names}"):
        find_hardware(device_name)


def test_no_name_hides_another() -> None:
    for hardware in KNOWN:
        assert find_hardware(hardware.name) is hardware


@pytest.mark.parametrize("hardware", KNOWN, ids=lambda hardware: hardware.name)
def test_gemm_stays_below_the_peak(hardware: Hardware) -> None:
    assert hardware.peak_flops_per_s is not None
    assert 0.5 * hardware.peak_flops_per_s < hardware.gemm_flops_per_s < hardware.peak_flops_per_s
