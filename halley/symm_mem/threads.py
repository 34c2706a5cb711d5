"""Symmetric heap of one process whose threads are the ranks: for tests, and seeded schedules."""

from typing import Protocol, TypeVar, cast, final

import torch

from halley.symm_mem.heap import ALIGNMENT, AbstractSymmHeap, RangeHook, Segment


T = TypeVar("T")


class Barrier(Protocol):
    """Where all ranks wait for each other, again and again, such as ``threading.Barrier``."""

    def wait(self) -> object:
        """Return once all ranks have called it."""
        ...


@final
class ThreadWorld:
    """The ranks of one process.

    Args:
        num_ranks: number of threads.
        barrier: where they meet.
        on_map, on_unmap: told each copy once, by the thread that owns it; before ``zeros`` returns
            on any rank, and after all ranks have come to ``free``.

    Raises:
        ValueError: there is no rank.
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
        self.slots: list[object] = [None] * num_ranks  # what each rank tells the others
        # Held here, so that no rank's memory goes while another rank may still address it.
        self._heaps = [
            ThreadHeap(self, rank, on_map=on_map, on_unmap=on_unmap) for rank in range(num_ranks)
        ]

    def heap(self, rank: int) -> "ThreadHeap":
        """Return the heap of a rank, which only that rank's thread may use."""
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
        """Wait until all threads have come here."""
        self._world.barrier.wait()

    def _allocate(self, num_bytes: int) -> Segment:
        local = self.on_all_ranks(num_bytes, lambda: _aligned_zeros(num_bytes))
        addresses = self._gather(local.data_ptr())
        return Segment(local=local, addresses=addresses, told=[addresses[self.rank]])

    def _gather(self, value: T) -> list[T]:
        slots = self._world.slots
        slots[self.rank] = value
        self.barrier()
        values = cast(list[T], list(slots))
        self.barrier()  # before a rank that is ahead writes its next value
        return values


def _aligned_zeros(num_bytes: int) -> torch.Tensor:
    padded = torch.zeros(num_bytes + ALIGNMENT - 1, dtype=torch.uint8)
    start = -padded.data_ptr() % ALIGNMENT
    return padded[start : start + num_bytes]
