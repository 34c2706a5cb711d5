"""bfloat16 arithmetic in the interpreter as on GPUs: in float32, rounded to nearest even.

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
    # Add half of the last bit minus one, plus the last bit: a tie carries only if that bit is odd.
    rounding = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + rounding) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), _NAN, rounded)


def install() -> None:
    """Replace the interpreter's operations on bfloat16."""
    builder = {
        "cast_impl": _cast,
        "get_bf16": _get_bf16,
        "binary_op": _make_binary_op(InterpreterBuilder.binary_op),
        "create_dot": _make_dot(InterpreterBuilder.create_dot),
    }
    for name, method in builder.items():
        setattr(InterpreterBuilder, name, method)
    ReduceOps.sum = _make_sum(ReduceOps.sum)


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


def _get_bf16(self: InterpreterBuilder, value: float) -> TensorHandle:
    return _rounded(np.array([value], np.float32))


def _make_binary_op(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def binary_op(
        self: InterpreterBuilder,
        lhs: TensorHandle,
        rhs: TensorHandle,
        op: Callable[..., npt.NDArray[Any]],
    ) -> TensorHandle:
        if not (_is_bfloat16(lhs) and _is_bfloat16(rhs)):
            return original(self, lhs, rhs, op)
        output = op(widen(lhs.data), widen(rhs.data))
        return TensorHandle(output, tl.int1) if output.dtype == np.bool_ else _rounded(output)

    return binary_op


def _make_dot(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def create_dot(
        self: InterpreterBuilder,
        a: TensorHandle,
        b: TensorHandle,
        d: TensorHandle,
        input_precision: object,
        max_num_imprecise_acc: object,
    ) -> TensorHandle:
        return original(self, _widened(a), _widened(b), d, input_precision, max_num_imprecise_acc)

    return create_dot


def _make_sum(original: Callable[..., tl.tensor]) -> Callable[..., tl.tensor]:
    def sum_(self: ReduceOps, x: tl.tensor) -> tl.tensor:
        if x.dtype != tl.bfloat16:
            return original(self, x)
        total = np.sum(widen(x.handle.data), axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(round_to_bfloat16(np.asarray(total)), tl.bfloat16)

    return sum_
