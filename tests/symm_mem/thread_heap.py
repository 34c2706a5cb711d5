"""A symmetric heap whose ranks are threads of one process, for tests of kernels."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast, final

import torch

from halley.symm_mem.heap import ALIGNMENT, AbstractSymmHeap, Segment


T = TypeVar("T")

TIMEOUT_S = 30.0


@final
class ThreadWorld:
    """The ranks of one process, and their heaps.

    Args:
        num_ranks: number of threads.
        barrier: waits for all threads.

    Raises:
        ValueError: ``num_ranks`` is below 1.
    """

    def __init__(
        self,
        num_ranks: int,
        barrier: Callable[[], object],
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks ({num_ranks}) must be at least 1")
        self.num_ranks = num_ranks
        self.barrier = barrier
        self.slots: list[object] = [None] * num_ranks  # by which the ranks exchange values
        # Referenced here, so that the memory of a rank lives while another rank may address it.
        self._heaps = [ThreadHeap(self, rank) for rank in range(num_ranks)]

    def heap(self, rank: int) -> "ThreadHeap":
        """Return the heap of a rank; only that rank's thread may use it."""
        return self._heaps[rank]


@final
class ThreadHeap(AbstractSymmHeap):
    """The heap of one thread; ``ThreadWorld.heap`` returns it."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(rank=rank, num_ranks=world.num_ranks, device=torch.device("cpu"))
        self._world = world

    def barrier(self) -> None:
        """Wait until all threads have called this."""
        self._world.barrier()

    def _allocate(self, num_bytes: int) -> Segment:
        local = self.on_all_ranks(num_bytes, lambda: _aligned_zeros(num_bytes))
        addresses = self._gather(local.data_ptr())
        return Segment(local=local, addresses_W=addresses)

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


def run_threads(fn: Callable[[int], T], num_ranks: int, barrier: threading.Barrier) -> list[T]:
    """Return ``fn(rank)`` of one thread per rank; a failure ends the waits of the others."""

    def run(rank: int) -> T:
        try:
            return fn(rank)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(num_ranks)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


def thread_world(num_ranks: int) -> tuple[ThreadWorld, threading.Barrier]:
    """Return a world without hooks and its barrier, which has a timeout."""
    barrier = threading.Barrier(num_ranks, timeout=TIMEOUT_S)
    return ThreadWorld(num_ranks, barrier.wait), barrier
