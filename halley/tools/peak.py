"""Find the arithmetic rate of a GPU, of which model FLOPs utilisation (MFU) is a share."""

import time

import torch

from halley.cost.hardware import find_hardware


_SIZE = 4096
_NUM_MATMULS = 5


def peak_flops_per_s(device: torch.device) -> float | None:
    """Return the vendor's dense rate of a known GPU, of another the fastest of some matmuls.

    None for a CPU: no rate is published for it, and a share of a measured one says nothing.

    Args:
        device: of this rank; the rate is that of one rank.
    """
    if device.type == "cpu":
        return None
    try:
        peak = find_hardware(torch.cuda.get_device_name(device)).peak_flops_per_s
    except ValueError:
        peak = None
    return _measure_matmul(device) if peak is None else peak


def _measure_matmul(device: torch.device) -> float:
    left, right = (torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    best_s = float("inf")
    for _ in range(_NUM_MATMULS):
        torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        torch.mm(left, right)
        torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2.0 * _SIZE**3 / best_s
