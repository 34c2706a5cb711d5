"""Symmetric heap in POSIX shared memory: ranks are processes of one machine that compute on CPU."""

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar, final

import torch
import torch.distributed as dist

from halley.distributed.peers import Collective
from halley.distributed.ranks import gather, place_in
from halley.symm_mem.access import SHM, peer_access
from halley.symm_mem.heap import AbstractSymmHeap, RangeHook, Segment


T = TypeVar("T")


@final
class SharedHeap(AbstractSymmHeap):
    """A heap whose every tensor is one shared segment a rank, mapped by all ranks.

    A segment never has a name, so that ranks which are killed, even while they allocate, leave
    nothing behind: it lives as long as its last mapping. A mapping costs a file descriptor, so a
    tensor costs each rank one per rank of the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        on_map: RangeHook | None = None,
        on_unmap: RangeHook | None = None,
    ) -> None:
        """Meet the other ranks. Collective.

        Args:
            group: the ranks, a gloo group; None for a rank on its own.
            on_map, on_unmap: told the copies of all ranks, at this rank's addresses.

        Raises:
            RuntimeError: the ranks share no memory.
        """
        rank, num_ranks = place_in(group)
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
        """Wait until all ranks have come here; what they stored before is visible after."""
        if self._group is not None:
            # Gloo's messages pass through sockets, and so through locks of the kernel: on any
            # machine, stores before the barrier come before loads after it.
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
        return Segment(local=copies[self.rank], addresses=addresses, told=addresses, keep=copies)

    def _gather(self, value: T) -> list[T]:
        return gather(value, group=self._group, what="an allocation of symmetric memory")


@contextmanager
def _open_segment(num_bytes: int) -> Iterator[int]:
    """Yield the descriptor of a nameless file of zeros in shared memory."""
    file = os.open(SHM, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        # Takes the pages now: a file that only has a length would kill with SIGBUS whoever stores
        # to it first when memory is out.
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
