"""Repair Triton's interpreter, and refuse a Triton whose interpreter still gives wrong values."""

from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.interpreter import InterpretedFunction

from halley.interpreter import assembly, coresident, numerics, sanitizer, type_cache


@cache
def install() -> None:
    """Repair Triton's interpreter for the rest of this process.

    A second call does nothing, nor does a call in a process in which Triton compiles. The repairs
    replace internals of Triton. Therefore the results of a small kernel are compared with known
    values. All this takes about 40 ms.

    Raises:
        RuntimeError: TRITON_INTERPRET was set after triton was imported, or the interpreter of
            this version of Triton has other internals, or still gives wrong values.
    """
    if not isinstance(tl.zeros, InterpretedFunction):
        if knobs.runtime.interpret:
            raise RuntimeError("TRITON_INTERPRET=1 must be set before triton is first imported")
        return
    try:
        numerics.install()
        assembly.install()
        sanitizer.install()
        coresident.install()
        type_cache.install()
        wrong = _find_wrong_values()
    except Exception as error:
        raise RuntimeError(f"{_describe()} cannot be repaired: {error!r}") from error
    if wrong:
        raise RuntimeError(f"{_describe()} gives wrong values: {', '.join(wrong)}")


def _describe() -> str:
    return f"the interpreter of triton {triton.__version__}"


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
    """Return the operations whose results differ from values computed by hand."""
    a_MM = torch.tensor([[1.0, 3.0], [-2.0, 0.5]], dtype=torch.bfloat16)
    dot_MM, sum_MM = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bfloat16)
    less_N = torch.full((3,), -1, dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int32)
    tensors = (a_MM, dot_MM, sum_MM, less_N, count)
    _probe_kernel[(2,)](*tensors, 3, M=2)  # pyright: ignore[reportArgumentType]
    found = {
        "bfloat16 dot": dot_MM.tolist() == [[-5.0, 4.5], [-3.0, -5.75]],
        # A tie that is rounded up to even, a value above the middle, a tie that is rounded down.
        "rounding to bfloat16": sum_MM.tolist() == [[1.015625, 3.015625], [-1.984375, 0.51171875]],
        "bfloat16 comparison": less_N.tolist() == [0, 0, 1],
        "atomic addition": count.tolist() == [3],
        "address sanitizer": _is_caught(tensors),
    }
    return [name for name, is_right in found.items() if not is_right]


def _is_caught(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Return whether a store past the end of ``less_N`` is an IndexError."""
    try:
        _probe_kernel[(1,)](*tensors, 4, M=2)  # pyright: ignore
    except IndexError:
        return True
    return False
