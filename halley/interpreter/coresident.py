"""Launch interpreted kernels: a scheduler interleaves CTAs; without one they run one by one.

Unlike in Triton's own interpreted launch, arguments must be on the CPU and are used in place,
exceptions reach the caller unchanged, and numpy's floating-point warnings are off, since GPUs have
none. ``triton.language`` is patched only once, as patches in each call took half of the time.
"""

import contextvars
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder

from halley.interpreter.sanitizer import ALLOWED, Allowed
from halley.interpreter.scheduler import current_scheduler, switch_point


_Index = tuple[int, ...]  # ids of a program along the axes of its grid
_Launch = tuple[Callable[[_Index], None], list[_Index]]  # a function, and arguments of its calls

# By method that accesses memory: name in errors; index of pointer argument; of mask, or None.
_ACCESSES: dict[str, tuple[str, int, int | None]] = {
    "create_masked_load": ("load", 0, 1),
    "create_masked_store": ("store", 0, 2),
    "create_atomic_rmw": ("atomic operation", 1, 3),
    "create_atomic_cas": ("atomic operation", 0, None),
}

# Context variables, because a scheduler runs ranks and concurrent CTAs in separate threads.
_GRID: contextvars.ContextVar[_Index] = contextvars.ContextVar("grid")
_PROGRAM: contextvars.ContextVar[_Index] = contextvars.ContextVar("program")


def install() -> None:
    """Replace how Triton's interpreter launches kernels, calls functions and accesses memory."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    methods: list[tuple[type, str, object]] = [
        # Triton 3.6 converts an array of one element with int(), which numpy 2.4 refuses.
        (tl.tensor, "__index__", lambda self: int(self.handle.data.item())),
        # Triton's own ``__call__`` patches ``triton.language`` each time, which is slow.
        (InterpretedFunction, "__call__", lambda self, *args, **kw: self.rewrite()(*args, **kw)),
        (GridExecutor, "__call__", _launch),
        (InterpreterBuilder, "grid_dim", property(lambda self: _GRID.get())),
        (InterpreterBuilder, "grid_idx", property(lambda self: _PROGRAM.get())),
    ]
    for owner, name, method in methods:
        setattr(owner, name, method)
    for name, (kind, pointer, mask) in _ACCESSES.items():
        original = getattr(InterpreterBuilder, name)
        setattr(InterpreterBuilder, name, _checked(original, kind, pointer=pointer, mask=mask))
    builder = interpreter.interpreter_builder
    # int32 overflow checks take half of the time, so only TRITON_DEBUG=1 enables them.
    debug = bool(knobs.runtime.debug)
    builder.options = dataclasses.replace(builder.options, debug=debug, sanitize_overflow=debug)


def _checked(
    original: Callable[..., Any], kind: str, *, pointer: int, mask: int | None
) -> Callable[..., Any]:
    """Wrap a memory access: check its addresses; switch threads after atomics, volatile loads."""

    def access(self: InterpreterBuilder, *args: Any, **kwargs: Any) -> Any:
        # Loads by tensor descriptors pass ``is_volatile`` by keyword, other loads as last argument.
        ALLOWED.get().check(kind, args[pointer], None if mask is None else args[mask])
        result = original(self, *args, **kwargs)
        if kind != "store" and (kind != "load" or kwargs.get("is_volatile", args[-1])):
            switch_point()
        return result

    return access


def _launch(
    self: GridExecutor, *args: Any, beside: Sequence[tuple[Any, Any, Any]] = (), **kwargs: Any
) -> None:
    """Run this kernel and, at the same time, each (kernel, grid, arguments) in ``beside``.

    Without a scheduler, the launches run one after another.
    """
    launches = [_prepare(self, args, kwargs)]
    for kernel, grid, others in beside:
        executor = GridExecutor(kernel.rewrite(), kernel.arg_names, grid, ())
        launches.append(_prepare(executor, others, {}))
    scheduler = current_scheduler()
    if scheduler is not None:
        scheduler.run_launches(launches)
        return
    for run_program, programs in launches:
        context = contextvars.copy_context()  # keeps the caller's context variables unchanged
        for program in programs:
            context.run(run_program, program)


def _prepare(executor: GridExecutor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Launch:
    # Keywords that are no kernel argument, such as num_warps, are compiler options: drop them.
    kwargs = {name: value for name, value in kwargs.items() if name in executor.arg_names}
    arguments = inspect.getcallargs(executor.fn, *args, **kwargs)
    allowed = Allowed(executor.fn.__name__, arguments.values())
    arguments = {
        name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
        for name, value in arguments.items()
    }
    sizes: Any = executor.grid
    grid = (*sizes, *(1 for _ in range(3 - len(sizes))))

    def run_program(program: _Index) -> None:
        _GRID.set(grid)
        _PROGRAM.set(program)
        ALLOWED.set(allowed)
        with np.errstate(all="ignore"):
            executor.fn(**arguments)

    # As on GPUs, the first axis of the grid changes fastest.
    return run_program, [index[::-1] for index in itertools.product(*map(range, grid[::-1]))]
