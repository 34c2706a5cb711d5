"""The heap of threads: checks of all heaps, errors on all ranks, and hooks."""

import dataclasses
import threading

import pytest
import torch

from tests.symm_mem import thread_heap
from tests.symm_mem.heap_case import check_heap
from tests.symm_mem.thread_heap import run_threads, thread_world


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_heap_passes_the_checks_of_all_heaps(num_ranks: int) -> None:
    world, barrier = thread_world(num_ranks)
    run_threads(lambda rank: check_heap(world.heap(rank)), num_ranks, barrier)


def test_failed_allocation_on_one_rank_raises_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    world, barrier = thread_world(2)
    allocate = thread_heap._aligned_zeros

    def run(rank: int) -> None:
        with pytest.raises(
            MemoryError,
            match=r"rank 1 of 2 has no 12 bytes of memory besides the 0 symmetric ones .+: full",
        ):
            world.heap(rank).zeros((3,), torch.float32)
        assert world.heap(rank).zeros((4,), torch.float32).local.tolist() == [0.0] * 4

    def aligned_zeros(num_bytes: int) -> torch.Tensor:
        if num_bytes == 12 and threading.current_thread().name.endswith("_1"):
            raise MemoryError("full")
        return allocate(num_bytes)

    monkeypatch.setattr(thread_heap, "_aligned_zeros", aligned_zeros)
    run_threads(run, 2, barrier)


def test_tensors_are_equal_by_identity() -> None:
    world, _ = thread_world(1)
    first, second = (world.heap(0).zeros((2,), torch.int32) for _ in range(2))
    assert first != second
    assert first != dataclasses.replace(first)
    assert {first, second} == {second, first}
