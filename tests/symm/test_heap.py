"""Epochs of signals, and tensors by identity, on a rank on its own."""

import dataclasses

import pytest
import torch

from halley.symm.heap import MAX_EPOCH, Signals
from tests.symm.heap_case import thread_world


def test_epochs_begin_at_1_and_end_before_int32_overflows() -> None:
    world, _ = thread_world(1)
    signals = world.heap(0).signals(4)
    assert [signals.next_epoch() for _ in range(3)] == [1, 2, 3]
    signals._epoch = MAX_EPOCH - 1
    last = signals.next_epoch()
    assert last == torch.iinfo(torch.int32).max
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"epoch \(2147483647\) is the last of an int32"):
            signals.next_epoch()


def test_signals_of_one_heap_count_on_their_own() -> None:
    world, _ = thread_world(1)
    first, second = world.heap(0).signals(1), world.heap(0).signals(1)
    assert (first.next_epoch(), first.next_epoch(), second.next_epoch()) == (1, 2, 1)
    assert isinstance(first, Signals)
    assert world.heap(0).num_bytes == 8


def test_tensors_are_equal_by_identity() -> None:
    world, _ = thread_world(1)
    first, second = (world.heap(0).zeros((2,), torch.int32) for _ in range(2))
    assert first != second
    assert first != dataclasses.replace(first)
    assert {first, second} == {second, first}
