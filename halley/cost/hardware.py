"""Rates of known devices, a roofline model of times, and the device and versions of a process."""

import ctypes
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, final

import torch
from torch.cuda import nccl

from halley.core.validation import check_fields, parse_device


_MATMUL_SIZE = 4096
_TILE_ROWS, _TILE_COLUMNS = 128, 256  # of an output tile of a grouped GEMM on a GPU
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates and latencies of one device, of its host, and of its links to other devices."""

    name: str  # start of the device name that the driver reports; "cpu" for a CPU
    gemm_flops_per_s: float  # of a large bfloat16 matmul (float32 on a CPU)
    peak_flops_per_s: float | None  # dense bfloat16, of the data sheet, for MFU; None: unknown
    memory_bytes_per_s: float  # of a large copy, bytes read plus bytes written
    fused_bytes_per_s: float  # the same for kernels that also compute or gather rows
    link_bytes_per_s: float  # of an all-to-all: bytes that leave each device
    link_latency_us: float  # time of the shortest all-to-all
    launch_us: float  # host time to launch one kernel
    kernel_us: float  # time of the shortest kernel plus the gap before the next one
    graph_us: float = 0.0  # host time from the call of a compiled graph to its first operator
    call_us: float = 0.0  # host time of a call in a compiled graph; a third for Inductor kernels
    collective_us: float = 0.0  # host time to start one collective
    split_sum_us: float = 0.0  # time of the kernel that adds partial sums of a sum over many rows
    network_bytes_per_s: float = 0.0  # of an all-to-all between nodes; 0: rate of the link
    device_bytes: float = 0.0  # memory of the device; 0: unknown
    read_us: float = 0.0  # time in which the host reads a value from the device
    eager_us: float = 0.0  # host time of an operation of an eager layer (docs/predictions.md)
    runs_fused: bool = False  # whether Halley's kernels can run: compute capability 9.0 or higher
    num_sms: int = 0  # SMs that share the tiles of a grouped GEMM; 0: predict without tiles


# Rates of the H200 were measured on four GPUs of one host with torch 2.11 and NCCL 2.28, by a
# grouped GEMM and an NCCL all-to-all of 32 MiB per peer. The peak is from the data sheet (SXM).
# Host times except ``eager_us`` (see docs/predictions.md) are fitted to the forward of GPT2-L-MoE,
# compiled by Inductor in two microbatches, which takes 47 ms. As a check, six of its layers in one
# batch take 12.7 to 13.1 ms; the prediction is 13.6 ms. For ``graph_us``, traces have gaps of 0.9
# ms before the first kernel, and 0.8 ms from forward to backward. For ``fused_bytes_per_s``,
# Inductor's kernels in GPT2-S-MoE take 6.0 ms, and a copy of as many bytes takes 4.7 ms.
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
    eager_us=34.0,
    runs_fused=True,
    num_sms=132,
    device_bytes=141e9,
)
# The H100 is the same chip as the H200, with slower memory.
H100 = replace(
    H200, name="NVIDIA H100", memory_bytes_per_s=3.0e12, fused_bytes_per_s=2.4e12, device_bytes=80e9
)


def _from_data_sheet(
    name: str, *, peak: float, memory: float, link: float, num_sms: int, num_bytes: float
) -> Hardware:
    """Return the ``Hardware`` of an unmeasured GPU: H200 rates, scaled by ratios of data sheets.

    Arguments are in FLOP/s, bytes/s and bytes. The H200's sheet has 989e12, 4.8e12 and 450e9.
    """
    return replace(
        H200,
        name=name,
        peak_flops_per_s=peak,
        gemm_flops_per_s=H200.gemm_flops_per_s * peak / 989e12,
        memory_bytes_per_s=H200.memory_bytes_per_s * memory / 4.8e12,
        fused_bytes_per_s=H200.fused_bytes_per_s * memory / 4.8e12,
        link_bytes_per_s=H200.link_bytes_per_s * link / 450e9,
        num_sms=num_sms,
        device_bytes=num_bytes,
        runs_fused=False,
    )


# Sources: the vendors' data sheets. Links: NVLink of HGX boards, PCIe 4.0 (L40S), Infinity Fabric
# (MI300X). A100 means SXM with 80 GB.
_B200 = _from_data_sheet(
    "NVIDIA B200", peak=2250e12, memory=8.0e12, link=900e9, num_sms=148, num_bytes=180e9
)
B200 = replace(_B200, runs_fused=True)
A100 = _from_data_sheet(
    "NVIDIA A100", peak=312e12, memory=2.0e12, link=300e9, num_sms=108, num_bytes=80e9
)
L40S = _from_data_sheet(
    "NVIDIA L40S", peak=362e12, memory=0.864e12, link=32e9, num_sms=142, num_bytes=48e9
)
MI300X = _from_data_sheet(
    "AMD Instinct MI300X", peak=1307e12, memory=5.3e12, link=448e9, num_sms=304, num_bytes=192e9
)
# Rates of ranks with one CPU core each and gloo over loopback; only orders of magnitude matter. On
# a CPU, Halley predicts no host time for compiled graphs.
CPU = Hardware(
    name="cpu",
    gemm_flops_per_s=5e10,
    peak_flops_per_s=None,
    memory_bytes_per_s=8e9,
    fused_bytes_per_s=8e9,
    link_bytes_per_s=1e9,
    link_latency_us=300.0,
    launch_us=10.0,
    kernel_us=10.0,
)

KNOWN = (H200, H100, B200, A100, L40S, MI300X)


def find_hardware(device: str) -> Hardware:
    """Return the ``Hardware`` of a device name like "NVIDIA H200", or of a model like "H200".

    An unknown device is a ``ValueError``.
    """
    for hardware in KNOWN:
        if device.startswith(hardware.name) or device == hardware.name.split()[-1]:
            return hardware
    if device == CPU.name:
        return CPU
    names = ", ".join(hardware.name for hardware in (*KNOWN, CPU))
    raise ValueError(f"device ({device}) must be one of those with figures: {names}")


@final
class Predictor:
    """Predicts times in us of GEMMs, all-to-alls and memory traffic: a roofline with latencies."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware

    def grouped_gemm_us(
        self, num_rows: float, num_groups: int, *, inner: int, outer: int, itemsize: int
    ) -> float:
        """Predict the time in us of a grouped GEMM: ``num_rows`` rows, ``num_groups`` matrices."""
        area, num_sms = num_rows * outer, self.hardware.num_sms
        if num_sms:  # on average, the last tile of a group and the last wave of tiles are half full
            area += (num_groups * outer + num_sms * _TILE_COLUMNS) * _TILE_ROWS / 2
        compute_s = 2.0 * area * inner / self.hardware.gemm_flops_per_s
        num_bytes = itemsize * (num_rows * (inner + outer) + num_groups * inner * outer)
        memory_s = num_bytes / self.hardware.memory_bytes_per_s
        # The root of the sum of squares: loads overlap arithmetic, but not completely.
        return math.hypot(compute_s, memory_s) * 1e6 + self.hardware.launch_us

    def all_to_all_us(self, num_bytes: float) -> float:
        """Predict the time in us of an all-to-all; each rank sends ``num_bytes`` in total."""
        return self.hardware.link_latency_us + num_bytes / self.hardware.link_bytes_per_s * 1e6

    def network_us(self, num_bytes: float) -> float:
        """Predict the time in us of an all-to-all across nodes; each rank sends ``num_bytes``."""
        rate = self.hardware.network_bytes_per_s or self.hardware.link_bytes_per_s
        return self.hardware.link_latency_us + num_bytes / rate * 1e6

    def memory_us(self, num_bytes: float, *, num_ops: int = 1) -> float:
        """Predict the time in us of ``num_ops`` element-wise operations that move ``num_bytes``."""
        launches_us = num_ops * self.hardware.launch_us
        return max(num_bytes / self.hardware.memory_bytes_per_s * 1e6, launches_us)


