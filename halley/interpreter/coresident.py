"""Launch kernels in the interpreter: programs run concurrently under a scheduler, else in order.

Unlike in Triton's own interpreted launch, arguments must be on the CPU and are used in place,
exceptions reach the caller unchanged, and numpy's floating-point warnings are off, since GPUs have
none. ``triton.language`` is patched once for each process. Triton patches it in each call of each
device function, which took half of the time.
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
_Launch = tuple[Callable[[_Index], None], list[_Index]]  # function, and programs to call it with

# Context variables, because each rank and each program of a scheduler is a thread of its own.
_GRID: contextvars.ContextVar[_Index] = contextvars.ContextVar("grid")
_PROGRAM: contextvars.ContextVar[_Index] = contextvars.ContextVar("program")


def install() -> None:
    """Replace how Triton's interpreter launches kernels and calls device functions."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    methods: list[tuple[type, str, object]] = [
        # Triton 3.6 converts an array of one element with int(), which numpy 2.4 refuses.
        (tl.tensor, "__index__", lambda self: int(self.handle.data.item())),
        (InterpretedFunction, "__call__", _call_device_function),
        (GridExecutor, "__call__", _launch),
        (InterpreterBuilder, "grid_dim", property(lambda self: _GRID.get())),
        (InterpreterBuilder, "grid_idx", property(lambda self: _PROGRAM.get())),
    ]
    for owner, name, method in methods:
        setattr(owner, name, method)
    for name, is_switch in {
        "create_atomic_rmw": lambda *_, **__: True,
        "create_atomic_cas": lambda *_, **__: True,
        "create_masked_load": lambda *args, **kwargs: kwargs.get("is_volatile", args[-1]),
    }.items():
        setattr(InterpreterBuilder, name, _switching(getattr(InterpreterBuilder, name), is_switch))
    builder = interpreter.interpreter_builder
    # Checks of int32 overflow take half of the time, and report only with TRITON_DEBUG=1.
    debug = bool(knobs.runtime.debug)
    builder.options = dataclasses.replace(builder.options, debug=debug, sanitize_overflow=debug)


def _switching(original: Callable[..., Any], is_switch: Callable[..., bool]) -> Callable[..., Any]:
    """Wrap an operation of the interpreter, so that the scheduler may switch threads after it."""

    def access(self: InterpreterBuilder, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if is_switch(*args, **kwargs):
            switch_point()
        return result

    return access


# Triton's own version patches ``triton.language`` in each call; ``install`` has patched it already.
def _call_device_function(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    return self.rewrite()(*args, **kwargs)


def _launch(
    self: GridExecutor, *args: Any, beside: Sequence[tuple[Any, Any, Any]] = (), **kwargs: Any
) -> None:
    """Launch a kernel, and others ``beside`` it, each with its grid and arguments.

    Each launch begins when all programs of the launches before it have begun. Without a scheduler,
    the launches run one after another.
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
        context = contextvars.copy_context()  # the caller's context stays as it is
        for program in programs:
            context.run(run_program, program)


def _prepare(executor: GridExecutor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Launch:
    # Other keywords, such as num_warps, are options of Triton's compiler.
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
