"""Tensors without values: what nodes return that a pass adds to a graph, whole models to plan."""

import contextlib
from collections.abc import Generator
from typing import Any, cast

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv, compute_unbacked_bindings


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
