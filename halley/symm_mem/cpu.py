"""Symmetric heap on a CPU: POSIX shared memory that all ranks map."""

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar, final

import torch
import torch.distributed as dist

from halley.distributed.peers import Collective, all_gather_objects, rank_and_size
from halley.symm_mem.heap import SHM, AbstractSymmHeap, RangeHook, Segment, peer_access


T = TypeVar("T")

_ALLOCATION = "an allocation of symmetric memory"  # name of the operation in messages


@final
class SharedHeap(AbstractSymmHeap):
    """A heap in which each tensor has one shared-memory file per rank, mapped by all ranks.

    The file has no name and exists until its last mapping ends. So a rank that is killed, even
    during an allocation, leaves no file behind. Each mapping keeps a file descriptor, so a tensor
    takes one descriptor for each rank of the group.
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
            # Gloo's messages go through sockets, whose locks in the kernel act as memory barriers.
            # So stores before the barrier are visible to loads after it on any CPU.
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
        # This allocates the pages. Otherwise, with full memory, the first store to a page would end
        # the process with SIGBUS.
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
