"""Symmetric heap in POSIX shared memory: ranks are processes of one machine that compute on CPU."""

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar, final

import torch
import torch.distributed as dist

from halley.distributed.peers import Collective, all_gather_objects, rank_and_size
from halley.symm_mem.access import SHM, peer_access
from halley.symm_mem.heap import AbstractSymmHeap, RangeHook, Segment


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
