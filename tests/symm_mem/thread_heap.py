"""A symmetric heap whose ranks are threads of one process, for tests of kernels."""

from collections.abc import Callable
from typing import TypeVar, cast, final

import torch

from halley.symm_mem.heap import ALIGNMENT, AbstractSymmHeap


T = TypeVar("T")


@final
class ThreadWorld:
    """The ranks of one process, and their heaps; ``barrier`` waits for all threads."""

    def __init__(self, num_ranks: int, barrier: Callable[[], object]) -> None:
        self.num_ranks = num_ranks
        self.barrier = barrier
        self.slots: list[object] = [None] * num_ranks  # each rank writes its values to its slot
        # A reference to all heaps keeps the memory of a rank while another rank may address it.
        self._heaps = [ThreadHeap(self, rank) for rank in range(num_ranks)]

    def heap(self, rank: int) -> "ThreadHeap":
        """Return the heap of a rank; only that rank's thread may use it."""
        return self._heaps[rank]


@final
class ThreadHeap(AbstractSymmHeap):
    """The heap of one thread; ``ThreadWorld.heap`` returns it."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(None, torch.device("cpu"))
        self.rank, self.num_ranks = rank, world.num_ranks
        self._world = world

    def barrier(self) -> None:
        """Wait until all threads have called this."""
        self._world.barrier()

    def _allocate(self, num_bytes: int) -> tuple[torch.Tensor, list[int], object]:
        local = self.on_all_ranks(num_bytes, lambda: _aligned_zeros(num_bytes))
        return local, self._gather(local.data_ptr()), None

    def _gather(self, value: T) -> list[T]:
        slots = self._world.slots
        slots[self.rank] = value
        self.barrier()
        values = cast(list[T], list(slots))
        self.barrier()  # no rank may overwrite its slot before all ranks have read it
        return values


def _aligned_zeros(num_bytes: int) -> torch.Tensor:
    padded = torch.zeros(num_bytes + ALIGNMENT - 1, dtype=torch.uint8)
    start = -padded.data_ptr() % ALIGNMENT
    return padded[start : start + num_bytes]
