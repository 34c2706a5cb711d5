"""Sizes of traced tensors, those guessed that only a run would tell."""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, cast, final

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv, compute_unbacked_bindings


@final
class Sizes:
    """Tells shapes and bytes of what nodes return.

    Args:
        unknown: taken for a size that depends on data, on all ranks alike. A sum of such sizes is
            one size.
    """

    def __init__(self, unknown: int) -> None:
        self._unknown = unknown
        self._parts: dict[str, tuple[object, int]] = {}

    def note_part(self, size: torch.SymInt, part: object, *, num_parts: int) -> None:
        """Remember that a size that depends on data is one of a part of a batch.

        Args:
            size: of the part.
            part: which; sums of sizes of one part are of that part.
            num_parts: of the batch.
        """
        for symbol in _symbols(size):
            self._parts[symbol] = part, num_parts

    def number(self, size: int | torch.SymInt) -> int:
        """Return a size."""
        if isinstance(size, int):
            return size
        if not _is_unknown(size):
            return cast(int, cast(Any, size).node.hint)
        parts = {self._parts.get(symbol) for symbol in _symbols(size)}
        part = parts.pop() if len(parts) == 1 else None
        return self._unknown if part is None else max(1, self._unknown // part[1])

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Of two sizes that depend on data the first is that of rows. The second, of what fused
        kernels keep for each tile of a row, is small.
        """
        shape = cast(Sequence[int | torch.SymInt], tensor.shape)
        unknown = [at for at, size in enumerate(shape) if _is_unknown(size)]
        return tuple(1 if at in unknown[1:] else self.number(size) for at, size in enumerate(shape))

    def num_bytes(self, value: object) -> int:
        """Return the bytes of what a node returns: a tensor, several, or none."""
        if isinstance(value, torch.Tensor):
            count = value.element_size()
            for size in self.shape(value):
                count *= size
            return count
        if isinstance(value, tuple | list):
            return sum(map(self.num_bytes, cast(Sequence[object], value)))
        return 0


def _is_unknown(size: int | torch.SymInt) -> bool:
    """Return whether a size depends on data: tracing has no example of it."""
    if isinstance(size, int):
        return False
    return not isinstance(getattr(cast(object, getattr(size, "node", None)), "hint", None), int)


def _symbols(size: torch.SymInt) -> list[str]:
    expression = cast(Any, size.node).expr
    return [str(symbol) for symbol in expression.free_symbols]


_BINDINGS = "unbacked_bindings"  # where Inductor looks for the sizes that a node makes


def without_values() -> FakeTensorMode:
    """Return a mode in which new tensors have no values, and sizes may depend on such values."""
    return FakeTensorMode(shape_env=ShapeEnv())


@contextlib.contextmanager
def with_values() -> Generator[None, None, None]:
    """Let operators run, and new tensors have values, where a compiler traces without."""
    with unset_fake_temporarily(), torch.no_grad():
        yield


def trace_result(node: fx.Node) -> None:
    """Set what a node returns, from what those that it reads were traced to return.

    A size that depends on data is a new one; sizes are not negative.
    """
    args = cast(tuple[Any, ...], fx.map_arg(node.args, _value))
    kwargs = cast(dict[str, Any], fx.map_arg(node.kwargs, _value))
    assert callable(node.target)
    mode = detect_fake_mode([source.meta.get("val") for source in node.all_input_nodes])
    node.meta.pop(_BINDINGS, None)
    with torch.no_grad(), mode or contextlib.nullcontext():
        result = node.target(*args, **kwargs)
        if isinstance(result, torch.SymInt):
            torch._check(result >= 0)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    node.meta["val"] = result
    shape_env = None if mode is None else mode.shape_env
    if bindings := compute_unbacked_bindings(shape_env, result):
        node.meta[_BINDINGS] = bindings


def _value(node: fx.Node) -> Any:
    if node.op != "get_attr":
        return node.meta["val"]
    module = node.graph.owning_module
    assert module is not None
    return getattr(module, str(node.target))
