"""Predict how much memory the pool of CUDA graphs needs, gaps included."""

from typing import final


# Source: torch's caching allocator (c10/cuda/CUDACachingAllocator.cpp).
_ROUNDING = 512  # bytes; sizes are multiples of it
_SMALL = 2**20  # smaller tensors share pieces of 2 MiB, and a larger block is split if more remains


@final
class PoolModel:
    """Places tensors in one piece of memory as torch's allocator does.

    The allocator takes the smallest free block that is large enough, and joins free blocks side by
    side. Tensors do not move, so free memory between them may be too small for a large tensor.

    Attributes:
        num_bytes: the size that the piece must have for all tensors so far.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._end = 0  # of the last block; all memory behind it is free
        self._used: dict[int, int] = {}  # address and size of each block with a tensor
        self._free: dict[int, int] = {}

    def allocate(self, num_bytes: int) -> int:
        """Place a tensor; return its address, or -1 if it is small, which takes no place here."""
        if num_bytes <= _SMALL:
            return -1
        size = -(-num_bytes // _ROUNDING) * _ROUNDING
        fitting = [(block, at) for at, block in self._free.items() if block >= size]
        if fitting:
            block, at = min(fitting)
            del self._free[at]
            if block - size > _SMALL:
                self._free[at + size] = block - size
                block = size
        else:
            block, at = size, self._end
            self._end += size
            self.num_bytes = max(self.num_bytes, self._end)
        self._used[at] = block
        return at

    def free(self, at: int) -> None:
        """Free the tensor at an address."""
        if at < 0:
            return
        size = self._used.pop(at)
        size += self._free.pop(at + size, 0)
        before = next((each for each, block in self._free.items() if each + block == at), None)
        if before is not None:
            size += self._free.pop(before)
            at = before
        if at + size == self._end:
            self._end = at
        else:
            self._free[at] = size
