"""How a kernel is launched in the interpreter: co-resident under a scheduler, in turn without.

Differences from Triton's own launch: programs may be threads, arguments must be on the CPU and are
used in place, errors come as they were raised, numpy's floating-point warnings are off, since GPUs
have none, and ``triton.language`` is made interpretable once for the process instead of at each
call of each device function, which took half of the time.
"""

import contextvars
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder

from halley.interpreter.sanitizer import Allowed, allow
from halley.interpreter.scheduler import current_scheduler, switch_point


_Index = tuple[int, ...]
_Launch = tuple[Callable[[_Index], None], list[_Index]]

_GRID: contextvars.ContextVar[_Index] = contextvars.ContextVar("grid")
_PROGRAM: contextvars.ContextVar[_Index] = contextvars.ContextVar("program")
_HELD: contextvars.ContextVar[list[_Launch] | None] = contextvars.ContextVar("held", default=None)


def install() -> None:
    """Replace the launch of kernels and the calls of device functions."""
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
    # Checks of int32 overflow say nothing but with TRITON_DEBUG=1, and take half of the time.
    debug = bool(knobs.runtime.debug)
    builder.options = dataclasses.replace(builder.options, debug=debug, sanitize_overflow=debug)


def _switching(original: Callable[..., Any], is_switch: Callable[..., bool]) -> Callable[..., Any]:
    def access(self: InterpreterBuilder, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if is_switch(*args, **kwargs):
            switch_point()
        return result

    return access


def _call_device_function(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    return self.rewrite()(*args, **kwargs)


def _launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
    # What is no parameter of the kernel is an option of the compiler, as num_warps is.
    kwargs = {name: value for name, value in kwargs.items() if name in self.arg_names}
    for hook in self.pre_run_hooks:
        hook(*args, **kwargs)
    arguments = inspect.getcallargs(self.fn, *args, **kwargs)
    allowed = Allowed(self.fn.__name__, arguments.values())
    arguments = {
        name: value if name in self.constexprs else interpreter._implicit_cvt(value)
        for name, value in arguments.items()
    }
    sizes: Any = self.grid(arguments) if callable(self.grid) else self.grid
    grid = (*sizes, *(1 for _ in range(3 - len(sizes))))

    def run_program(program: _Index) -> None:
        _GRID.set(grid)
        _PROGRAM.set(program)
        allow(allowed)
        with np.errstate(all="ignore"):
            self.fn(**arguments)

    # GPUs start programs in this order too: the first axis is the quickest.
    programs = [index[::-1] for index in itertools.product(*map(range, grid[::-1]))]
    held = _HELD.get()
    if held is None:
        _run([(run_program, programs)])
    else:
        held.append((run_program, programs))


def _run(launches: list[_Launch]) -> None:
    scheduler = current_scheduler()
    if scheduler is not None:
        scheduler.run_launches(launches)
        return
    for run_program, programs in launches:
        context = contextvars.copy_context()  # a launch leaves nothing in the caller's context
        for program in programs:
            context.run(run_program, program)


@contextmanager
def together() -> Generator[None]:
    """Run what is launched meanwhile at its end: each launch when all before it have begun.

    Without a scheduler they run in turn.
    """
    held: list[_Launch] = []
    token = _HELD.set(held)
    try:
        yield
    finally:
        _HELD.reset(token)
    _run(held)
