"""Symmetric heaps on a CPU: POSIX shared memory between processes, arrays between threads."""

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol, TypeVar, cast, final

import torch
import torch.distributed as dist

from halley.distributed.peers import Collective, all_gather_objects, rank_and_size
from halley.symm_mem.access import SHM, peer_access
from halley.symm_mem.heap import ALIGNMENT, AbstractSymmHeap, RangeHook, Segment


T = TypeVar("T")

_ALLOCATION = "an allocation of symmetric memory"  # name of the operation in messages


@final
class SharedHeap(AbstractSymmHeap):
    """A heap in which each tensor has one shared-memory file per rank, mapped by all ranks.

    A file never has a name, and exists until its last mapping ends. So ranks that are killed, even
    during an allocation, leave nothing behind. A mapping costs a file descriptor, so a tensor costs
    each rank one descriptor per rank of the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        on_map: RangeHook | None = None,
        on_unmap: RangeHook | None = None,
    ) -> None:
        """Create the heap after checking that the ranks share memory. Collective.

        Args:
            group: the ranks, a gloo group; None for a single process.
            on_map, on_unmap: called for the copies of all ranks, with this rank's addresses.

        Raises:
            RuntimeError: the ranks share no memory.
        """
        rank, num_ranks = rank_and_size(group)
        super().__init__(
            rank=rank,
            num_ranks=num_ranks,
            device=torch.device("cpu"),
            on_map=on_map,
            on_unmap=on_unmap,
        )
        if problem := peer_access(group, self.device):
            raise RuntimeError(f"no symmetric memory: {problem}")
        self._group = group

    def barrier(self) -> None:
        """Wait until all ranks call this; earlier stores of all ranks are visible afterwards."""
        if self._group is not None:
            # Gloo's messages go through sockets, and so through locks of the kernel. These order
            # stores before the barrier and loads after it on any CPU.
            with Collective("a barrier of symmetric memory", group=self._group):
                dist.barrier(self._group)

    def _allocate(self, num_bytes: int) -> Segment:
        with ExitStack() as stack:
            file = self.on_all_ranks(
                num_bytes, lambda: stack.enter_context(_open_segment(num_bytes))
            )
            paths = self._gather(f"/proc/{os.getpid()}/fd/{file}")
            copies = self.on_all_ranks(num_bytes, lambda: [_map(p, num_bytes) for p in paths])
        addresses = [copy.data_ptr() for copy in copies]
        return Segment(
            local=copies[self.rank], addresses_W=addresses, hook_addresses=addresses, owner=copies
        )

    def _gather(self, value: T) -> list[T]:
        return all_gather_objects(value, group=self._group, operation=_ALLOCATION)


@contextmanager
def _open_segment(num_bytes: int) -> Iterator[int]:
    """Yield the descriptor of an unnamed shared-memory file of zeros."""
    file = os.open(SHM, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        # Allocate the pages now. Otherwise the first store to a page would end the process with
        # SIGBUS when memory is full.
        os.posix_fallocate(file, 0, num_bytes)
        yield file
    finally:
        os.close(file)


def _map(path: str, num_bytes: int) -> torch.Tensor:
    file = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
    finally:
        os.close(file)


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
