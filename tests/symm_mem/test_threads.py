"""The symmetric heap of threads: checks of all heaps, and equality of symmetric tensors."""

import dataclasses

import pytest
import torch

from halley.interpreter.scheduler import Scheduler
from tests.symm_mem.heap_case import check_heap
from tests.symm_mem.thread_heap import ThreadWorld


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_heap_passes_the_checks_of_all_heaps(num_ranks: int) -> None:
    scheduler = Scheduler(0, resident=1)
    world = ThreadWorld(num_ranks, scheduler.barrier)
    scheduler.run_ranks(num_ranks, lambda rank: check_heap(world.heap(rank)))


def test_tensors_are_equal_by_identity() -> None:
    world = ThreadWorld(1, lambda: None)
    first, second = (world.heap(0).zeros((2,), torch.int32) for _ in range(2))
    assert first != second
    assert first != dataclasses.replace(first)
    assert {first, second} == {second, first}
