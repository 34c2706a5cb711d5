"""Launch compiled Triton kernels through the CUDA driver, with little work on the host.

A fused pass has about five launches, and some of their CTAs wait for other ranks. So a slow host
delays all ranks. Triton's own launcher encodes all TMA descriptors in every call, and checks
arguments that Halley has checked before.
"""

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, TypeAlias, TypedDict, Unpack, final

import torch
import triton

from halley.interpreter import INTERPRETED


# Raised by a kernel's first launch if it needs more shared memory or threads than an SM has.
OutOfResources = triton.OutOfResources

MAP_BYTES = 128  # size of a CUtensorMap, and its alignment in the parameter buffer
_MAX_MAPS = 1024
_PDL_ATTRIBUTE = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
_ADDRESS = struct.Struct("=Q")
_FORMATS = {"i32": "i", "i64": "q"}  # codes of ``struct``; kernels use no other scalar types
_DESC = "tensordesc"  # prefix of Triton's type names of tensor descriptors


class LaunchOptions(TypedDict, total=False):
    """Options of one kernel launch, all optional; see ``Launcher.__call__``."""

    num_warps: int
    num_stages: int
    max_registers: int | None  # limit for each thread; None for the compiler's choice
    shares: bool  # CTAs of other launches may run on the same SMs at the same time
    overlaps: bool  # programmatic dependent launch: may begin before the previous launch has ended


class _Attribute(ctypes.Structure):
    """The C struct CUlaunchAttribute of the CUDA driver."""

    _fields_ = (("id", ctypes.c_int64), ("value", ctypes.c_int32), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """The C struct CUlaunchConfig of the CUDA driver."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@final
class DirectLaunch:
    """Launches a kernel that Triton has compiled and loaded, with a fixed number of CTAs.

    A kernel with scratch memory or clusters is an error: only Triton's launcher supports them.
    """

    def __init__(self, binary: Any, num_programs: int) -> None:
        metadata = binary.metadata
        scratch = metadata.global_scratch_size, metadata.profile_scratch_size
        if any(scratch) or metadata.num_ctas != 1 or metadata.launch_cooperative_grid:
            raise RuntimeError(f"kernel {binary.name} needs scratch memory or clusters")
        self.name: str = binary.name
        self._binary = binary  # this reference keeps the kernel loaded
        types = [each for each in binary.src.signature.values() if each != "constexpr"]
        layouts = iter(metadata.tensordesc_meta or ())
        self._descs = [next(layouts) if each.startswith(_DESC) else None for each in types]
        self._maps: dict[tuple[int, ...], bytes] = {}
        self.packer, self.offsets = lay_out(types)
        self.function = ctypes.c_void_p(binary.function)
        self.overlaps = bool(metadata.launch_pdl)
        self._attribute = _Attribute(id=_PDL_ATTRIBUTE, value=1)
        self.config: dict[str, Any] = {
            "grid": (num_programs, 1, 1),
            "block": (32 * metadata.num_warps, 1, 1),
            "shared_bytes": metadata.shared,
            "attributes": ctypes.pointer(self._attribute),
            "num_attributes": int(self.overlaps),
        }
        self._prepared = PreparedLaunch(self)
        self._lock = threading.Lock()  # threads share the parameters of ``_prepared``

    def __call__(self, stream: int, args: tuple[object, ...]) -> None:
        """Launch the kernel on a stream; ``args`` are tensors, ints and tensor descriptors."""
        values = [value for index, arg in enumerate(args) for value in self.flatten(index, arg)]
        with self._lock:
            self._prepared.fill(values)
            self._prepared(stream)

    def flatten(self, index: int, arg: object) -> tuple[Any, ...]:
        """Return the driver's launch parameters for ``arg``, argument ``index`` of the kernel."""
        if type(arg) is int:
            return (arg,)
        if isinstance(arg, torch.Tensor):
            return (arg.data_ptr(),)
        desc: Any = arg
        return (self.map_at(index, desc, desc.base.data_ptr()), *desc.shape, *desc.strides)

    def map_at(self, index: int, desc: Any, address: int) -> bytes:
        """Return the TMA map (CUtensorMap) of a descriptor, for a tensor that is at ``address``."""
        key = (index, address, *desc.shape)
        found = self._maps.get(key)
        if found is None:
            from triton.backends.nvidia.driver import make_tensordesc_arg

            moved = object.__new__(type(desc))
            # Triton reads only ``base.data_ptr()``: an object that returns ``address`` is enough.
            moved.__dict__.update(desc.__dict__, base=SimpleNamespace(data_ptr=lambda: address))
            made = make_tensordesc_arg(moved, self._descs[index])[0]
            if len(self._maps) == _MAX_MAPS:
                self._maps.clear()
            # Triton's C object exposes no bytes: read the memory of its last field, the TMA map.
            end = id(made) + type(made).__basicsize__
            found = self._maps[key] = ctypes.string_at(end - MAP_BYTES, MAP_BYTES)
        return found


@final
class PreparedLaunch:
    """A kernel launch with its own parameter buffer; ``fused/replay.py`` repeats such launches."""

    def __init__(self, launch: DirectLaunch) -> None:
        self._launch = launch  # this reference keeps the kernel loaded
        self._buffer = ctypes.create_string_buffer(launch.packer.size + MAP_BYTES)
        self._start = -ctypes.addressof(self._buffer) % MAP_BYTES
        begin = ctypes.addressof(self._buffer) + self._start
        offsets = launch.offsets
        self._params = (ctypes.c_void_p * len(offsets))(*(begin + at for at in offsets))
        self._config = _Config(**launch.config)  # holds the stream of one launch at a time
        by_config = ctypes.byref(self._config)
        self._call = partial(
            _driver().cuLaunchKernelEx, by_config, launch.function, self._params, None
        )

    def fill(self, values: Sequence[Any]) -> None:
        """Set all launch parameters to values from ``DirectLaunch.flatten``."""
        self._launch.packer.pack_into(self._buffer, self._start, *values, 0, 0)

    def set_address(self, place: int, address: int) -> None:
        """Set launch parameter number ``place`` to an address."""
        _ADDRESS.pack_into(self._buffer, self._start + self._launch.offsets[place], address)

    def set_map(self, place: int, made: bytes) -> None:
        begin = self._start + self._launch.offsets[place]
        self._buffer[begin : begin + MAP_BYTES] = made

    def __call__(self, stream: int) -> None:
        """Launch the kernel on a stream; an error of the driver is a RuntimeError."""
        self._config.stream = stream
        code = self._call()
        if code:
            raise RuntimeError(f"launch of {self._launch.name} failed with CUDA error {code}")


_recording = threading.local()  # ``steps``: recorded launches and host calls, or None


def set_recording(steps: list[Any] | None) -> None:
    """Record this thread's next launches and host calls in ``steps``; None stops recording."""
    _recording.steps = steps


def note_step(step: Any) -> None:
    """Append a kernel launch or host call to this thread's recording, if there is one."""
    steps = getattr(_recording, "steps", None)
    if steps is not None:
        steps.append(step)


def note_call(call: Callable[[], None]) -> None:
    """Call a host function now, and record it so that every replay of the pass calls it again."""
    note_step(call)
    call()


_only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)


