"""The symmetric heap: tensors with one copy per rank, each copy addressable by every rank.

A tensor lives until ``free`` or ``close``, which all ranks call. Only collectives of the heap
synchronize the ranks. Kernels must order all other accesses with their own flags.

    addresses on rank 0         memory            addresses on rank 1
    ptrs_W[0]  ------------>  copy of rank 0  <------------  ptrs_W[0]
    ptrs_W[1]  ------------>  copy of rank 1  <------------  ptrs_W[1]
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

from halley.distributed.peers import (
    SHM,
    Collective,
    all_gather_objects,
    peer_access,
    rank_and_size,
)
from halley.interpreter import register, unregister


T = TypeVar("T")

_ALLOCATION = "an allocation of symmetric memory"  # name of the operation in messages
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
ALIGNMENT = 256  # bytes, of each base address; more than loads or TMA descriptors need


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmTensor:
    """A symmetric tensor: one copy per rank, each copy addressable by every rank.

    A kernel adds offsets to ``ptrs_W[peer]`` as to a pointer of its own. The code that uses the
    tensor defines which rank writes to which copy, and which rank waits. Equality is identity.
    """

    local: torch.Tensor  # this rank's copy, contiguous, aligned to ``ALIGNMENT`` bytes
    # Address of each rank's copy, int64, on the device of ``local``. The addresses are valid on
    # this rank only, as each rank may map the copies at other addresses.
    ptrs_W: torch.Tensor


class AbstractSymmHeap(abc.ABC):
    """Allocates symmetric tensors for the ranks of one group.

    All public methods and constructors are collectives: all ranks call them in the same order.
    ``group`` is None for a single process. The constructors of subclasses raise ``RuntimeError`` if
    ranks cannot address each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.rank, self.num_ranks = rank_and_size(group)
        self.device = device
        self._group = group
        # For each tensor: the owner of its mappings, and a finalizer that unregisters them (CPU).
        self._held: dict[SymmTensor, tuple[object, weakref.finalize]] = {}
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Number of bytes of this rank's copies of all live tensors, not rounded by allocators."""
        return sum(tensor.local.nbytes for tensor in self._held)

    # A tensor allocated in inference mode, as during evaluation, could not be used in training.
    @torch.inference_mode(mode=False)
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmTensor:
        """Return a new tensor; when this returns, its copies on all ranks are zero. Collective.

        ``shape`` is the shape of one copy, the same on all ranks; () is one element.

        Raises:
            ValueError: a size is not positive.
            MemoryError: a rank has too little memory. Raised on all ranks; the heap stays usable.
            RuntimeError: the ranks asked for different numbers of bytes, or the heap is closed.
        """
        if any(size < 1 for size in shape):
            raise ValueError(f"shape ({tuple(shape)}) must have sizes of at least 1")
        if self._closed:
            raise RuntimeError("the symmetric heap is closed")
        local, addresses_W, owner = self._allocate(math.prod(shape) * dtype.itemsize)
        assert all(address % ALIGNMENT == 0 for address in addresses_W)
        tensor = SymmTensor(
            local=local.view(dtype).view(shape),
            ptrs_W=torch.tensor(addresses_W, dtype=torch.int64, device=self.device),
        )
        registered = ExitStack()
        if self.device.type == "cpu":
            for address in addresses_W:
                register(address, local.nbytes)
                registered.callback(unregister, address, local.nbytes)
        # Unregister even if the heap is deleted without ``close``: its addresses may be reused.
        unregister_all = weakref.finalize(self, registered.close)
        unregister_all.atexit = False
        self._held[tensor] = owner, unregister_all
        self.barrier()
        return tensor

    def free(self, tensor: SymmTensor) -> None:
        """Free a tensor: the addresses in ``ptrs_W`` become invalid. Collective.

        The memory of this rank's copy lives until the last reference to ``tensor.local`` ends. A
        tensor that is not from this heap, or is already freed, is a ``ValueError``.
        """
        if tensor not in self._held:
            raise ValueError("tensor must be one that this heap made and did not free")
        self.barrier()
        _, unregister_all = self._held.pop(tensor)
        unregister_all()

    def close(self) -> None:
        """Free all tensors; afterwards ``zeros`` fails and ``close`` does nothing. Collective."""
        if self._closed:
            return
        self._closed = True
        self.barrier()
        for _, unregister_all in self._held.values():
            unregister_all()
        self._held.clear()

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks have called this and ended earlier work of their current streams."""

    @abc.abstractmethod
    def _allocate(self, num_bytes: int) -> tuple[torch.Tensor, list[int], object]:
        """Return zeroed local memory (uint8), all copies' addresses, and the owner of the mappings.

        The addresses are valid as long as the owner lives. A failure on a rank is raised on all.
        """

    @abc.abstractmethod
    def _gather(self, value: T) -> list[T]:
        """Return a list, by rank, of the values that the ranks pass. Collective."""

    def on_all_ranks(self, num_bytes: int, act: Callable[[], T]) -> T:
        """Run ``act``; return its result, or fail on all ranks if any rank fails. Collective.

        If ``act`` fails on any rank, all ranks raise ``MemoryError``; else the others would wait
        forever for that rank. ``num_bytes`` that differ between ranks are a ``RuntimeError``.
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


