"""Launch compiled kernels by the CUDA driver itself, faster than Triton does.

A fused pass is five launches, some of whose programs wait for other ranks: what one host needs to
launch is time for all of them. Triton's launcher makes the descriptors of tensor memory anew for
every call and checks what cannot be wrong here.
"""

import ctypes
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, final

import torch


MAP_BYTES = 128  # of a CUtensorMap, which wants as large an alignment
_MOST_MAPS = 1024
_PDL_ATTRIBUTE = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
_ADDRESS = struct.Struct("=Q")
_FORMATS = {"i32": "i", "i64": "q"}  # no kernel has other scalars


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int64), ("value", ctypes.c_int32), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@dataclass(frozen=True)
class _Address:
    """What stands for a tensor of which only the address counts."""

    address: int

    def data_ptr(self) -> int:
        return self.address


@final
class DirectLaunch:
    """Launches one compiled kernel with a fixed number of programs.

    Args:
        binary: what Triton compiled and loaded.
        num_programs: of each launch.

    Attributes:
        overlaps: whether a launch may begin before the one before it has ended.

    Raises:
        RuntimeError: the kernel needs what only Triton's launcher gives it.
    """

    def __init__(self, binary: Any, num_programs: int) -> None:
        metadata = binary.metadata
        scratch = metadata.global_scratch_size, metadata.profile_scratch_size
        if any(scratch) or metadata.num_ctas != 1 or metadata.launch_cooperative_grid:
            raise RuntimeError(f"kernel {binary.name} needs scratch memory or clusters")
        self.name: str = binary.name
        self._binary = binary  # keeps the function loaded
        types = [each for each in binary.src.signature.values() if each != "constexpr"]
        layouts = iter(metadata.tensordesc_meta or ())
        self._descs = [next(layouts) if is_desc(each) else None for each in types]
        self._maps: dict[tuple[int, ...], bytes] = {}
        self.packer, self.offsets = lay_out(types)
        self.function = ctypes.c_void_p(binary.function)
        self.overlaps = bool(metadata.launch_pdl)
        self._attribute = _Attribute(id=_PDL_ATTRIBUTE, value=1)
        self._config: dict[str, Any] = {
            "grid": (num_programs, 1, 1),
            "block": (32 * metadata.num_warps, 1, 1),
            "shared_bytes": metadata.shared,
            "attributes": ctypes.pointer(self._attribute),
            "num_attributes": int(self.overlaps),
        }
        self._prepared = Prepared(self)
        self._lock = threading.Lock()  # passes of several threads share its parameters

    def __call__(self, stream: int, args: tuple[object, ...]) -> None:
        """Launch on a stream.

        Args:
            args: tensors, ints, and descriptors of contiguous tensors, in the kernel's order.

        Raises:
            RuntimeError: the driver refuses.
        """
        values = [value for index, arg in enumerate(args) for value in self.flatten(index, arg)]
        with self._lock:
            self._prepared.fill(values)
            self._prepared(stream)

    def flatten(self, index: int, arg: object) -> tuple[Any, ...]:
        """Return what the kernel gets for its argument of that index.

        The int, the tensor's address, or the descriptor's map, shape and strides.
        """
        if type(arg) is int:
            return (arg,)
        if isinstance(arg, torch.Tensor):
            return (arg.data_ptr(),)
        desc: Any = arg
        return (self.map_at(index, desc, desc.base.data_ptr()), *desc.shape, *desc.strides)

    def map_at(self, index: int, desc: Any, address: int) -> bytes:
        """Return the map of tensor memory for a descriptor if its tensor began at an address."""
        key = (index, address, *desc.shape)
        found = self._maps.get(key)
        if found is None:
            from triton.backends.nvidia.driver import make_tensordesc_arg

            moved = object.__new__(type(desc))
            moved.__dict__.update(desc.__dict__, base=_Address(address))
            made = make_tensordesc_arg(moved, self._descs[index])[0]
            if len(self._maps) == _MOST_MAPS:
                self._maps.clear()
            end = id(made) + type(made).__basicsize__  # it ends with the map
            found = self._maps[key] = ctypes.string_at(end - MAP_BYTES, MAP_BYTES)
        return found

    def config(self) -> _Config:
        """Return how it is launched, for one stream at a time."""
        return _Config(**self._config)


@final
class Prepared:
    """A launch with parameters of its own in memory, which stay until they are changed."""

    def __init__(self, launch: DirectLaunch) -> None:
        self._launch = launch  # keeps the function loaded
        self._buffer = ctypes.create_string_buffer(launch.packer.size + MAP_BYTES)
        self._start = -ctypes.addressof(self._buffer) % MAP_BYTES
        begin = ctypes.addressof(self._buffer) + self._start
        offsets = launch.offsets
        self._params = (ctypes.c_void_p * len(offsets))(*(begin + at for at in offsets))
        self._config = launch.config()
        by_config = ctypes.byref(self._config)
        self._call = partial(
            _driver().cuLaunchKernelEx, by_config, launch.function, self._params, None
        )

    def fill(self, values: Sequence[Any]) -> None:
        """Set all parameters, as ``flatten`` returned them."""
        self._launch.packer.pack_into(self._buffer, self._start, *values, 0, 0)

    def set_address(self, place: int, address: int) -> None:
        """Set the parameter of that place among all to an address."""
        _ADDRESS.pack_into(self._buffer, self._start + self._launch.offsets[place], address)

    def set_map(self, place: int, made: bytes) -> None:
        """Set the parameter of that place among all to a map of tensor memory."""
        begin = self._start + self._launch.offsets[place]
        self._buffer[begin : begin + MAP_BYTES] = made

    def __call__(self, stream: int) -> None:
        """Launch on a stream.

        Raises:
            RuntimeError: the driver refuses.
        """
        self._config.stream = stream
        code = self._call()
        if code:
            raise RuntimeError(f"launch of {self._launch.name} failed with CUDA error {code}")


def current_stream(device: int) -> int:
    """Return the handle of the current stream; torch's own object takes 2 us to make."""
    return torch._C._cuda_getCurrentRawStream(device)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportAttributeAccessIssue]


def prefer_shared_memory(function: int) -> None:
    """Let a multiprocessor keep as much shared memory as it can while it runs a function.

    It has one division of its memory into cache and shared memory at a time, so that programs which
    want another wait until it is empty.
    """
    code = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT, 100)
    if code:
        raise RuntimeError(f"cuFuncSetAttribute failed with code {code}")


def is_desc(type_name: str) -> bool:
    """Return whether a parameter of that type is a descriptor."""
    return type_name.startswith("tensordesc")


def lay_out(types: list[str]) -> tuple[struct.Struct, list[int]]:
    """Return how a kernel's parameters lie in a buffer, and where each of them starts.

    A descriptor is a map, then shape and strides; two addresses of scratch memory end the list.
    """
    form, offsets, end = "=", [], 0

    def add(code: str, alignment: int) -> None:
        nonlocal form, end
        padding = -end % alignment
        form += f"{padding}x{code}"
        offsets.append(end + padding)
        end += padding + struct.calcsize(f"={code}")

    for name in types:
        if is_desc(name):
            num_dims = name.count(",") + 1
            add(f"{MAP_BYTES}s", MAP_BYTES)
            for code in "i" * num_dims + "q" * num_dims:
                add(code, struct.calcsize(code))
        else:
            add("Q" if name.startswith("*") else _FORMATS[name], 8)
    for _ in range(2):
        add("Q", 8)
    return struct.Struct(form), offsets


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
