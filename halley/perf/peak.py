"""The arithmetic rate that model FLOPs utilisation is a share of."""

import time

import torch

from halley.cost.hardware import find_hardware


_SIZE = 512
_NUM_PRODUCTS = 5


def peak_flops_per_s(device: torch.device) -> float:
    """Return the vendor's dense rate of a known GPU, else the best of some matrix products.

    Args:
        device: of this rank; the rate is that of one rank.
    """
    if device.type == "cuda":
        try:
            peak = find_hardware(torch.cuda.get_device_name(device)).peak_flops_per_s
        except ValueError:
            peak = None
        if peak is not None:
            return peak
    size = _SIZE if device.type == "cpu" else 8 * _SIZE
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best_s = float("inf")
    for _ in range(_NUM_PRODUCTS):
        _synchronize(device)
        start_s = time.perf_counter()
        torch.mm(left, right)
        _synchronize(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2.0 * size**3 / best_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
