"""Address sanitizer: an interpreted kernel may access only its arguments and registered memory.

On a GPU, a load past the end of a tensor or a store through a wrong pointer often goes unnoticed.
Here it is an error that names the program. One case is not detected: an access past the end of one
argument whose address lies in another argument.
"""

from bisect import bisect_right
from collections.abc import Iterable
from contextvars import ContextVar
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor

from halley.interpreter import registered_memory


_Mask = TensorHandle | npt.NDArray[np.bool_] | None


@final
class Allowed:
    """The address ranges that one kernel launch may access: its arguments and registered memory.

    ``arguments`` are CPU tensors, tensor descriptors of such tensors, or numbers.
    """

    def __init__(self, kernel: str, arguments: Iterable[object]) -> None:
        self._kernel = kernel
        spans = [(start, start + size) for start, size in list(registered_memory)]
        for argument in arguments:
            _add_spans(argument, spans)
        spans.sort()
        self._starts = [start for start, _ in spans]
        # Ranges may overlap: each end becomes the largest end of this and all earlier ranges.
        ends = np.array([end for _, end in spans], np.uint64)
        self._ends = np.maximum.accumulate(ends) if spans else ends

    def check(self, access: str, pointers: TensorHandle, mask: _Mask = None) -> None:
        """Raise an IndexError if an element that ``mask`` selects is outside of allowed ranges."""
        addresses = pointers.data
        if mask is not None:
            addresses = addresses[mask.data if isinstance(mask, TensorHandle) else mask]
        if addresses.size == 0:
            return
        num_bytes = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        # Fast path: if a range contains the lowest and highest address, it contains all others.
        index = bisect_right(self._starts, int(addresses.min())) - 1
        if index >= 0 and int(addresses.max()) + num_bytes <= int(self._ends[index]):
            return
        outside = addresses.ravel()
        if self._starts:
            starts = np.array(self._starts, np.uint64)
            places = np.searchsorted(starts, outside, side="right") - 1
            is_inside = (places >= 0) & (outside + np.uint64(num_bytes) <= self._ends[places])
            outside = outside[~is_inside]
        if outside.size:
            raise IndexError(
                f"{self._kernel}, program {interpreter.interpreter_builder.grid_idx}: {access} of "
                f"{outside.size} lanes outside of its arguments and of registered memory, "
                f"first at {int(outside[0]):#x}"
            )


# Memory that the kernel of this thread may access.
ALLOWED: ContextVar[Allowed] = ContextVar("allowed")


def _add_spans(argument: object, spans: list[tuple[int, int]]) -> None:
    argument = interpreter._unwrap_tensor(argument)
    if isinstance(argument, TensorDescriptor):
        _add_spans(argument.base, spans)
    elif isinstance(argument, torch.Tensor) and argument.numel():
        if argument.device.type != "cpu":
            raise ValueError(f"device ({argument.device}) must be cpu: kernels are interpreted")
        last = sum((n - 1) * s for n, s in zip(argument.shape, argument.stride(), strict=True))
        start = argument.data_ptr()
        spans.append((start, start + (last + 1) * argument.element_size()))
