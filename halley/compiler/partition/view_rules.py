"""Rules of operators that change the shape of a tensor, copy it, or concatenate tensors."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias, cast

import torch
from torch import fx

from halley.compiler.partition.propagation import (
    Batch,
    Call,
    Counts,
    Division,
    Last,
    Refusal,
    Rows,
    Rule,
)


def shape_of(value: object) -> tuple[Any, ...]:
    """Return the shape of a node's tensor; () if the value is not a tensor."""
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return tuple(found.shape) if isinstance(found, torch.Tensor) else ()


def moved(axis: Batch | Rows, dim: int) -> Batch | Rows:
    """Return the axis at another dimension."""
    return Batch(dim, axis.unit) if isinstance(axis, Batch) else Rows(dim, axis.layout)


def positive_dim(dim: int, num_dims: int) -> int:
    """Return a dimension counted from the front."""
    return dim % num_dims if num_dims else 0


# A view rule gets the call with the axis and the shape of its first argument.
_ViewRule: TypeAlias = Callable[[Call, Batch | Rows, tuple[Any, ...]], Division | Refusal]


def _view_rule(rule: _ViewRule) -> Rule:
    """Return a rule for calls whose first argument has a batch dimension.

    A view of counts stays counts: the sum of views is the view of the sum.
    """

    def apply(call: Call) -> Division | Refusal:
        source = call.node.args[0]
        axis = call.axis(source)
        if isinstance(axis, Counts | Last):
            return Division(result=axis)
        if not isinstance(axis, Batch | Rows):
            return call.refused("changes the shape of row indices")
        return rule(call, axis, shape_of(source))

    return apply


def _view(call: Call, axis: Batch | Rows, shape: tuple[Any, ...]) -> Division | Refusal:
    """Allow a view in which the batch is outermost in a group of merged or split dimensions."""
    result = shape_of(call.node)
    outer = prod(shape[: axis.dim])
    for dim, size in enumerate(result):
        if not all(isinstance(each, int) for each in result[:dim]):
            break
        # The batch starts a dimension of the result if the dimensions before it hold as much.
        if prod(result[:dim]) != outer:
            continue
        if isinstance(axis, Rows):
            if str(size) == str(shape[axis.dim]):
                return Division(result=Rows(dim, axis.layout))
        elif isinstance(size, int) and size % (batch_size := shape[axis.dim] // axis.unit) == 0:
            return Division(result=Batch(dim, size // batch_size), sizes=1)
    return call.refused("merges the batch behind another dimension")


def _permute(call: Call, axis: Batch | Rows, shape: tuple[Any, ...]) -> Division:
    dims = [positive_dim(dim, len(shape)) for dim in call.get("dims")]
    return Division(result=moved(axis, dims.index(axis.dim)))


def _transpose(call: Call, axis: Batch | Rows, shape: tuple[Any, ...]) -> Division:
    first, second = (positive_dim(call.get(name), len(shape)) for name in ("dim0", "dim1"))
    swapped = {first: second, second: first}
    return Division(result=moved(axis, swapped.get(axis.dim, axis.dim)))


def _t(call: Call, axis: Batch | Rows, shape: tuple[Any, ...]) -> Division:
    return Division(result=moved(axis, len(shape) - 1 - axis.dim))


def _unsqueeze(call: Call, axis: Batch | Rows, shape: tuple[Any, ...]) -> Division:
    dim = positive_dim(call.get("dim"), len(shape) + 1)
    return Division(result=moved(axis, axis.dim + (dim <= axis.dim)))


def _squeeze(call: Call, axis: Batch | Rows, shape: tuple[Any, ...]) -> Division | Refusal:
    if not call.takes("dim"):
        return call.refused("would also squeeze the batch of a microbatch of one sample")
    given: int | Sequence[int] = call.get("dim")
    listed = [given] if isinstance(given, int) else given
    dims = {positive_dim(dim, len(shape)) for dim in listed}
    if axis.dim in dims:
        return call.refused("squeezes the batch")
    return Division(result=moved(axis, axis.dim - sum(dim < axis.dim for dim in dims)))


def _expand(call: Call, axis: Batch | Rows, shape: tuple[Any, ...]) -> Division:
    dim = axis.dim + len(shape_of(call.node)) - len(shape)
    return Division(result=moved(axis, dim), sizes=1 if isinstance(axis, Batch) else None)


def _index_dim(call: Call, axis: Batch | Rows, shape: tuple[Any, ...]) -> Division | Refusal:
    """Divide results that have one dimension less, as of select and unbind."""
    dim = positive_dim(call.get("dim"), len(shape))
    if dim == axis.dim:
        return call.refused("takes single elements of the batch")
    return Division(result=moved(axis, axis.dim - (dim < axis.dim)))


def _slice(call: Call, axis: Batch | Rows, shape: tuple[Any, ...]) -> Division | Refusal:
    if positive_dim(call.get("dim"), len(shape)) != axis.dim:
        return Division(result=axis)
    start, end, size = call.get("start"), call.get("end"), shape[axis.dim]
    is_full = start in (None, 0) and (end is None or (isinstance(size, int) and end >= size))
    return Division(result=axis) if is_full else call.refused("slices the batch")


def _split(call: Call, axis: Batch | Rows, shape: tuple[Any, ...]) -> Division | Refusal:
    if positive_dim(call.get("dim"), len(shape)) == axis.dim:
        return call.refused("splits the batch")
    return Division(result=axis)


def _concat(call: Call, *, is_stack: bool) -> Division | Refusal:
    tensors = cast(Sequence[fx.Node], call.node.args[0])
    axes = [call.axis(tensor) for tensor in tensors]
    axis = next((found for found in axes if found is not None), None)
    if not isinstance(axis, Batch | Rows) or any(each not in (None, axis) for each in axes):
        return call.refused("concatenates values with different batch dimensions")
    dim = positive_dim(call.get("dim"), len(shape_of(call.node)))
    if dim == axis.dim and not is_stack:
        return call.refused("concatenates along the batch")
    full = [tensor for tensor, found in zip(tensors, axes, strict=True) if found is None]
    if full and isinstance(axis, Rows):
        return call.refused("concatenates sorted rows with a tensor that is not sorted like them")
    result = moved(axis, axis.dim + (is_stack and dim <= axis.dim))
    return Division(result=result, splits={n: axis for n in full if isinstance(axis, Batch)})


def _copy(call: Call) -> Division | Refusal:
    return Division(result=call.axis(call.node.args[0]))


_VIEWS: dict[str, _ViewRule] = {
    "view": _view,
    "reshape": _view,
    "_unsafe_view": _view,
    "permute": _permute,
    "transpose": _transpose,
    "t": _t,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "select": _index_dim,
    "slice": _slice,
    "split": _split,
    "split_with_sizes": _split,
    "unbind": _index_dim,
}
_COPIES = (
    "aten::clone", "aten::detach", "aten::alias", "aten::_to_copy", "prims::convert_element_type",
    "prims::device_put",  # Inductor's form of a copy to the host, as of counts
)  # fmt: skip

VIEW_RULES: dict[str, Rule] = {
    **{f"aten::{name}": _view_rule(rule) for name, rule in _VIEWS.items()},
    **dict.fromkeys(_COPIES, _copy),
    "aten::cat": lambda call: _concat(call, is_stack=False),
    "aten::stack": lambda call: _concat(call, is_stack=True),
}
