"""Rates and latencies of known devices, and a roofline model that predicts times from them."""

import time
from dataclasses import dataclass, replace
from typing import final

import torch


_MATMUL_SIZE = 4096
_NUM_MATMULS = 5


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates of one device and of the links between the devices of one host.

    Attributes:
        name: the device name of the driver.
        gemm_flops_per_s: rate of a large bfloat16 matmul (float32 on a CPU).
        peak_flops_per_s: dense rate in the vendor's data sheet, the denominator of MFU; None if
            there is none.
        memory_bytes_per_s: rate of a large copy, bytes read plus bytes written.
        fused_bytes_per_s: the same for kernels that a compiler fuses, which also compute.
        link_bytes_per_s: rate of an all-to-all, bytes out of each device.
        link_latency_us: time of the shortest all-to-all.
        launch_us: host time to launch one operation of a layer that is not compiled.
        graph_us: host time from the call of a compiled graph to its first operator.
        call_us: host time of a compiled graph to call one operator. The launch of a generated
            kernel takes a third of it.
        collective_us: host time to start one collective.
        kernel_us: time of the shortest kernel and the gap before the next one.
        split_sum_us: time of the second kernel of a sum over many rows, which adds the partial sums
            of the first kernel with few CTAs.
        read_us: time in which the host reads a value from the device.
    """

    name: str
    gemm_flops_per_s: float
    peak_flops_per_s: float | None
    memory_bytes_per_s: float
    fused_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_us: float
    launch_us: float
    graph_us: float
    call_us: float
    collective_us: float
    kernel_us: float
    split_sum_us: float
    read_us: float


# Rates: measured on four GPUs of one host with torch 2.11 and NCCL 2.28, by a grouped GEMM and an
# NCCL all-to-all of 32 MiB per peer. Peak: the vendor's data sheet (SXM, dense bfloat16).
# Host times: fitted to the forward of GPT2-L-MoE, compiled by Inductor in two microbatches (47 ms).
# Check: six of its layers in one batch take 12.7 to 13.1 ms, and the prediction is 13.6 ms.
# graph_us: gaps in traces before the first kernel and between forward and backward, 0.9 and 0.8 ms.
# fused_bytes_per_s: kernels of Inductor in GPT2-S-MoE take 6.0 ms. A copy of their bytes takes
# 4.7 ms.
H200 = Hardware(
    name="NVIDIA H200",
    gemm_flops_per_s=700e12,
    peak_flops_per_s=989e12,
    memory_bytes_per_s=4.3e12,
    fused_bytes_per_s=3.4e12,
    link_bytes_per_s=278e9,
    link_latency_us=40.0,
    launch_us=6.0,
    graph_us=700.0,
    call_us=42.0,
    collective_us=170.0,
    kernel_us=3.0,
    split_sum_us=15.0,
    read_us=20.0,
)
# The H100 is the same chip as the H200, with slower memory.
H100 = replace(H200, name="NVIDIA H100", memory_bytes_per_s=3.0e12, fused_bytes_per_s=2.4e12)
# Rates: data sheet times the fraction of its data sheet that an H200 reaches. Latencies: H200.
A100 = replace(
    H200,
    name="NVIDIA A100",
    gemm_flops_per_s=220e12,
    peak_flops_per_s=312e12,
    memory_bytes_per_s=1.7e12,
    fused_bytes_per_s=1.35e12,
    link_bytes_per_s=180e9,
)
# One core per rank and gloo over loopback. Only the order of magnitude matters on a CPU.
CPU = Hardware(
    name="cpu",
    gemm_flops_per_s=5e10,
    peak_flops_per_s=None,
    memory_bytes_per_s=8e9,
    fused_bytes_per_s=8e9,
    link_bytes_per_s=1e9,
    link_latency_us=300.0,
    launch_us=10.0,
    graph_us=0.0,
    call_us=0.0,  # the host is the device
    collective_us=0.0,
    kernel_us=10.0,
    split_sum_us=0.0,
    read_us=0.0,
)

KNOWN = (H200, H100, A100)


def find_hardware(device: str) -> Hardware:
    """Return the rates of a device.

    Args:
        device: a name as from ``torch.cuda.get_device_name``, or "cpu".

    Raises:
        ValueError: the device is unknown.
    """
    if device == CPU.name:
        return CPU
    for hardware in KNOWN:
        if device.startswith(hardware.name):
            return hardware
    names = ", ".join(hardware.name for hardware in (*KNOWN, CPU))
    raise ValueError(f"device ({device}) must be one of those with figures: {names}")


@final
class Predictor:
    """Predict the times of GEMMs, all-to-alls and memory traffic: a roofline with latencies."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware

    def grouped_gemm_us(
        self, num_rows: float, num_groups: int, *, inner: int, outer: int, itemsize: int
    ) -> float:
        """Predict a grouped GEMM of ``num_rows`` rows with ``num_groups`` matrices (inner, outer).

        The result is the larger of the arithmetic and the memory time (input, output, weights).
        """
        compute_s = 2.0 * num_rows * inner * outer / self.hardware.gemm_flops_per_s
        num_bytes = itemsize * (num_rows * (inner + outer) + num_groups * inner * outer)
        memory_s = num_bytes / self.hardware.memory_bytes_per_s
        return max(compute_s, memory_s) * 1e6 + self.hardware.launch_us

    def all_to_all_us(self, num_bytes: float) -> float:
        """Predict an all-to-all in which each rank sends ``num_bytes`` in total to its peers."""
        return self.hardware.link_latency_us + num_bytes / self.hardware.link_bytes_per_s * 1e6

    def memory_us(self, num_bytes: float, *, num_ops: int = 1) -> float:
        """Predict ``num_ops`` element-wise operations that move ``num_bytes`` in total."""
        launches_us = num_ops * self.hardware.launch_us
        return max(num_bytes / self.hardware.memory_bytes_per_s * 1e6, launches_us)


def peak_flops_per_s(device: torch.device) -> float | None:
    """Return the dense bfloat16 rate of a GPU, the denominator of model FLOPs utilisation (MFU).

    It is the vendor's rate for a known GPU, and that of measured matmuls for an unknown GPU. The
    result is None for a CPU, because vendors publish no rate for CPUs.
    """
    if device.type == "cpu":
        return None
    try:
        peak = find_hardware(torch.cuda.get_device_name(device)).peak_flops_per_s
    except ValueError:
        peak = None
    return _measure_matmul(device) if peak is None else peak


def _measure_matmul(device: torch.device) -> float:
    """Return the FLOP/s of the fastest of some square bfloat16 matmuls."""
    size = _MATMUL_SIZE
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best_s = float("inf")
    for _ in range(_NUM_MATMULS):
        torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        torch.mm(left, right)
        torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2.0 * size**3 / best_s
