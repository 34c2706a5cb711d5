"""Symmetric heap on GPUs, built on PyTorch's symmetric memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import _symmetric_memory as symm_mem

from halley.distributed.peers import Collective, all_gather_objects, rank_and_size
from halley.symm_mem.heap import ALIGNMENT, AbstractSymmHeap, Segment, peer_access


T = TypeVar("T")

_ALLOCATION = "an allocation of symmetric memory"
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@final
class CudaHeap(AbstractSymmHeap):
    """A heap in GPU memory; each tensor is one allocation, mapped by all ranks.

    An allocation takes a multiple of 2 MiB, and the rendezvous of the ranks takes milliseconds. So
    allocate few, large tensors, and only once. A single process uses PyTorch's caching allocator.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | str) -> None:
        """Create the heap after checking peer access. Collective.

        Args:
            group: the ranks, each on its own GPU of one host; None for a single process.
            device: this rank's GPU.

        Raises:
            RuntimeError: two of the GPUs cannot address each other's memory.
        """
        rank, num_ranks = rank_and_size(group)
        device = torch.device(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(rank=rank, num_ranks=num_ranks, device=torch.device("cuda", index))
        self._group = group
        with torch.cuda.device(self.device):
            problem = peer_access(group, self.device)
        if problem:
            raise RuntimeError(f"no symmetric memory: {problem}")
        with torch.inference_mode(mode=False):  # like the tensors of the heap, see zeros
            self._token = torch.zeros(1, dtype=torch.int32, device=self.device)

    def barrier(self) -> None:
        """Wait for all ranks and for earlier work on each rank's current stream."""
        if self._group is not None:
            # all_reduce runs after the earlier work of the current stream. dist.barrier may choose
            # another device and stream, depending on earlier collectives of the group.
            with Collective("a barrier of symmetric memory", group=self._group):
                dist.all_reduce(self._token, group=self._group)
        torch.cuda.current_stream(self.device).synchronize()

    def _allocate(self, num_bytes: int) -> Segment:
        if self._group is None or self.num_ranks == 1:
            local = self.on_all_ranks(num_bytes, lambda: self._new(num_bytes).zero_())
            return Segment(local=local, addresses_W=[local.data_ptr()], hook_addresses=[])
        # Not symm_mem.empty: its pool divides larger allocations, and the division differs between
        # ranks that belong to different groups. Their rendezvous would not match.
        local = self.on_all_ranks(num_bytes, lambda: self._new_symmetric(num_bytes).zero_())
        with _multicast_off():
            handle = symm_mem.rendezvous(local, self._group)
        addresses = list(handle.buffer_ptrs)
        if addresses[self.rank] != local.data_ptr() or any(a % ALIGNMENT for a in addresses):
            raise RuntimeError(
                f"torch {torch.__version__} puts symmetric tensors inside larger allocations, "
                f"this one at {local.data_ptr()}, its allocation at {addresses[self.rank]}"
            )
        # The handle owns the mappings of the other ranks' memory.
        return Segment(local=local, addresses_W=addresses, hook_addresses=[], owner=handle)

    def _gather(self, value: T) -> list[T]:
        with torch.cuda.device(self.device):  # NCCL gathers pickles through the current device
            return all_gather_objects(value, group=self._group, operation=_ALLOCATION)

    def _new(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _new_symmetric(self, num_bytes: int) -> torch.Tensor:
        return _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self.device)


@contextmanager
def _multicast_off() -> Iterator[None]:
    """Keep torch from binding memory to NVLink multicast objects, which Halley does not use.

    On a fabric without multicast, binding may fail or do harm. torch has no other switch.
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
