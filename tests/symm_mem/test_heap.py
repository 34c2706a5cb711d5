"""Tensors by identity, on a rank on its own."""

import dataclasses

import torch

from tests.symm_mem.heap_case import thread_world


def test_tensors_are_equal_by_identity() -> None:
    world, _ = thread_world(1)
    first, second = (world.heap(0).zeros((2,), torch.int32) for _ in range(2))
    assert first != second
    assert first != dataclasses.replace(first)
    assert {first, second} == {second, first}