@final
class SharedHeap(AbstractSymmHeap):
    """A heap in CPU memory: each tensor has one shared-memory file per rank, mapped by all ranks.

    The file has no name and exists until its last mapping ends. So a rank that is killed, even
    during an allocation, leaves no file behind. Each mapping keeps a file descriptor.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Create the heap of a gloo group, or of a single process (``group`` None). Collective."""
        super().__init__(group, torch.device("cpu"))
        if problem := peer_access(group, self.device):
            raise RuntimeError(f"no symmetric memory: {problem}")

    def barrier(self) -> None:
        """Wait until all ranks have called this; all their earlier stores are visible then."""
        if self._group is not None:
            # Gloo's messages go through sockets, whose locks in Linux act as memory barriers.
            # So stores before the barrier are visible to loads after it on any CPU.
            with Collective("a barrier of symmetric memory", group=self._group):
                dist.barrier(self._group)

    def _allocate(self, num_bytes: int) -> tuple[torch.Tensor, list[int], object]:
        with ExitStack() as stack:
            file = self.on_all_ranks(
                num_bytes, lambda: stack.enter_context(_open_segment(num_bytes))
            )
            paths = self._gather(f"/proc/{os.getpid()}/fd/{file}")
            copies = self.on_all_ranks(num_bytes, lambda: [_map(p, num_bytes) for p in paths])
        return copies[self.rank], [copy.data_ptr() for copy in copies], copies

    def _gather(self, value: T) -> list[T]:
        return all_gather_objects(value, group=self._group, operation=_ALLOCATION)


@contextmanager
def _open_segment(num_bytes: int) -> Iterator[int]:
    file = os.open(SHM, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        # Allocate now: with full memory, the first store to a page would raise SIGBUS.
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
    """A heap in GPU memory: each tensor has one allocation per rank, mapped by all ranks.

    An allocation takes a multiple of 2 MiB and some milliseconds, so allocate few, large tensors,
    only once. A single process uses PyTorch's caching allocator.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | str) -> None:
        device = torch.device(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(group, torch.device("cuda", index))
        with torch.cuda.device(self.device):
            problem = peer_access(group, self.device)
        if problem:
            raise RuntimeError(f"no symmetric memory: {problem}")
        with torch.inference_mode(mode=False):  # inference tensors cannot be written in training
            self._token = torch.zeros(1, dtype=torch.int32, device=self.device)

    def barrier(self) -> None:
        if self._group is not None:
            # all_reduce runs after the earlier work of the current stream. dist.barrier may choose
            # another device and stream, depending on earlier collectives of the group.
            with Collective("a barrier of symmetric memory", group=self._group):
                dist.all_reduce(self._token, group=self._group)
        torch.cuda.current_stream(self.device).synchronize()

    def _allocate(self, num_bytes: int) -> tuple[torch.Tensor, list[int], object]:
        if self._group is None or self.num_ranks == 1:
            zeros = partial(torch.zeros, num_bytes, dtype=torch.uint8, device=self.device)
            local = self.on_all_ranks(num_bytes, zeros)
            return local, [local.data_ptr()], None
        # symm_mem.empty cannot be used: its pool puts tensors into larger allocations, at offsets
        # that can differ between ranks of several groups. Then the rendezvous would not match.
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
        return local, addresses, handle  # the handle owns the mappings of other ranks' memory

    def _gather(self, value: T) -> list[T]:
        with torch.cuda.device(self.device):  # NCCL gathers pickles through the current device
            return all_gather_objects(value, group=self._group, operation=_ALLOCATION)


@contextmanager
def _multicast_off() -> Iterator[None]:
    """Keep torch from binding symmetric memory to NVLink multicast objects in the ``with`` block.

    Halley does not use multicast. On a fabric without it, the binding may fail or do harm.
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
    """Return a new symmetric heap of a group: a ``CudaHeap`` on a GPU, else a ``SharedHeap``.

    Collective. Ranks that cannot address each other's memory are a ``RuntimeError``.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device ({device}) must be a cpu or a cuda device")
    return CudaHeap(group, device) if device.type == "cuda" else SharedHeap(group)
