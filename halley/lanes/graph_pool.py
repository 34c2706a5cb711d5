"""Predict how much memory the pool of CUDA graphs needs, gaps included."""

from typing import final


# Source: torch's caching allocator (c10/cuda/CUDACachingAllocator.cpp).
_ROUNDING = 512  # bytes; sizes are multiples of it
# Tensors of at most this size have pieces of their own. A block that is larger than a tensor by
# more than this is split.
_SMALL = 2**20
PIECE = 2**21  # sizes of pieces are multiples of it


@final
class PoolModel:
    """Places tensors in one piece of memory (torch: segment) as torch's allocator does.

    The allocator takes the smallest free block that is large enough, and joins free blocks side by
    side. Tensors do not move, so free memory between them may be too small for a large tensor.

    Args:
        num_bytes: size of the piece.

    Attributes:
        has_all: whether all tensors so far found a place.
        least_bytes: a smaller piece would have no place for them, even without gaps.
    """

    def __init__(self, num_bytes: int) -> None:
        self.has_all = True
        self.least_bytes = 0
        self._large: dict[int, int] = {}  # bytes of each other tensor, by its number
        self._large_bytes = 0
        self._free = {0: num_bytes} if num_bytes else {}  # address and size of each free block
        self._used: dict[int, tuple[int, int]] = {}  # the same of each tensor, by its number
        self._num_tensors = 0
        self._small: dict[int, int] = {}  # bytes of each small tensor, by its number
        self._small_bytes = self._most_small_bytes = 0

    @property
    def small_bytes(self) -> int:
        """Most memory of small tensors so far, which are not in the piece."""
        return -(-self._most_small_bytes // PIECE) * PIECE

    def allocate(self, num_bytes: int) -> int:
        """Place a tensor; return its number."""
        self._num_tensors += 1
        size = -(-num_bytes // _ROUNDING) * _ROUNDING
        if size <= _SMALL:
            self._small[self._num_tensors] = size
            self._small_bytes += size
            self._most_small_bytes = max(self._most_small_bytes, self._small_bytes)
            return self._num_tensors
        self._large[self._num_tensors] = size
        self._large_bytes += size
        self.least_bytes = max(self.least_bytes, self._large_bytes)
        fitting = [(block, at) for at, block in self._free.items() if block >= size]
        if not fitting:
            self.has_all = False
            return self._num_tensors
        block, at = min(fitting)
        del self._free[at]
        if block - size > _SMALL:
            self._free[at + size] = block - size
            block = size
        self._used[self._num_tensors] = at, block
        return self._num_tensors

    def free(self, number: int) -> None:
        """Free a tensor."""
        self._small_bytes -= self._small.pop(number, 0)
        self._large_bytes -= self._large.pop(number, 0)
        if number not in self._used:
            return
        at, size = self._used.pop(number)
        size += self._free.pop(at + size, 0)
        before = next((each for each, block in self._free.items() if each + block == at), None)
        if before is not None:
            size += self._free.pop(before)
            at = before
        self._free[at] = size
