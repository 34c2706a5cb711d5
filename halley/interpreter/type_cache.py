"""Cache of types in the interpreter, which otherwise take most of a kernel's time.

Triton computes type, shape and name for the result of each operation, and builds a table of numpy
dtypes for each look-up.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


_Init = Callable[..., None]

# Values of these types contain no tl.constexpr.
_PLAIN = frozenset({int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.block_type})


def install() -> None:
    """Replace the functions that compute types."""
    language: Any = core  # private names of Triton
    runtime: Any = interpreter
    language._unwrap_if_constexpr = _make_unwrap(language._unwrap_if_constexpr)
    runtime._get_np_dtype = _make_np_dtype(runtime._get_np_dtype)
    methods: list[tuple[type, Callable[[_Init], _Init]]] = [
        (tl.block_type, _make_init_of_block),
        (tl.tensor, _make_init_of_tensor),
    ]
    for owner, make in methods:
        setattr(owner, "__init__", make(owner.__init__))  # noqa: B010


def _make_unwrap(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind is tl.constexpr:
            return value.value
        return value if kind in _PLAIN else original(value)

    return unwrap


def _make_np_dtype(original: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    known: dict[str, np.dtype[Any]] = {}

    def np_dtype(dtype: Any) -> np.dtype[Any]:
        scalar = dtype.scalar
        found = known.get(scalar.name)
        if found is None:
            found = known[scalar.name] = original(scalar)
        return found

    return np_dtype


def _make_init_of_block(original: _Init) -> _Init:
    known: dict[tuple[str, tuple[int, ...]], tuple[Any, ...]] = {}

    def init(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        sizes = tuple(size.value if type(size) is tl.constexpr else size for size in shape)
        key = element_ty.name, sizes
        if key not in known:
            original(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    return init


def _make_init_of_tensor(original: _Init) -> _Init:
    known: dict[str, tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            original(self, handle, type)
            known[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[type.name]

    return init
