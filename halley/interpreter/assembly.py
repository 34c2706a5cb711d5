"""What the few lines of PTX in the kernels do, for the interpreter."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from halley.core.position import POSITION
from halley.interpreter.scheduler import current_scheduler, switch_point


_SWITCH_NS = 100_000  # what a switch between threads takes here, roughly


# A fence orders two paths to memory of which the interpreter has one, a wait for bulk stores finds
# them done, a prefetch changes no value: all yield their first operand.
_AS_ITS_OPERAND = ("fence.proxy.async", "cp.async.bulk.wait_group", "prefetch.global")


@dataclass(frozen=True)
class _Results:
    """What a call of inline assembly yields, as Triton asks for it."""

    handles: Sequence[TensorHandle]

    def get_result(self, index: int) -> TensorHandle:
        return self.handles[index]


def install() -> None:
    """Let the interpreter run the inline assembly that the kernels use."""
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
    elif not any(known in text for known in _AS_ITS_OPERAND):
        raise NotImplementedError(f"the interpreter does not know this assembly: {text}")
    return _Results(list(values) or [_full(type_, 0) for type_ in types])


def _store_release(
    builder: InterpreterBuilder, address: TensorHandle, value: TensorHandle
) -> TensorHandle:
    """Store by an exchange, which the scheduler and the sanitizer know."""
    ptr = TensorHandle(address.data.astype(np.uint64), tl.pointer_type(value.dtype.scalar))
    mask = TensorHandle(np.ones_like(value.data, dtype=bool), tl.int1)
    builder.create_atomic_rmw(
        ir.ATOMIC_OP.XCHG, ptr, value, mask, ir.MEM_SEMANTIC.RELEASE, ir.MEM_SYNC_SCOPE.SYSTEM
    )
    return value


def _clock_ns() -> int:
    """Return the time; under a scheduler what its switches took, the same on a busy machine."""
    scheduler = current_scheduler()
    if scheduler is None:
        POSITION.poll()  # kernels ask for the time only while they wait
        return time.monotonic_ns()
    return scheduler.num_switches * _SWITCH_NS


def _full(type_: tl.dtype, value: int) -> TensorHandle:
    shape = list(map(int, type_.shape)) if isinstance(type_, tl.block_type) else [1]
    data = np.full(shape, value, dtype=interpreter._get_np_dtype(type_))
    return TensorHandle(data, type_.scalar)
