"""Sizes of traced tensors, those guessed that only a run would tell."""

from collections.abc import Sequence
from typing import cast, final

import torch


@final
class Sizes:
    """Tells shapes and bytes of what nodes return.

    Args:
        unknown: taken for a size that depends on data, on all ranks alike. A sum of such sizes is
            one size.
    """

    def __init__(self, unknown: int) -> None:
        self._unknown = unknown

    def number(self, size: int | torch.SymInt) -> int:
        """Return a size."""
        if isinstance(size, int):
            return size
        hint: object = getattr(cast(object, getattr(size, "node", None)), "hint", None)
        return hint if isinstance(hint, int) else self._unknown

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(map(self.number, cast(Sequence[int | torch.SymInt], tensor.shape)))

    def num_bytes(self, value: object) -> int:
        """Return the bytes of what a node returns: a tensor, several, or none."""
        if isinstance(value, torch.Tensor):
            count = value.element_size()
            for size in self.shape(value):
                count *= size
            return count
        if isinstance(value, tuple | list):
            return sum(map(self.num_bytes, cast(Sequence[object], value)))
        return 0
