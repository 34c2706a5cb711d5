"""Memory of a GPU beside that of tensors, which ``torch.cuda.max_memory_allocated`` counts."""

import torch


def unused_pool_bytes(device: torch.device) -> int:
    """Return the bytes that CUDA graphs hold in their memory pools and no tensor owns.

    A replay needs this memory, but allocates nothing.
    """
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and segment["segment_pool_id"] != (0, 0)
    )


def outside_bytes(device: torch.device) -> int:
    """Return the used bytes of a GPU that torch's allocator does not hold."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
