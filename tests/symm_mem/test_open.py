"""The heap of each device."""

import pytest
import torch
import torch.distributed as dist

from halley.fused.buffer_cache import open_heap
from halley.symm_mem.cpu import SharedHeap
from tests.symm_mem.heap_case import check_all_to_all


def _open(rank: int, num_ranks: int) -> None:
    ranges: list[int] = []
    heap = open_heap(
        dist.group.WORLD,
        torch.device("cpu"),
        on_map=lambda address, num_bytes: ranges.append(num_bytes),
        on_unmap=lambda address, num_bytes: ranges.remove(num_bytes),
    )
    assert isinstance(heap, SharedHeap)
    check_all_to_all(heap, heap.zeros((2, 3), torch.float32))
    assert ranges == [24, 24]
    heap.close()
    assert ranges == []


def test_cpu_has_shared_memory(run_ranks) -> None:
    run_ranks(_open, 2)


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"device \(meta\) must be a cpu or a cuda device"):
        open_heap(None, torch.device("meta"))
