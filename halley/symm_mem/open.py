"""The heap that fits a device."""

import torch
import torch.distributed as dist

from halley.symm_mem.cuda import CudaHeap
from halley.symm_mem.heap import AbstractSymmHeap, RangeHook
from halley.symm_mem.posix import SharedHeap


def open_heap(
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    *,
    on_map: RangeHook | None = None,
    on_unmap: RangeHook | None = None,
) -> AbstractSymmHeap:
    """Open a heap for the ranks of a group: GPU memory on CUDA, shared memory on CPU. Collective.

    Args:
        group: the ranks; None for a rank on its own.
        device: this rank's, of one type on all ranks.
        on_map, on_unmap: told the ranges of all copies, on CPU only.

    Raises:
        ValueError: the device is neither.
        RuntimeError: the ranks cannot address each other's memory.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return CudaHeap(group, device)
    if device.type == "cpu":
        return SharedHeap(group, on_map=on_map, on_unmap=on_unmap)
    raise ValueError(f"device ({device}) must be a cpu or a cuda device")
