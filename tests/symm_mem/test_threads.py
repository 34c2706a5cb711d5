"""The heap of threads: checks of all heaps, errors on all ranks, and hooks."""

import dataclasses
import threading

import pytest
import torch

from halley.symm_mem.heap import AbstractSymmHeap, SymmTensor
from tests.symm_mem import thread_heap
from tests.symm_mem.heap_case import check_heap
from tests.symm_mem.thread_heap import TIMEOUT_S, ThreadWorld, run_threads, thread_world


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_heap_passes_the_checks_of_all_heaps(num_ranks: int) -> None:
    world, barrier = thread_world(num_ranks)
    run_threads(lambda rank: check_heap(world.heap(rank)), num_ranks, barrier)


def test_all_ranks_see_the_same_addresses() -> None:
    world, barrier = thread_world(3)

    def run(rank: int) -> tuple[int, int, list[int]]:
        tensor = world.heap(rank).zeros((1, 2), torch.float32)
        return world.heap(rank).rank, tensor.local.data_ptr(), tensor.ptrs_W.tolist()

    locations = run_threads(run, 3, barrier)
    assert [rank for rank, _, _ in locations] == [0, 1, 2]
    addresses = [address for _, address, _ in locations]
    assert [table for _, _, table in locations] == [addresses] * 3


def test_hooks_are_called_once_per_copy() -> None:
    ranges: list[tuple[int, int]] = []
    barrier = threading.Barrier(3, timeout=TIMEOUT_S)
    world = ThreadWorld(
        3,
        barrier,
        on_map=lambda address, num_bytes: ranges.append((address, num_bytes)),
        on_unmap=lambda address, num_bytes: ranges.remove((address, num_bytes)),
    )

    def run(rank: int) -> None:
        heap = world.heap(rank)
        small, large = heap.zeros((3,), torch.float32), heap.zeros((5, 7), torch.int64)
        wanted = sorted(
            (address, num_bytes)
            for tensor, num_bytes in ((small, 12), (large, 280))
            for address in tensor.ptrs_W.tolist()
        )
        assert sorted(ranges) == wanted
        heap.barrier()
        heap.free(small)
        heap.barrier()
        assert {num_bytes for _, num_bytes in ranges} == {280}
        heap.barrier()
        heap.close()

    run_threads(run, 3, barrier)
    assert ranges == []


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


def test_different_sizes_are_refused() -> None:
    world, barrier = thread_world(2)

    def run(rank: int) -> None:
        with pytest.raises(RuntimeError, match=r"num_bytes \(\[4, 8\], by rank\) must be the same"):
            world.heap(rank).zeros((1 + rank,), torch.float32)

    run_threads(run, 2, barrier)


def test_freed_memory_lives_until_its_last_reference() -> None:
    world, barrier = thread_world(2)

    def run(rank: int) -> SymmTensor:
        heap: AbstractSymmHeap = world.heap(rank)
        tensor = heap.zeros((4,), torch.float32)
        tensor.local.fill_(rank + 1)
        heap.free(tensor)
        return tensor

    for rank, tensor in enumerate(run_threads(run, 2, barrier)):
        assert tensor.local.tolist() == [rank + 1.0] * 4


def test_zero_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_ranks \(0\) must be at least 1"):
        ThreadWorld(0, threading.Barrier(1))


def test_tensors_are_equal_by_identity() -> None:
    world, _ = thread_world(1)
    first, second = (world.heap(0).zeros((2,), torch.int32) for _ in range(2))
    assert first != second
    assert first != dataclasses.replace(first)
    assert {first, second} == {second, first}
