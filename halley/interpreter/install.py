"""Repair Triton's interpreter, and refuse a Triton whose interpreter still gives wrong values."""

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton import knobs
from triton._C.libtriton import ir
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

from halley.core.timeline import CURRENT_OPERATION
from halley.interpreter import coresident, numerics
from halley.interpreter.scheduler import current_scheduler


# Values of these types contain no tl.constexpr to unwrap.
_PLAIN = frozenset({int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.block_type})
# Tensors of these dtypes need no type promotion with a tensor of equal dtype or with an integer.
_COMMON = ("int32", "int64", "fp32")

_SWITCH_NS = 100_000  # virtual time of one switch between threads

# PTX instructions that only return their first operand here, because the interpreter completes each
# memory access before the next one.
_WITHOUT_EFFECT = ("fence.proxy.async", "cp.async.bulk.wait_group", "prefetch.global")


@cache
def install() -> None:
    """Repair Triton's interpreter for the rest of this process.

    Does nothing where Triton compiles. The repairs replace internals of Triton, so a small kernel
    is run and its results are compared with known values. All this takes about 40 ms. Other
    internals or wrong values are a RuntimeError.
    """
    if not isinstance(tl.zeros, InterpretedFunction):
        if knobs.runtime.interpret:
            raise RuntimeError("TRITON_INTERPRET=1 must be set before triton is first imported")
        return
    name = f"the interpreter of triton {triton.__version__}"
    try:
        numerics.install()
        InterpreterBuilder.create_inline_asm = _create_inline_asm  # pyright: ignore[reportAttributeAccessIssue]
        coresident.install()
        cache_types()
        skip_conversions()
        wrong = _find_wrong_values()
    except Exception as error:
        raise RuntimeError(f"{name} cannot be repaired: {error!r}") from error
    if wrong:
        raise RuntimeError(f"{name} gives wrong values: {', '.join(wrong)}")


@triton.jit
def _add(x, y):
    return x + y


@triton.jit
def _probe_kernel(a_MM, dot_MM, sum_MM, less_N, count, num_less, M: tl.constexpr):
    at_MM = tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :]
    a = tl.load(a_MM + at_MM)
    tl.store(dot_MM + at_MM, tl.dot(a, a))
    tl.store(sum_MM + at_MM, _add(a.to(tl.float32), 3 / 256).to(tl.bfloat16))
    tl.store(less_N + at_MM, (a < tl.trans(a)).to(tl.int32), mask=at_MM < num_less)
    tl.atomic_add(count, tl.program_id(0) + 1, sem="relaxed", scope="gpu")


def _find_wrong_values() -> list[str]:
    a_MM = torch.tensor([[1.0, 3.0], [-2.0, 0.5]], dtype=torch.bfloat16)
    dot_MM, sum_MM = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bfloat16)
    less_N = torch.full((3,), -1, dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int32)
    tensors = (a_MM, dot_MM, sum_MM, less_N, count)
    _probe_kernel[(2,)](*tensors, 3, M=2)  # pyright: ignore[reportArgumentType]
    found = {
        "bfloat16 dot": dot_MM.tolist() == [[-5.0, 4.5], [-3.0, -5.75]],
        # Four sums: a tie that rounds up, one above a tie, a tie that rounds down, an exact value.
        "rounding to bfloat16": sum_MM.tolist() == [[1.015625, 3.015625], [-1.984375, 0.51171875]],
        "bfloat16 comparison": less_N.tolist() == [0, 0, 1],
        "atomic addition": count.tolist() == [3],
    }
    wrong = [name for name, is_right in found.items() if not is_right]
    with suppress(IndexError):
        _probe_kernel[(1,)](*tensors, 4, M=2)  # pyright: ignore  # stores past the end of less_N
        wrong.append("address sanitizer")
    return wrong