@contextmanager
def compile_only(num_ranks: int) -> Generator[None, None, None]:
    """In this thread's ``with`` block, compile kernels in parallel instead of launching them.

    All kernels are compiled when the outermost context ends, or it raises the compiler's error.
    ``num_ranks`` processes share the CPU cores and compile at the same time.
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
    return _only_compiles.get()


_Launch: TypeAlias = tuple[Any, tuple[int, ...], tuple[object, ...]]  # kernel, grid, arguments
# Launches to run when a ``side_by_side`` block ends; None where launches run immediately.
_pending: ContextVar[list[_Launch] | None] = ContextVar("pending", default=None)


@contextmanager
def side_by_side(fused: bool) -> Generator[None, None, None]:
    """In the interpreter, run the block's launches concurrently if ``fused``, else in order.

    Compiled launches need no block: ``LaunchOptions`` says which ones overlap.
    """
    pending: list[_Launch] | None = [] if INTERPRETED and fused else None
    token = _pending.set(pending)
    try:
        yield
    finally:
        _pending.reset(token)
    if pending:
        (kernel, grid, args), *others = pending
        kernel[grid](*args, beside=others)


@final
class Launcher:
    """Launches one kernel; bypasses Triton if an earlier launch had the same settings.

    Triton inspects every argument of every call to select a binary, which takes longer than a small
    kernel runs. Here the settings are device, number of CTAs, options, dtypes and constants. So
    kernels declare their ints as ``do_not_specialize``, and all pointers are multiples of 16 bytes
    (``aligned``). The constants of ``kernel``, a ``triton.jit`` function, come last.
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
        """Launch the kernel with ``num_programs`` CTAs, or just compile it inside ``compile_only``.

        ``constants`` are its ``tl.constexpr`` parameters. ``dtypes`` are the dtypes of the tensors
        in ``args`` whose dtype may vary between calls.
        """
        grid = (num_programs, 1, 1)
        if INTERPRETED:
            pending = _pending.get()
            if pending is None:
                self.kernel[grid](*args, *constants)
            else:
                pending.append((self.kernel, grid, (*args, *constants)))
            return
        device = torch.cuda.current_device()
        key = (device, num_programs, *options.values(), dtypes, constants)
        launch = self._compiled.get(key)
        if launch is not None:
            if not only_compiles():
                launch(current_stream(device), args)
                note_step((launch, args))
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
        note_step((launch, args))
        if options.get("shares"):
            _prefer_shared_memory(binary.function)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether kernels accept a tensor: contiguous, with an address divisible by 16."""
    return tensor.data_ptr() % 16 == 0 and tensor.is_contiguous()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or an aligned contiguous copy if kernels do not accept it."""
    if is_aligned(tensor):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def current_stream(device: int) -> int:
    """Return the current stream's handle without making torch's ``Stream``, which takes 2 us."""
    return torch._C._cuda_getCurrentRawStream(device)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportAttributeAccessIssue]


def lay_out(types: list[str]) -> tuple[struct.Struct, list[int]]:
    """Return the packed format of a kernel's launch parameters, and the byte offset of each.

    A descriptor becomes a TMA map, a shape and strides. Two addresses of scratch memory end the
    list, as in every kernel that Triton compiles.
    """
    form, offsets, end = "=", [], 0

    def add(code: str, alignment: int) -> None:
        nonlocal form, end
        padding = -end % alignment
        form += f"{padding}x{code}"
        offsets.append(end + padding)
        end += padding + struct.calcsize(f"={code}")

    for name in types:
        if name.startswith(_DESC):
            num_dims = name.count(",") + 1
            add(f"{MAP_BYTES}s", MAP_BYTES)
            for code in "i" * num_dims + "q" * num_dims:
                add(code, struct.calcsize(code))
        else:
            add("Q" if name.startswith("*") else _FORMATS[name], 8)
    for _ in range(2):
        add("Q", 8)
    return struct.Struct(form), offsets


def _prefer_shared_memory(function: int) -> None:
    """Request the largest part of an SM's L1 memory as shared memory for a kernel.

    A CTA waits until an SM with another split is empty. So kernels that run side by side must
    request the same split.
    """
    code = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT, 100)
    if code:
        raise RuntimeError(f"cuFuncSetAttribute failed with code {code}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
