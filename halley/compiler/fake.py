"""What a node returns, without values: for nodes that a pass adds to a graph."""

import contextlib
from typing import Any, cast

import torch
from torch import fx
from torch._guards import detect_fake_mode


def fake_result(node: fx.Node) -> Any:
    """Return the result of a node on the results of those that it reads, as they were traced.

    A size that depends on data is a new one; sizes are not negative.
    """

    def value(source: fx.Node) -> Any:
        return source.meta["val"] if "val" in source.meta else _attribute(source)

    args = cast(tuple[Any, ...], fx.map_arg(node.args, value))
    kwargs = cast(dict[str, Any], fx.map_arg(node.kwargs, value))
    assert callable(node.target)
    mode = detect_fake_mode([source.meta.get("val") for source in node.all_input_nodes])
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if mode is not None:
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        result = node.target(*args, **kwargs)
        if isinstance(result, torch.SymInt):
            torch._check(result >= 0)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
        return result


def _attribute(node: fx.Node) -> Any:
    module = node.graph.owning_module
    assert module is not None
    return getattr(module, str(node.target))