def _create_inline_asm(
    self: InterpreterBuilder,
    text: str,
    constraints: str,
    values: Sequence[TensorHandle],
    types: Sequence[tl.dtype],
    *options: object,
) -> Any:
    """Interpret inline PTX; return an object with ``get_result(index)``, as Triton expects."""
    results = list(values) or [_full(type_, 0) for type_ in types]
    if "%globaltimer" in text:
        scheduler = current_scheduler()
        if scheduler is None:
            # Note a wait: kernels read the clock only while they wait, or record their phases.
            CURRENT_OPERATION.poll()
            now_ns = time.monotonic_ns()
        else:
            now_ns = scheduler.num_switches * _SWITCH_NS
        results = [_full(type_, now_ns) for type_ in types]
    elif "st.release.sys" in text:
        # Run the store as an atomic exchange, which checks addresses and lets the scheduler switch.
        address, value = values
        ptr = TensorHandle(address.data.astype(np.uint64), tl.pointer_type(value.dtype.scalar))
        mask = TensorHandle(np.ones_like(value.data, dtype=bool), tl.int1)
        order = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SYNC_SCOPE.SYSTEM)
        self.create_atomic_rmw(ir.ATOMIC_OP.XCHG, ptr, value, mask, *order)
        results = [value]
    elif not any(name in text for name in _WITHOUT_EFFECT):
        raise NotImplementedError(f"the interpreter does not support this assembly: {text}")
    return SimpleNamespace(get_result=results.__getitem__)


def _full(type_: tl.dtype, value: int) -> TensorHandle:
    shape = list(map(int, type_.shape)) if isinstance(type_, tl.block_type) else [1]
    data = np.full(shape, value, dtype=interpreter._get_np_dtype(type_))
    return TensorHandle(data, type_.scalar)


def cache_types() -> None:
    """Make the interpreter compute dtype, shape and size once per Triton type, not per value."""
    language: Any = core  # Any: type checkers reject private names of Triton
    runtime: Any = interpreter
    unwrap_of_triton, np_dtype_of_triton = language._unwrap_if_constexpr, runtime._get_np_dtype
    init_block_of_triton = language.block_type.__init__
    init_tensor_of_triton = language.tensor.__init__
    np_dtypes: dict[str, np.dtype[Any]] = {}
    blocks: dict[tuple[str, tuple[int, ...]], tuple[Any, ...]] = {}
    tensors: dict[str, tuple[Any, Any]] = {}

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind is tl.constexpr:
            return value.value
        return value if kind in _PLAIN else unwrap_of_triton(value)

    def np_dtype(dtype: Any) -> np.dtype[Any]:
        scalar = dtype.scalar
        if scalar.name not in np_dtypes:
            np_dtypes[scalar.name] = np_dtype_of_triton(scalar)
        return np_dtypes[scalar.name]

    def init_block(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        sizes = tuple(size.value if type(size) is tl.constexpr else size for size in shape)
        key = element_ty.name, sizes
        if key not in blocks:
            init_block_of_triton(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            init_tensor_of_triton(self, handle, type)
            tensors[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[type.name]

    language._unwrap_if_constexpr, runtime._get_np_dtype = unwrap, np_dtype
    language.block_type.__init__, language.tensor.__init__ = init_block, init_tensor


def skip_conversions() -> None:
    """Make binary operations on common dtypes skip Triton's slow checks for type promotion."""
    convert_of_triton = TritonSemantic.binary_op_type_checking_impl

    def convert(self: Any, lhs: Any, rhs: Any, *args: Any, **options: Any) -> Any:
        if type(lhs) is tl.tensor and lhs.dtype.name in _COMMON:
            if type(rhs) is tl.tensor and rhs.dtype.name == lhs.dtype.name:
                return (lhs, rhs) if rhs.type == lhs.type else self.broadcast_impl_value(lhs, rhs)
            if type(rhs) is int and abs(rhs) < 2**31:
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
        return convert_of_triton(self, lhs, rhs, *args, **options)

    TritonSemantic.binary_op_type_checking_impl = convert
