"""The symmetric heap: tensors with one copy per rank, each copy addressable by every rank.

The heap owns all memory: a tensor lives until ``free`` or ``close``, which all ranks call together.
Any rank may read and write any copy. Only ``zeros``, ``free`` and ``barrier`` synchronize the
ranks. Kernels must order all other accesses with flags of their own.

    addresses on rank 0         memory            addresses on rank 1
    ptrs_W[0]  ------------>  copy of rank 0  <------------  ptrs_W[0]
    ptrs_W[1]  ------------>  copy of rank 1  <------------  ptrs_W[1]

``SharedHeap`` is for CPUs, ``CudaHeap`` for GPUs. Interpreted kernels may access only memory that
a heap has registered.
"""

import abc
import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import _symmetric_memory as symm_mem

from halley.distributed.peers import Collective, all_gather_objects, rank_and_size
from halley.interpreter import register, unregister
from halley.symm_mem.access import SHM, peer_access


T = TypeVar("T")

_ALLOCATION = "an allocation of symmetric memory"  # name of the operation in messages
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
ALIGNMENT = 256  # bytes of a base address, more than any load or TMA descriptor needs


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmTensor:
    """A symmetric tensor: one copy per rank, each copy addressable by every rank.

    A kernel adds offsets to ``ptrs_W[peer]`` as to a pointer of its own. The code that uses the
    tensor defines which rank writes to which copy, and which rank waits. Equality is identity.

    Attributes:
        local: this rank's copy, contiguous, aligned to ``ALIGNMENT`` bytes.
        ptrs_W: address of each rank's copy, this rank included, int64, on the device of ``local``.
            The addresses are valid on this rank only: each rank maps the copies at other addresses.
    """

    local: torch.Tensor
    ptrs_W: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The memory of one tensor as a heap allocated it.

    ``owner`` keeps the addresses of all ranks' copies valid as long as it lives.
    """

    local: torch.Tensor  # this rank's copy, uint8 (num_bytes,)
    addresses_W: list[int]
    owner: object = None


class AbstractSymmHeap(abc.ABC):
    """Allocates symmetric tensors for the ranks of one group.

    ``zeros``, ``free``, ``barrier`` and ``close`` are collectives: all ranks call them in the same
    order. A subclass defines how memory is allocated and how ranks wait for each other.
    """

    def __init__(self, *, rank: int, num_ranks: int, device: torch.device) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self._segments: dict[SymmTensor, Segment] = {}
        self._registered: list[int] = []  # addresses that interpreted kernels may access
        self._closed = False
        # If nobody calls ``close``, the process may later map other memory at these addresses.
        finalizer = weakref.finalize(self, _unregister_all, self._registered)
        finalizer.atexit = False

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's copies, without the rounding of the allocator."""
        return sum(segment.local.nbytes for segment in self._segments.values())

    # Without this, tensors that are made during evaluation could not be used in training.
    @torch.inference_mode(mode=False)
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmTensor:
        """Return a tensor of zeros. Collective; on return, every rank reads zeros in all copies.

        ``shape`` is that of one copy, the same on all ranks; () is one element.

        Raises:
            ValueError: a size is not positive.
            MemoryError: a rank has too little memory. Raised on all ranks; the heap stays usable.
            RuntimeError: the ranks asked for different numbers of bytes, or the heap is closed.
        """
        if any(size < 1 for size in shape):
            raise ValueError(f"shape ({tuple(shape)}) must have sizes of at least 1")
        if self._closed:
            raise RuntimeError("the symmetric heap is closed")
        segment = self._allocate(math.prod(shape) * dtype.itemsize)
        assert all(address % ALIGNMENT == 0 for address in segment.addresses_W)
        tensor = SymmTensor(
            local=segment.local.view(dtype).view(shape),
            ptrs_W=torch.tensor(segment.addresses_W, dtype=torch.int64, device=self.device),
        )
        self._segments[tensor] = segment
        if self.device.type == "cpu":
            for address in segment.addresses_W:
                register(address, segment.local.nbytes)
                self._registered.append(address)
        self.barrier()
        return tensor

    def free(self, tensor: SymmTensor) -> None:
        """Free a tensor: the addresses in ``ptrs_W`` become invalid. Collective.

        The memory of this rank's copy lives until the last reference to ``tensor.local`` ends.

        Raises:
            ValueError: the tensor is not from this heap, or is already freed.
        """
        if tensor not in self._segments:
            raise ValueError("tensor must be one that this heap made and did not free")
        self.barrier()
        self._drop(tensor)

    def close(self) -> None:
        """Free all remaining tensors. A second call does nothing. Collective."""
        if self._closed:
            return
        self._closed = True
        self.barrier()
        for tensor in list(self._segments):
            self._drop(tensor)

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks have called this and have finished earlier work of their streams."""

    @abc.abstractmethod
    def _allocate(self, num_bytes: int) -> Segment:
        """Return zeroed memory on every rank; a failure on one rank is raised on all."""

    @abc.abstractmethod
    def _gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""

    def on_all_ranks(self, num_bytes: int, act: Callable[[], T]) -> T:
        """Return the result of ``act``, which allocates ``num_bytes`` on each rank. Collective.

        If it fails on any rank, raise on all ranks: they would wait forever for that rank.

        Raises:
            MemoryError: ``act`` failed on a rank.
            RuntimeError: the ranks asked for different numbers of bytes.
        """
        failure: Exception | None = None
        result: list[T] = []
        try:
            result.append(act())
        except (OSError, OverflowError, RuntimeError, MemoryError) as error:
            failure = error
        answers = self._gather((num_bytes, "" if failure is None else str(failure)))
        sizes = [size for size, _ in answers]
        if len(set(sizes)) > 1:
            raise RuntimeError(f"num_bytes ({sizes}, by rank) must be the same on all ranks")
        for rank, (_, problem) in enumerate(answers):
            if problem:
                raise MemoryError(
                    f"rank {rank} of {self.num_ranks} has no {num_bytes} bytes of memory besides "
                    f"the {self.num_bytes} symmetric ones it holds: {problem}"
                ) from failure
        return result[0]

    def _drop(self, tensor: SymmTensor) -> None:
        segment = self._segments.pop(tensor)
        if self.device.type == "cpu":
            for address in segment.addresses_W:
                unregister(address)
                self._registered.remove(address)


def _unregister_all(addresses: list[int]) -> None:
    for address in addresses:
        unregister(address)


@final
class SharedHeap(AbstractSymmHeap):
    """A heap in which each tensor has one shared-memory file per rank, mapped by all ranks.

    The file has no name and exists until its last mapping ends. So a rank that is killed, even
    during an allocation, leaves no file behind. Each mapping keeps a file descriptor, so a tensor
    takes one descriptor for each rank of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Create the heap of a gloo group, or of a process (None); a collective.

        Raises:
            RuntimeError: the ranks share no memory.
        """
        rank, num_ranks = rank_and_size(group)
        super().__init__(rank=rank, num_ranks=num_ranks, device=torch.device("cpu"))
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
        return Segment(local=copies[self.rank], addresses_W=addresses, owner=copies)

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


@final
class CudaHeap(AbstractSymmHeap):
    """A heap in GPU memory; each tensor is one allocation, mapped by all ranks.

    An allocation takes a multiple of 2 MiB, and the rendezvous of the ranks takes milliseconds. So
    allocate few, large tensors, and only once. A single process uses PyTorch's caching allocator.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | str) -> None:
        """Create the heap of ranks with a GPU each, or of a process (None); a collective.

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
            zeros = partial(torch.zeros, num_bytes, dtype=torch.uint8, device=self.device)
            local = self.on_all_ranks(num_bytes, zeros)
            return Segment(local=local, addresses_W=[local.data_ptr()])
        # Not symm_mem.empty: its pool divides larger allocations, and the division differs between
        # ranks that belong to different groups. Their rendezvous would not match.
        empty = partial(
            _SymmetricMemory.empty_strided_p2p, (num_bytes,), (1,), torch.uint8, self.device
        )
        local = self.on_all_ranks(num_bytes, lambda: empty().zero_())
        with _multicast_off():
            handle = symm_mem.rendezvous(local, self._group)
        addresses = list(handle.buffer_ptrs)
        if addresses[self.rank] != local.data_ptr() or any(a % ALIGNMENT for a in addresses):
            raise RuntimeError(
                f"torch {torch.__version__} puts symmetric tensors inside larger allocations, "
                f"this one at {local.data_ptr()}, its allocation at {addresses[self.rank]}"
            )
        # The handle owns the mappings of the other ranks' memory.
        return Segment(local=local, addresses_W=addresses, owner=handle)

    def _gather(self, value: T) -> list[T]:
        with torch.cuda.device(self.device):  # NCCL gathers pickles through the current device
            return all_gather_objects(value, group=self._group, operation=_ALLOCATION)


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


def open_heap(group: dist.ProcessGroup | None, device: torch.device | str) -> AbstractSymmHeap:
    """Open a symmetric heap: GPU memory on CUDA, shared memory on CPU; a collective of the ranks.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA device.
        RuntimeError: the ranks cannot address each other's memory.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return CudaHeap(group, device)
    if device.type == "cpu":
        return SharedHeap(group)
    raise ValueError(f"device ({device}) must be a cpu or a cuda device")
