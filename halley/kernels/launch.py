"""Launch a kernel with little work on the host."""

import ctypes
from collections.abc import Callable
from typing import Any, TypedDict, Unpack, final

import torch
from triton.runtime import driver

from halley.kernels.switch import INTERPRETED


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


@final
class Launcher:
    """Launches one kernel, past Triton's binder once its constants have been seen.

    The binder looks at every argument of every call to see which binary fits, for longer than a
    small kernel runs. Here constants and dtypes decide alone: the kernels say that they are not to
    be specialised on their ints, and pointers are multiples of 16 bytes (``aligned``).

    Args:
        kernel: a ``triton.jit`` function; its constants come last.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._runners: dict[tuple[object, ...], Callable[..., None]] = {}

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
        run = self._runners.get(key)
        if run is not None:
            run(args, constants)
            return
        limit = options.get("max_registers")
        binary = self.kernel[grid](
            *args,
            *constants,
            num_warps=options.get("num_warps", 4),
            num_stages=options.get("num_stages", 3),
            launch_pdl=options.get("overlaps", False),
            **({} if limit is None else {"maxnreg": limit}),
        )
        self._runners[key] = _runner(binary, grid, device)
        if options.get("shares"):
            _prefer_shared_memory(binary.function)


def _runner(
    binary: Any, grid: tuple[int, int, int], device: int
) -> Callable[[tuple[object, ...], tuple[object, ...]], None]:
    """Return what launches a compiled kernel as Triton does, but for hooks and look-ups."""
    launch, function, metadata = binary.run, binary.function, binary.packed_metadata
    active: Any = driver.active
    stream_of = active.get_current_stream

    def run(args: tuple[object, ...], constants: tuple[object, ...]) -> None:
        # Addresses, since Triton asks the driver about every tensor it gets.
        plain = (arg.data_ptr() if type(arg) is torch.Tensor else arg for arg in args)
        stream = stream_of(device)
        launch(*grid, stream, function, metadata, None, None, None, *plain, *constants)

    return run


def _prefer_shared_memory(function: int) -> None:
    """Let a multiprocessor keep as much shared memory as it can while it runs a function.

    It has one division of its memory into cache and shared memory at a time, so that programs which
    want another wait until it is empty.
    """
    carveout = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
    library = ctypes.CDLL("libcuda.so.1")
    code = library.cuFuncSetAttribute(ctypes.c_void_p(function), carveout, 100)
    if code:
        raise RuntimeError(f"cuFuncSetAttribute failed with code {code}")


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if it is not contiguous or starts amid 16 bytes."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
