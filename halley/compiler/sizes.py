"""Shapes and bytes of traced results, with an assumed value for sizes that depend on data."""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, cast, final

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv, compute_unbacked_bindings


_BINDINGS = (
    "unbacked_bindings"  # key in ``node.meta``: Inductor reads the new symbols of a node here
)


def result_of(node: fx.Node) -> object:
    """Return the traced result of a node: tensors without values, a number, or None."""
    return node.meta.get("val")


@final
class Sizes:
    """Shapes and bytes of results, where some sizes are known only when the graph runs.

    Args:
        unknown: value to assume for a size that depends on data, the same on all ranks. A sum of
            such sizes has this value too.
    """

    def __init__(self, unknown: int) -> None:
        self._unknown = unknown
        self._parts: dict[str, tuple[object, int]] = {}

    def note_part(self, size: torch.SymInt, part: object, *, num_parts: int) -> None:
        """Record that a size that depends on data belongs to one microbatch.

        Args:
            size: assumed to be ``unknown // num_parts``, like sums of sizes of one microbatch.
            part: identifies the microbatch.
            num_parts: number of microbatches.
        """
        for symbol in _symbols(size):
            self._parts[symbol] = part, num_parts

    def number(self, size: int | torch.SymInt) -> int:
        """Return a size as an integer, assumed if it depends on data."""
        if isinstance(size, int):
            return size
        if not _is_unknown(size):
            return cast(int, cast(Any, size).node.hint)  # the size in the traced example
        # A size is a sum of symbols, for instance of the rows from all ranks.
        parts = {self._parts.get(symbol) for symbol in _symbols(size)}
        part = parts.pop() if len(parts) == 1 else None
        return self._unknown if part is None else max(1, self._unknown // part[1])

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of a tensor.

        The first size that depends on data is a number of rows. A second one is assumed to be 1: in
        results of fused layers it counts the few tiles of a row.
        """
        shape = cast(Sequence[int | torch.SymInt], tensor.shape)
        unknown = [at for at, size in enumerate(shape) if _is_unknown(size)]
        return tuple(1 if at in unknown[1:] else self.number(size) for at, size in enumerate(shape))

    def num_bytes(self, result: object) -> int:
        """Return the bytes of a result: of a tensor, or of all tensors of a tuple; else 0."""
        if isinstance(result, torch.Tensor):
            count = result.element_size()
            for size in self.shape(result):
                count *= size
            return count
        if isinstance(result, tuple | list):
            return sum(map(self.num_bytes, cast(Sequence[object], result)))
        return 0


def _is_unknown(size: int | torch.SymInt) -> bool:
    """Return whether a size depends on data, so that tracing has no example of it."""
    if isinstance(size, int):
        return False
    return not isinstance(getattr(cast(object, getattr(size, "node", None)), "hint", None), int)


def _symbols(size: torch.SymInt) -> list[str]:
    return [str(symbol) for symbol in cast(Any, size.node).expr.free_symbols]


def without_values() -> FakeTensorMode:
    """Return a mode that creates tensors without values, whose sizes may depend on data."""
    return FakeTensorMode(shape_env=ShapeEnv())


@contextlib.contextmanager
def with_values() -> Generator[None, None, None]:
    """Run operators on real tensors, although a compiler traces without values around it."""
    with unset_fake_temporarily(), torch.no_grad():
        yield


def trace_result(node: fx.Node) -> None:
    """Trace the operator of a node on the results of its inputs, and set ``node.meta["val"]``.

    A result size that depends on data gets a new symbol, which is not negative.
    """
    args = cast(tuple[Any, ...], fx.map_arg(node.args, _operand))
    kwargs = cast(dict[str, Any], fx.map_arg(node.kwargs, _operand))
    assert callable(node.target)
    mode = detect_fake_mode([result_of(source) for source in node.all_input_nodes])
    node.meta.pop(_BINDINGS, None)
    with torch.no_grad(), mode or contextlib.nullcontext():
        result = node.target(*args, **kwargs)
        if isinstance(result, torch.SymInt):
            # Without this, later operators refuse the symbol as a size of a tensor.
            torch._check(result >= 0)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    node.meta["val"] = result
    shape_env = None if mode is None else mode.shape_env
    if bindings := compute_unbacked_bindings(shape_env, result):
        node.meta[_BINDINGS] = bindings


def _operand(node: fx.Node) -> Any:
    if node.op != "get_attr":
        return node.meta["val"]
    module = node.graph.owning_module
    assert module is not None
    return getattr(module, str(node.target))
