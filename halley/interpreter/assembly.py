"""Interpret the inline PTX of the kernels: the clock, the release store, fences and prefetches."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from halley.core.current_operation import CURRENT_OPERATION
from halley.interpreter.scheduler import current_scheduler, switch_point


_SWITCH_NS = 100_000  # virtual time of one switch between threads


# These have no effect in the interpreter, which completes each memory access before the next one.
# They return their first operand.
_WITHOUT_EFFECT = ("fence.proxy.async", "cp.async.bulk.wait_group", "prefetch.global")


@dataclass(frozen=True)
class _Results:
    """Results of one call of inline assembly, in the form that Triton expects."""

    handles: Sequence[TensorHandle]

    def get_result(self, index: int) -> TensorHandle:
        return self.handles[index]


def install() -> None:
    """Make the interpreter run the inline assembly of the kernels."""
    InterpreterBuilder.create_inline_asm = _create_inline_asm  # pyright: ignore[reportAttributeAccessIssue]


def _create_inline_asm(
    self: InterpreterBuilder,
    text: str,
    constraints: str,
    values: Sequence[TensorHandle],
    types: Sequence[tl.dtype],
    is_pure: bool,
    pack: int,
) -> _Results:
    if "%globaltimer" in text:
        return _Results([_full(type_, _clock_ns()) for type_ in types])
    if "nanosleep" in text:
        switch_point()
    elif "st.release.sys" in text:
        return _Results([_store_release(self, *values)])
    elif not any(name in text for name in _WITHOUT_EFFECT):
        raise NotImplementedError(f"the interpreter does not support this assembly: {text}")
    return _Results(list(values) or [_full(type_, 0) for type_ in types])


def _store_release(
    builder: InterpreterBuilder, address: TensorHandle, value: TensorHandle
) -> TensorHandle:
    """Store by an atomic exchange, at which the scheduler switches and the sanitizer checks."""
    ptr = TensorHandle(address.data.astype(np.uint64), tl.pointer_type(value.dtype.scalar))
    mask = TensorHandle(np.ones_like(value.data, dtype=bool), tl.int1)
    builder.create_atomic_rmw(
        ir.ATOMIC_OP.XCHG, ptr, value, mask, ir.MEM_SEMANTIC.RELEASE, ir.MEM_SYNC_SCOPE.SYSTEM
    )
    return value


def _clock_ns() -> int:
    """Return the time in ns; under a scheduler, virtual time that does not depend on the load."""
    scheduler = current_scheduler()
    if scheduler is None:
        CURRENT_OPERATION.poll()  # kernels ask for the time only while they wait
        return time.monotonic_ns()
    return scheduler.num_switches * _SWITCH_NS


def _full(type_: tl.dtype, value: int) -> TensorHandle:
    shape = list(map(int, type_.shape)) if isinstance(type_, tl.block_type) else [1]
    data = np.full(shape, value, dtype=interpreter._get_np_dtype(type_))
    return TensorHandle(data, type_.scalar)
