"""Symmetric heap for tests: ranks are threads of one process."""

from typing import Protocol, TypeVar, cast, final

import torch

from halley.symm_mem.heap import ALIGNMENT, AbstractSymmHeap, RangeHook, Segment


T = TypeVar("T")


class Barrier(Protocol):
    """A reusable barrier of all ranks, such as ``threading.Barrier``."""

    def wait(self) -> object:
        """Return when all ranks have called it."""
        ...


@final
class ThreadWorld:
    """The ranks of one process, and their heaps.

    Args:
        num_ranks: number of threads.
        barrier: the barrier of all threads.
        on_map, on_unmap: called once per copy, by the thread that owns it: before ``zeros`` returns
            on any rank, and after all ranks have called ``free``.

    Raises:
        ValueError: ``num_ranks`` is below 1.
    """

    def __init__(
        self,
        num_ranks: int,
        barrier: Barrier,
        *,
        on_map: RangeHook | None = None,
        on_unmap: RangeHook | None = None,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks ({num_ranks}) must be at least 1")
        self.num_ranks = num_ranks
        self.barrier = barrier
        self.slots: list[object] = [None] * num_ranks  # a value from each rank
        # Referenced here, so that a rank's memory lives while another rank may address it.
        self._heaps = [
            ThreadHeap(self, rank, on_map=on_map, on_unmap=on_unmap) for rank in range(num_ranks)
        ]

    def heap(self, rank: int) -> "ThreadHeap":
        """Return the heap of a rank; only that rank's thread may use it."""
        return self._heaps[rank]


@final
class ThreadHeap(AbstractSymmHeap):
    """The heap of one thread; ``ThreadWorld.heap`` returns it."""

    def __init__(
        self,
        world: ThreadWorld,
        rank: int,
        *,
        on_map: RangeHook | None,
        on_unmap: RangeHook | None,
    ) -> None:
        super().__init__(
            rank=rank,
            num_ranks=world.num_ranks,
            device=torch.device("cpu"),
            on_map=on_map,
            on_unmap=on_unmap,
        )
        self._world = world

    def barrier(self) -> None:
        """Wait until all threads have called this."""
        self._world.barrier.wait()

    def _allocate(self, num_bytes: int) -> Segment:
        local = self.on_all_ranks(num_bytes, lambda: _aligned_zeros(num_bytes))
        addresses = self._gather(local.data_ptr())
        return Segment(local=local, addresses_W=addresses, hook_addresses=[addresses[self.rank]])

    def _gather(self, value: T) -> list[T]:
        slots = self._world.slots
        slots[self.rank] = value
        self.barrier()
        values = cast(list[T], list(slots))
        self.barrier()  # before a faster rank overwrites its slot
        return values


def _aligned_zeros(num_bytes: int) -> torch.Tensor:
    padded = torch.zeros(num_bytes + ALIGNMENT - 1, dtype=torch.uint8)
    start = -padded.data_ptr() % ALIGNMENT
    return padded[start : start + num_bytes]
