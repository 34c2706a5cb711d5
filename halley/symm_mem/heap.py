"""Symmetric memory: the same tensor on every rank, each rank able to address all the copies."""

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch


T = TypeVar("T")

ALIGNMENT = 256  # bytes; what the widest loads, TMA included, ask of a base address

RangeHook = Callable[[int, int], None]  # address, num_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmTensor:
    """A tensor that every rank of a heap has a copy of, and every rank can address all copies.

    Who writes to which copy, and who waits for it, is up to the user. A kernel adds offsets to
    ``ptrs_W[peer]`` as it would to a pointer of its own. Two of them are equal only if they are the
    same object: what a heap made it knows by identity.

    Attributes:
        local: this rank's copy, contiguous, aligned to ``ALIGNMENT`` bytes.
        ptrs_W: address of each rank's copy, its own included, int64, on the device of ``local``.
            Valid on this rank only: another rank has other addresses for the same memory.
    """

    local: torch.Tensor
    ptrs_W: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The memory of one tensor, as a heap got it from the machine.

    Attributes:
        local: this rank's copy, uint8 ``(num_bytes,)``.
        addresses: of each rank's copy.
        told: the addresses that this rank tells its hooks.
        keep: what must live as long as the addresses are used.
    """

    local: torch.Tensor
    addresses: list[int]
    told: list[int]
    keep: object = None


class AbstractSymmHeap(abc.ABC):
    """Makes symmetric tensors for the ranks of one group. Subclasses are final.

    ``zeros``, ``free``, ``barrier`` and ``close`` are collectives: all ranks call them
    in the same order. A subclass says where memory comes from and how ranks meet.

    Attributes:
        rank, num_ranks: in the group of the heap.
        device: where the tensors are.
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
        """Start without memory.

        Args:
            on_map, on_unmap: called with the address and number of bytes of each copy that becomes
                or ceases to be addressable; a sanitizer of addresses learns here what peers own.
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
        """Bytes of the tensors that this rank holds now, not counting what rounding up adds."""
        return sum(segment.local.nbytes for segment in self._segments.values())

    @torch.inference_mode(mode=False)  # a heap may be filled in evaluation and used in training
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmTensor:
        """Return a tensor of zeros; the zeros of all copies are visible to all ranks on return.

        Args:
            shape: of one copy, the same on all ranks; () is one element.

        Raises:
            ValueError: a size is not positive.
            MemoryError: a rank has too little memory. Raised on all ranks, which may go on.
            RuntimeError: the ranks asked for different numbers of bytes, or the heap is closed.
        """
        if any(size < 1 for size in shape):
            raise ValueError(f"shape ({tuple(shape)}) must have sizes of at least 1")
        if self._closed:
            raise RuntimeError("the symmetric heap is closed")
        segment = self._allocate(math.prod(shape) * dtype.itemsize)
        assert all(address % ALIGNMENT == 0 for address in segment.addresses)
        tensor = SymmTensor(
            local=segment.local.view(dtype).view(shape),
            ptrs_W=torch.tensor(segment.addresses, dtype=torch.int64, device=self.device),
        )
        self._segments[tensor] = segment
        self._tell(self._on_map, segment)
        self.barrier()
        return tensor

    def free(self, tensor: SymmTensor) -> None:
        """Give back a tensor once every rank has come here; nobody may use its addresses after.

        This rank's own memory goes when the last reference to ``tensor.local`` does.

        Raises:
            ValueError: the tensor is not of this heap, or was freed before.
        """
        if tensor not in self._segments:
            raise ValueError("tensor must be one that this heap made and did not free")
        self.barrier()
        self._drop(tensor)

    def close(self) -> None:
        """Free all tensors that are left. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        self.barrier()
        for tensor in list(self._segments):
            self._drop(tensor)

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks to come here and for the work before it on their current streams."""

    @abc.abstractmethod
    def _allocate(self, num_bytes: int) -> Segment:
        """Return zeroed memory on every rank; a failure of one rank is raised on all."""

    @abc.abstractmethod
    def _gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""

    def on_all_ranks(self, num_bytes: int, act: Callable[[], T]) -> T:
        """Return what ``act`` does; if it fails on any rank, raise on all, so that none waits.

        A collective.

        Args:
            num_bytes: that ``act`` allocates, on each rank.

        Raises:
            MemoryError: a rank failed.
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
        self._tell(self._on_unmap, self._segments.pop(tensor))

    def _tell(self, hook: RangeHook | None, segment: Segment) -> None:
        if hook is not None:
            for address in segment.told:
                hook(address, segment.local.nbytes)
