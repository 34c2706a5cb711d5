"""Symmetric heap on torch's symmetric memory: ranks are GPUs that address each other's memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import _symmetric_memory as symm_mem

from halley.distributed.peers import Collective
from halley.distributed.ranks import gather, place_in
from halley.symm_mem.access import peer_access
from halley.symm_mem.heap import ALIGNMENT, AbstractSymmHeap, Segment


T = TypeVar("T")

_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@final
class CudaHeap(AbstractSymmHeap):
    """A heap in GPU memory; each tensor is an allocation of its own, mapped by all ranks.

    An allocation takes a multiple of 2 MiB, and meeting for it takes milliseconds: make few, large
    tensors, and make them once. A rank on its own has ordinary memory of torch's allocator.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | str) -> None:
        """Meet the other ranks. Collective.

        Args:
            group: the ranks, each on a GPU of its own on one host; None for a rank on its own.
            device: this rank's GPU.

        Raises:
            RuntimeError: two of the GPUs cannot address each other's memory.
        """
        rank, num_ranks = place_in(group)
        device = torch.device(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(rank=rank, num_ranks=num_ranks, device=torch.device("cuda", index))
        self._group = group
        with torch.cuda.device(self.device):
            problem = peer_access(group, self.device)
        if problem:
            raise RuntimeError(f"no symmetric memory: {problem}")
        with torch.inference_mode(mode=False):  # as tensors of the heap are, see zeros
            self._token = torch.zeros(1, dtype=torch.int32, device=self.device)

    def barrier(self) -> None:
        """Wait for all ranks and for the work before it on each one's current stream."""
        if self._group is not None:
            # On the current stream, so behind its work. dist.barrier chooses a device and a stream
            # by the group's history.
            with Collective("a barrier of symmetric memory", group=self._group):
                dist.all_reduce(self._token, group=self._group)
        torch.cuda.current_stream(self.device).synchronize()

    def _allocate(self, num_bytes: int) -> Segment:
        if self._group is None or self.num_ranks == 1:
            local = self.on_all_ranks(num_bytes, lambda: self._new(num_bytes).zero_())
            return Segment(local=local, addresses=[local.data_ptr()], told=[])
        # Not symm_mem.empty: its pool carves tensors out of larger allocations, and how it does
        # differs between ranks that are in different groups. Their rendezvous would not match.
        local = self.on_all_ranks(num_bytes, lambda: self._new_symmetric(num_bytes).zero_())
        with _multicast_off():
            handle = symm_mem.rendezvous(local, self._group)
        addresses = list(handle.buffer_ptrs)
        if addresses[self.rank] != local.data_ptr() or any(a % ALIGNMENT for a in addresses):
            raise RuntimeError(
                f"torch {torch.__version__} puts symmetric tensors inside larger allocations, "
                f"this one at {local.data_ptr()}, its allocation at {addresses[self.rank]}"
            )
        # The handle holds the mappings of the peers' memory.
        return Segment(local=local, addresses=addresses, told=[], keep=handle)

    def _gather(self, value: T) -> list[T]:
        with torch.cuda.device(self.device):  # NCCL pickles to the current device
            return gather(value, group=self._group, what="an allocation of symmetric memory")

    def _new(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _new_symmetric(self, num_bytes: int) -> torch.Tensor:
        return _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self.device)


@contextmanager
def _multicast_off() -> Iterator[None]:
    """Keep torch from binding memory to NVLink multicast, which nothing here uses.

    Where the fabric has no multicast, or must not be asked for it, binding fails or does harm;
    torch has no other switch.
    """
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before
