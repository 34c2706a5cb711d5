"""Predict how much memory the pool of CUDA graphs needs, gaps included."""

from dataclasses import dataclass
from typing import final


# Source: torch's caching allocator (c10/cuda/CUDACachingAllocator.cpp).
_ROUNDING = 512  # bytes; sizes are multiples of it
# Tensors of at most this size have pieces of their own. A block that is larger than a tensor by
# more than this is split.
_SMALL = 2**20
PIECE = 2**21  # sizes of pieces are multiples of it


@dataclass(eq=False)
class _Total:
    """Bytes of the tensors in use, and the most so far."""

    num_bytes: int = 0
    most_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.num_bytes)


@final
class PoolModel:
    """Places tensors in one piece of memory (torch: segment) as torch's allocator does.

    The allocator takes the smallest free block that is large enough, and joins free blocks side by
    side. Tensors do not move, so free memory between them may be too small for a large tensor.

    Args:
        num_bytes: size of the piece.

    Attributes:
        has_all: whether all tensors so far found a place.
    """

    def __init__(self, num_bytes: int) -> None:
        self.has_all = True
        self._sizes: list[int] = []  # of each tensor so far, by its number
        self._small, self._large = _Total(), _Total()
        self._free = {0: num_bytes} if num_bytes else {}  # address and size of each free block
        self._used: dict[int, tuple[int, int]] = {}  # the same of each tensor in the piece

    @property
    def small_bytes(self) -> int:
        """Most memory of small tensors so far, which are not in the piece."""
        return -(-self._small.most_bytes // PIECE) * PIECE

    @property
    def least_bytes(self) -> int:
        """Most memory of the other tensors so far: the size of the piece if there were no gaps."""
        return self._large.most_bytes

    def allocate(self, num_bytes: int) -> int:
        """Place a tensor; return its number."""
        number = len(self._sizes)
        size = -(-num_bytes // _ROUNDING) * _ROUNDING
        self._sizes.append(size)
        if size <= _SMALL:
            self._small.add(size)
            return number
        self._large.add(size)
        fitting = [(block, at) for at, block in self._free.items() if block >= size]
        if not fitting:
            self.has_all = False
            return number
        block, at = min(fitting)
        del self._free[at]
        if block - size > _SMALL:
            self._free[at + size] = block - size
            block = size
        self._used[number] = at, block
        return number

    def free(self, number: int) -> None:
        """Free a tensor."""
        size = self._sizes[number]
        (self._small if size <= _SMALL else self._large).add(-size)
        if number not in self._used:
            return
        at, size = self._used.pop(number)
        size += self._free.pop(at + size, 0)
        before = next((each for each, block in self._free.items() if each + block == at), None)
        if before is not None:
            size += self._free.pop(before)
            at = before
        self._free[at] = size
