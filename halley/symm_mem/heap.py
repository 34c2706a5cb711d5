"""The symmetric heap: tensors with one copy per rank, each copy addressable by every rank.

Ownership: the heap owns all memory; a tensor lives until ``free`` or ``close``, which all ranks
call together. Any rank may read and write any copy. The heap orders only ``zeros``, ``free`` and
``barrier``; kernels must synchronize all other accesses with flags of their own.
"""

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch


T = TypeVar("T")

ALIGNMENT = 256  # bytes; the widest loads, with TMA, need it of a base address

RangeHook = Callable[[int, int], None]  # address, num_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmTensor:
    """A symmetric tensor: one copy per rank, each copy addressable by every rank.

    The users of the tensor decide which rank writes to which copy, and who waits for it. A kernel
    adds offsets to ``ptrs_W[peer]`` as to a pointer of its own. Equality is object identity.

    Attributes:
        local: this rank's copy, contiguous, aligned to ``ALIGNMENT`` bytes.
        ptrs_W: address of each rank's copy, with its own, int64, on the device of ``local``. The
            addresses are valid on this rank only: each rank maps the memory at other addresses.
    """

    local: torch.Tensor
    ptrs_W: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The memory of one tensor as a heap allocated it.

    Attributes:
        local: this rank's copy, uint8 ``(num_bytes,)``.
        addresses_W: address of each rank's copy.
        hook_addresses: addresses that this rank passes to its hooks.
        owner: an object that must live as long as the addresses are used.
    """

    local: torch.Tensor
    addresses_W: list[int]
    hook_addresses: list[int]
    owner: object = None


class AbstractSymmHeap(abc.ABC):
    """Allocates symmetric tensors for the ranks of one group. Subclasses are final.

    ``zeros``, ``free``, ``barrier`` and ``close`` are collectives: all ranks call them in the same
    order. A subclass defines how memory is allocated and how ranks wait for each other.

    Attributes:
        rank, num_ranks: in the group of the heap.
        device: device of the tensors.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        device: torch.device,
        on_map: RangeHook | None = None,
        on_unmap: RangeHook | None = None,
    ) -> None:
        """Create an empty heap.

        Args:
            on_map, on_unmap: called with the address and number of bytes of each copy that becomes
                addressable, or is no longer. The interpreter's sanitizer learns the valid ranges
                so.
        """
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self._on_map = on_map
        self._on_unmap = on_unmap
        self._segments: dict[SymmTensor, Segment] = {}
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of this rank, without rounding by the allocator."""
        return sum(segment.local.nbytes for segment in self._segments.values())

    @torch.inference_mode(mode=False)  # tensors made in evaluation must work in training
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmTensor:
        """Return a tensor of zeros; on return, all ranks see the zeros of all copies. Collective.

        Args:
            shape: shape of one copy, the same on all ranks; () is one element.

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
        self._call_hook(self._on_map, segment)
        self.barrier()
        return tensor

    def free(self, tensor: SymmTensor) -> None:
        """Free a tensor when all ranks have called this; its addresses become invalid. Collective.

        This rank's own copy is freed with the last reference to ``tensor.local``.

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
        """Wait until all ranks call this and earlier work on their current streams is done."""

    @abc.abstractmethod
    def _allocate(self, num_bytes: int) -> Segment:
        """Return zeroed memory on every rank; a failure on one rank is raised on all."""

    @abc.abstractmethod
    def _gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""

    def on_all_ranks(self, num_bytes: int, act: Callable[[], T]) -> T:
        """Return the result of ``act``; if it fails on any rank, raise on all ranks. Collective.

        So no rank waits for one that failed.

        Args:
            num_bytes: bytes that ``act`` allocates on each rank.

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
        self._call_hook(self._on_unmap, self._segments.pop(tensor))

    def _call_hook(self, hook: RangeHook | None, segment: Segment) -> None:
        if hook is not None:
            for address in segment.hook_addresses:
                hook(address, segment.local.nbytes)
