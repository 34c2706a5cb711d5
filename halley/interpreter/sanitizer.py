"""Address sanitizer: a kernel may access only its arguments' memory and registered memory.

On a GPU, a load past the end of a tensor or a store through a wrong pointer often goes unnoticed.
Here it is an error that names the program. One case is not detected: an access past the end of one
argument whose address lies in another argument.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor

from halley.interpreter import registered_memory


@final
class Allowed:
    """Memory that one launch may access: its arguments, and registered memory.

    ``arguments`` are tensors, tensor descriptors, or numbers.

    Raises:
        ValueError: a tensor is not on the CPU.
    """

    def __init__(self, kernel: str, arguments: Iterable[object]) -> None:
        self._kernel = kernel
        spans = [(start, start + size) for start, (size, _) in list(registered_memory.items())]
        for argument in arguments:
            _add_spans(argument, spans)
        spans.sort()
        self._starts = [start for start, _ in spans]
        # Spans may overlap: an address is inside if any span that starts before it ends after it.
        ends = np.array([end for _, end in spans], np.uint64)
        self._ends = np.maximum.accumulate(ends) if spans else ends

    def check(
        self,
        access: str,
        pointers: TensorHandle,
        mask: TensorHandle | npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Raise an IndexError if an active lane of an access is outside of this memory."""
        addresses = pointers.data
        if mask is not None:
            addresses = addresses[mask.data if isinstance(mask, TensorHandle) else mask]
        if addresses.size == 0:
            return
        num_bytes = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        # Fast path: most accesses are inside of one span from their first to their last address.
        index = bisect_right(self._starts, int(addresses.min())) - 1
        if index >= 0 and int(addresses.max()) + num_bytes <= int(self._ends[index]):
            return
        outside = self._outside(addresses.ravel(), num_bytes)
        if outside.size:
            raise IndexError(
                f"{self._kernel}, program {interpreter.interpreter_builder.grid_idx}: {access} of "
                f"{outside.size} lanes outside of its arguments and of registered memory, "
                f"first at {int(outside[0]):#x}"
            )

    def _outside(self, addresses: npt.NDArray[np.uint64], num_bytes: int) -> npt.NDArray[np.uint64]:
        starts = np.array(self._starts, np.uint64)
        if not starts.size:
            return addresses
        index = np.searchsorted(starts, addresses, side="right") - 1
        inside = (index >= 0) & (addresses + np.uint64(num_bytes) <= self._ends[index])
        return addresses[~inside]


# Memory that the kernel of this thread may access.
ALLOWED: ContextVar[Allowed] = ContextVar("allowed")


def install() -> None:
    """Check each load, store and atomic operation of the interpreter before it runs."""
    checks: dict[str, Callable[..., None]] = {
        "create_masked_load": lambda ptr, mask, *_: ALLOWED.get().check("load", ptr, mask),
        "create_masked_store": lambda ptr, _, mask, *__: ALLOWED.get().check("store", ptr, mask),
        "create_atomic_rmw": lambda _, ptr, __, mask, *___: ALLOWED.get().check(
            "atomic operation", ptr, mask
        ),
        "create_atomic_cas": lambda ptr, *_: ALLOWED.get().check("atomic operation", ptr),
    }
    for name, check in checks.items():
        setattr(InterpreterBuilder, name, _checked(getattr(InterpreterBuilder, name), check))


def _checked(original: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    def access(self: InterpreterBuilder, *args: Any, **kwargs: Any) -> Any:
        check(*args)  # tensor descriptors pass the arguments after the mask by keyword
        return original(self, *args, **kwargs)

    return access


def _add_spans(argument: object, spans: list[tuple[int, int]]) -> None:
    """Append start and end of the memory of each tensor in ``argument``."""
    argument = interpreter._unwrap_tensor(argument)
    if isinstance(argument, TensorDescriptor):
        _add_spans(argument.base, spans)
    elif isinstance(argument, torch.Tensor) and argument.numel():
        if argument.device.type != "cpu":
            raise ValueError(f"device ({argument.device}) must be cpu: kernels are interpreted")
        last = sum((n - 1) * s for n, s in zip(argument.shape, argument.stride(), strict=True))
        start = argument.data_ptr()
        spans.append((start, start + (last + 1) * argument.element_size()))
