"""Launch a kernel with little work on the host."""

import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypedDict, Unpack, final

import torch
import triton

from halley.interpreter.switch import INTERPRETED
from halley.ops.kernels.driver import DirectLaunch, current_stream, prefer_shared_memory
from halley.ops.kernels.replay import note_launch


# Raised as a kernel is first launched that wants more than a multiprocessor has.
OutOfResources = triton.OutOfResources


class LaunchOptions(TypedDict, total=False):
    """How a kernel is compiled and launched.

    ``max_registers`` are those of a thread, None is as many as the compiler likes. ``shares`` is
    whether programs of other launches run on the same multiprocessors. ``overlaps`` is whether the
    launch begins as soon as the one before it lets it, before that has ended.
    """

    num_warps: int
    num_stages: int
    max_registers: int | None
    shares: bool
    overlaps: bool


_only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)


@contextmanager
def compile_only(num_ranks: int) -> Generator[None, None, None]:
    """Compile kernels in place of launching them, as many at a time as this rank has processors.

    It holds for this thread alone. All are compiled when it ends, or when the one around it ends;
    tensors are what they were.

    Args:
        num_ranks: that share the machine's processors and compile at the same time.

    Raises:
        Exception: one cannot be compiled; that of the compiler.
    """
    if only_compiles():
        yield
        return
    num_threads = max(1, (os.cpu_count() or 1) // num_ranks)
    with ThreadPoolExecutor(num_threads) as threads, triton.AsyncCompileMode(threads):
        token = _only_compiles.set(True)
        try:
            yield
        finally:
            _only_compiles.reset(token)


def only_compiles() -> bool:
    """Return whether ``compile_only`` holds."""
    return _only_compiles.get()


@final
class Launcher:
    """Launches one kernel, past Triton once its constants have been seen.

    The binder looks at every argument of every call to see which binary fits, for longer than a
    small kernel runs. Here constants and dtypes decide alone: the kernels say that they are not to
    be specialised on their ints, and pointers are multiples of 16 bytes (``aligned``).

    Args:
        kernel: a ``triton.jit`` function; its constants come last.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[object, ...], DirectLaunch] = {}

    def __call__(
        self,
        num_programs: int,
        args: tuple[object, ...],
        constants: tuple[object, ...],
        *,
        dtypes: tuple[torch.dtype, ...] = (),
        **options: Unpack[LaunchOptions],
    ) -> None:
        """Launch that many programs; the kernel takes ``args``, then ``constants``.

        Args:
            dtypes: of those tensors among ``args`` that may have one or another.
            options: see ``LaunchOptions``.
        """
        grid = (num_programs, 1, 1)
        if INTERPRETED:
            self.kernel[grid](*args, *constants)
            return
        device = torch.cuda.current_device()
        key = (device, num_programs, *options.values(), dtypes, constants)
        launch = self._compiled.get(key)
        if launch is not None:
            if not only_compiles():
                launch(current_stream(device), args)
                note_launch(launch, args)
            return
        limit = options.get("max_registers")
        compiled: dict[str, object] = {
            "num_warps": options.get("num_warps", 4),
            "num_stages": options.get("num_stages", 3),
            "launch_pdl": options.get("overlaps", False),
            **({} if limit is None else {"maxnreg": limit}),
        }
        if only_compiles():
            self.kernel.warmup(*args, *constants, grid=grid, **compiled)
            return
        binary = self.kernel[grid](*args, *constants, **compiled)
        launch = self._compiled[key] = DirectLaunch(binary, num_programs)
        note_launch(launch, args)
        if options.get("shares"):
            prefer_shared_memory(binary.function)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether kernels take a tensor as it is: contiguous, from a multiple of 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and tensor.is_contiguous()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if it is not contiguous or starts amid 16 bytes."""
    if is_aligned(tensor):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
