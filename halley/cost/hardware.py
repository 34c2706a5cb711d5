"""What a device and its links can do: the figures that predictions start from."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates of one device and of the links between devices of one host.

    Attributes:
        name: what the driver calls the device.
        gemm_flops_per_s: rate of a large bf16 matrix product (float32 on a CPU).
        peak_flops_per_s: the vendor's dense rate, which MFU is a share of; None if unknown.
        memory_bytes_per_s: a large copy, bytes read plus bytes written.
        fused_bytes_per_s: the same of kernels that a compiler makes, which compute besides.
        link_bytes_per_s: all-to-all, bytes out of each device.
        link_latency_us: shortest all-to-all.
        launch_us: host time to issue one operation of a layer that is not compiled.
        graph_us: host time from the call of a compiled graph to its first operator.
        call_us: host time of a compiled graph to call one operator; a kernel that the compiler made
            takes a third.
        collective_us: host time to start one collective.
        kernel_us: shortest kernel, with the gap before the next.
        split_sum_us: the second kernel of a sum over many rows, which adds what the programs of the
            first have summed: few programs, few bytes.
        read_us: until the host has read a value that the device made.
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


# Measured on four GPUs of one host with torch 2.11 and NCCL 2.28: grouped GEMM and NCCL all-to-all
# of 32 MiB a peer; peak from the vendor's data sheet (SXM, dense bf16). Times of the host fit
# forward of GPT2-L-MoE compiled by Inductor in two parts a range, about 47 ms; whole, six of its
# layers take 12.7 to 13.1 ms and are predicted to take 13.6. That of a graph is what traces show
# before the first kernel of forward and between forward and backward (0.9 and 0.8 ms, profiled),
# and kernels that Inductor makes take 6.0 ms in GPT2-S-MoE for what a copy moves in 4.7.
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
# The same chip with slower memory.
H100 = replace(H200, name="NVIDIA H100", memory_bytes_per_s=3.0e12, fused_bytes_per_s=2.4e12)
# Data sheet; rates at the share of it that the H200 reaches, and its times.
A100 = replace(
    H200,
    name="NVIDIA A100",
    gemm_flops_per_s=220e12,
    peak_flops_per_s=312e12,
    memory_bytes_per_s=1.7e12,
    fused_bytes_per_s=1.35e12,
    link_bytes_per_s=180e9,
)
# One core a rank, gloo over loopback: the order of magnitude is what matters.
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
    call_us=0.0,  # the host computes
    collective_us=0.0,
    kernel_us=10.0,
    split_sum_us=0.0,
    read_us=0.0,
)

KNOWN = (H200, H100, A100)


def find_hardware(device: str) -> Hardware:
    """Return the figures of the device that the driver calls ``device``.

    Args:
        device: as from ``torch.cuda.get_device``, or "cpu".

    Raises:
        ValueError: no figures are known for it.
    """
    if device == CPU.name:
        return CPU
    for hardware in KNOWN:
        if device.startswith(hardware.name):
            return hardware
    names = ", ".join(hardware.name for hardware in (*KNOWN, CPU))
    raise ValueError(f"device ({device}) must be one of those with figures: {names}")
