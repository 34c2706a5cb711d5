"""Make the interpreter compute bfloat16 as GPUs do: in float32, rounded to nearest even.

Triton's interpreter stores bfloat16 as uint16 and lets numpy compute with the integers. So sums,
multiplications and comparisons are wrong, and casts to bfloat16 truncate. Not repaired, because
no kernel uses them: ``tl.fma``, conversions from and to float8, and explicit rounding modes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle


_NAN = np.uint16(0x7FC0)


def widen(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Convert bfloat16 values, given as bits, to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_to_bfloat16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Round to bfloat16, ties to even, and return the bits; float64 is rounded to float32 first.

    Example:
        1 + 2**-8 is in the middle of 0x3F80 (1) and 0x3F81 (1 + 2**-7): the result is 0x3F80.
        1 + 3 * 2**-8 is in the middle of 0x3F81 and 0x3F82: the result is 0x3F82.
    """
    bits = values.astype(np.float32).view(np.uint32)
    # Add 0x7FFF (below half) and the last kept bit: a tie rounds up only if the bit is 1.
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + rounding) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), _NAN, rounded)


def install() -> None:
    """Repair bfloat16 casts, constants, operations, dots and sums of the interpreter."""
    unary_op_of_triton = InterpreterBuilder.unary_op
    binary_op_of_triton = InterpreterBuilder.binary_op
    dot_of_triton = InterpreterBuilder.create_dot
    sum_of_triton = ReduceOps.sum

    def unary_op(self: InterpreterBuilder, x: TensorHandle, op: Callable[..., Any]) -> TensorHandle:
        return _rounded(op(widen(x.data))) if _is_bfloat16(x) else unary_op_of_triton(self, x, op)

    def binary_op(
        self: InterpreterBuilder, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., Any]
    ) -> TensorHandle:
        if not (_is_bfloat16(lhs) and _is_bfloat16(rhs)):
            return binary_op_of_triton(self, lhs, rhs, op)
        output = op(widen(lhs.data), widen(rhs.data))
        return TensorHandle(output, tl.int1) if output.dtype == np.bool_ else _rounded(output)

    def dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *others: Any
    ) -> TensorHandle:
        return dot_of_triton(self, _widened(a), _widened(b), *others)

    def sum_(self: ReduceOps, x: tl.tensor) -> tl.tensor:
        if x.dtype != tl.bfloat16:
            return sum_of_triton(self, x)
        total = np.sum(widen(x.handle.data), axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(round_to_bfloat16(np.asarray(total)), tl.bfloat16)

    methods: list[tuple[type, str, Callable[..., object]]] = [
        (InterpreterBuilder, "cast_impl", _cast),
        (InterpreterBuilder, "get_bf16", lambda self, x: _rounded(np.array([x], np.float32))),
        (InterpreterBuilder, "unary_op", unary_op),
        (InterpreterBuilder, "binary_op", binary_op),
        (InterpreterBuilder, "create_dot", dot),
        (ReduceOps, "sum", sum_),
    ]
    for owner, name, method in methods:
        setattr(owner, name, method)


def _is_bfloat16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _widened(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(widen(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _rounded(values: npt.NDArray[Any]) -> TensorHandle:
    return TensorHandle(round_to_bfloat16(values), tl.bfloat16)


def _cast(self: InterpreterBuilder, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
    values = _widened(src).data
    if dst_type.scalar == tl.bfloat16:
        return _rounded(values)
    return TensorHandle(values.astype(interpreter._get_np_dtype(dst_type)), dst_type.scalar)
