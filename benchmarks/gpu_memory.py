"""Memory of a GPU that ``torch.cuda.max_memory_allocated`` does not count."""

import torch


def unused_pool_bytes(device: torch.device) -> int:
    """Return the bytes that CUDA graphs hold in their memory pools and no tensor owns.

    A replay needs this memory, but allocates nothing. Gaps between tensors count, too.
    """
    assert device.index is not None
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and segment["segment_pool_id"] != (0, 0)
    )


def used_mib(device: torch.device) -> float:
    """Return the used memory of a GPU in MiB, with that of other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**20