def predictor_of(device: torch.device | str) -> Predictor:
    """Return the ``Predictor`` of a device; a GPU that Halley does not know counts as an H200."""
    device = parse_device(device)
    if device.type == "cpu":
        return Predictor(CPU)
    try:
        return Predictor(find_hardware(torch.cuda.get_device_name(device)))
    except ValueError:
        return Predictor(H200)


def peak_flops_per_s(device: torch.device) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of a GPU, for MFU; None for a CPU."""
    if device.type == "cpu":
        return None
    try:
        return find_hardware(torch.cuda.get_device_name(device)).peak_flops_per_s
    except ValueError:
        return _measure_matmul(device)


def _measure_matmul(device: torch.device) -> float:
    """Return the FLOP/s of a square bfloat16 matmul, the fastest of five runs."""
    size = _MATMUL_SIZE
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best_s = float("inf")
    for _ in range(5):
        torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        torch.mm(left, right)
        torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2.0 * size**3 / best_s


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The device, versions and topology on which a measured time depends."""

    device: str  # name of the GPU, or the type of another device, such as "cpu"
    # Versions of torch; on GPUs also of CUDA and NCCL; for tuned kernels also of Triton. "" accepts
    # all versions, and all devices whose names start with ``device``.
    versions: str
    topology: str = ""  # of the ranks, such as "ranks 8"; matters for collectives only

    def __post_init__(self) -> None:
        check_fields(self)

    def accepts(self, other: "Environment") -> bool:
        """Return whether operation times measured in ``other`` are valid in this environment."""
        if self.versions:
            return (self.device, self.versions) == (other.device, other.versions)
        return other.device.startswith(self.device)


def find_environment(device: torch.device, *, topology: str = "") -> Environment:
    """Return the ``Environment`` of this process, to store with times measured on ``device``."""
    name, versions = device.type, f"torch {torch.__version__}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        numbers = cast(tuple[int, ...], nccl.version())  # pyright: ignore[reportUnknownMemberType]
        versions += f", cuda {torch.version.cuda}, nccl {'.'.join(map(str, numbers))}"
    return Environment(device=name, versions=versions, topology=topology)


def link_kind(device: torch.device | str) -> str:
    """Return the link from a GPU to all other visible GPUs, "NVLink" or "PCIe"; "" without others.

    Only NVLink has native peer atomics. If the links differ, the result is "PCIe"; on a CPU, "".
    """
    device = torch.device(device)
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if num_gpus < 2:
        return ""
    driver, has = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    driver.cuInit(0)  # a caller may run before torch initializes CUDA
    index = torch.cuda.current_device() if device.index is None else device.index  # pyright: ignore[reportUnnecessaryComparison]
    for peer in range(num_gpus):
        if peer != index:
            code = driver.cuDeviceGetP2PAttribute(ctypes.byref(has), _NATIVE_ATOMICS, index, peer)
            if code:
                raise RuntimeError(f"cuDeviceGetP2PAttribute failed with CUDA error {code}")
            if not has.value:
                return "PCIe"
    return "NVLink"


def default_path() -> Path:
    """Return the default path of the file in which measured times are kept."""
    return Path.home() / ".cache" / "halley" / "profiles.jsonl"
