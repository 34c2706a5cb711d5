"""Rules of operators that name the same elements by other dimensions, or put them together."""

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from torch import fx

from halley.compiler.partition.axes import Batch, Call, Counts, Division, Last, Refusal, Rows, Rule


def shape_of(value: object) -> tuple[Any, ...]:
    """Return the shape of a node's tensor; () for what is none."""
    found = value.meta.get("val") if isinstance(value, fx.Node) else None
    return tuple(found.shape) if isinstance(found, torch.Tensor) else ()


def moved(axis: Batch | Rows, dim: int) -> Batch | Rows:
    """Return the axis at another dimension."""
    return Batch(dim, axis.unit) if isinstance(axis, Batch) else Rows(dim, axis.layout)


def place(dim: int, num_dims: int) -> int:
    """Return a dimension counted from the front."""
    return dim % num_dims if num_dims else 0


def _linear(rule: Rule) -> Rule:
    """Return the rule, before which counts stay counts: sums of them are what they name of sums."""

    def judge(call: Call) -> Division | Refusal:
        axis = call.axis(call.node.args[0])
        if isinstance(axis, Counts | Last):
            return Division(result=axis)
        return rule(call) if isinstance(axis, Batch | Rows) else call.refused("names rows")

    return judge


def _of(call: Call) -> tuple[Batch | Rows, tuple[Any, ...]]:
    """Return axis and shape of the first argument."""
    source = call.node.args[0]
    axis = call.axis(source)
    assert isinstance(axis, Batch | Rows)
    return axis, shape_of(source)


def _view(call: Call) -> Division | Refusal:
    """Allow the batch as the first of the dimensions that are merged, or that one is split into."""
    axis, shape = _of(call)
    result = shape_of(call.node)
    outer = prod(shape[: axis.dim])
    for dim, size in enumerate(result):
        if not all(isinstance(each, int) for each in result[:dim]):
            break
        if prod(result[:dim]) != outer:
            continue
        if isinstance(axis, Rows):
            if str(size) == str(shape[axis.dim]):
                return Division(result=Rows(dim, axis.layout))
        elif isinstance(size, int) and size % (batch_size := shape[axis.dim] // axis.unit) == 0:
            return Division(result=Batch(dim, size // batch_size), sizes=1)
    return call.refused("puts the batch behind another dimension of the same one")


def _permute(call: Call) -> Division | Refusal:
    axis, shape = _of(call)
    dims = [place(dim, len(shape)) for dim in call.get("dims")]
    return Division(result=moved(axis, dims.index(axis.dim)))


def _transpose(call: Call) -> Division | Refusal:
    axis, shape = _of(call)
    first, second = (place(call.get(name), len(shape)) for name in ("dim0", "dim1"))
    swapped = {first: second, second: first}
    return Division(result=moved(axis, swapped.get(axis.dim, axis.dim)))


def _t(call: Call) -> Division | Refusal:
    axis, shape = _of(call)
    return Division(result=moved(axis, len(shape) - 1 - axis.dim if len(shape) == 2 else 0))


def _unsqueeze(call: Call) -> Division | Refusal:
    axis, shape = _of(call)
    dim = place(call.get("dim"), len(shape) + 1)
    return Division(result=moved(axis, axis.dim + (dim <= axis.dim)))


def _squeeze(call: Call) -> Division | Refusal:
    axis, shape = _of(call)
    if not call.takes("dim"):
        return call.refused("would squeeze the batch of a part of one sample")
    given: int | Sequence[int] = call.get("dim")
    dims = {place(dim, len(shape)) for dim in ([given] if isinstance(given, int) else given)}
    if axis.dim in dims:
        return call.refused("squeezes the batch")
    return Division(result=moved(axis, axis.dim - sum(dim < axis.dim for dim in dims)))


def _expand(call: Call) -> Division | Refusal:
    axis, shape = _of(call)
    dim = axis.dim + len(shape_of(call.node)) - len(shape)
    return Division(result=moved(axis, dim), sizes=1 if isinstance(axis, Batch) else None)


def _select(call: Call) -> Division | Refusal:
    axis, shape = _of(call)
    dim = place(call.get("dim"), len(shape))
    if dim == axis.dim:
        return call.refused("selects one of the batch")
    return Division(result=moved(axis, axis.dim - (dim < axis.dim)))


def _slice(call: Call) -> Division | Refusal:
    axis, shape = _of(call)
    if place(call.get("dim"), len(shape)) != axis.dim:
        return Division(result=axis)
    start, end, size = call.get("start"), call.get("end"), shape[axis.dim]
    is_whole = start in (None, 0) and (end is None or (isinstance(size, int) and end >= size))
    return Division(result=axis) if is_whole else call.refused("takes a part of the batch")


def _split(call: Call) -> Division | Refusal:
    axis, shape = _of(call)
    if place(call.get("dim"), len(shape)) == axis.dim:
        return call.refused("splits the batch")
    return Division(result=axis)


def _unbind(call: Call) -> Division | Refusal:
    axis, shape = _of(call)
    dim = place(call.get("dim"), len(shape))
    if dim == axis.dim:
        return call.refused("takes the batch apart")
    return Division(result=moved(axis, axis.dim - (dim < axis.dim)))


def _join(call: Call, *, is_new: bool) -> Division | Refusal:
    """Join tensors along another dimension than the batch, an old one or a new one."""
    tensors = cast(Sequence[fx.Node], call.node.args[0])
    axes = [call.axis(tensor) for tensor in tensors]
    axis = next((found for found in axes if found is not None), None)
    if not isinstance(axis, Batch | Rows) or any(each not in (None, axis) for each in axes):
        return call.refused("joins values that are divided in several ways")
    dim = place(call.get("dim"), len(shape_of(call.node)))
    if dim == axis.dim and not is_new:
        return call.refused("joins along the batch")
    whole = [tensor for tensor, found in zip(tensors, axes, strict=True) if found is None]
    if whole and isinstance(axis, Rows):
        return call.refused("joins rows with a tensor of another number of them")
    result = moved(axis, axis.dim + (is_new and dim <= axis.dim))
    return Division(result=result, splits={n: axis for n in whole if isinstance(axis, Batch)})


def _copy(call: Call) -> Division | Refusal:
    return Division(result=call.axis(call.node.args[0]))


VIEW_RULES: dict[str, Rule] = {
    "aten::view": _linear(_view),
    "aten::reshape": _linear(_view),
    "aten::_unsafe_view": _linear(_view),
    "aten::permute": _linear(_permute),
    "aten::transpose": _linear(_transpose),
    "aten::t": _linear(_t),
    "aten::unsqueeze": _linear(_unsqueeze),
    "aten::squeeze": _linear(_squeeze),
    "aten::expand": _linear(_expand),
    "aten::select": _linear(_select),
    "aten::slice": _linear(_slice),
    "aten::split": _linear(_split),
    "aten::split_with_sizes": _linear(_split),
    "aten::unbind": _linear(_unbind),
    "aten::cat": lambda call: _join(call, is_new=False),
    "aten::stack": lambda call: _join(call, is_new=True),
    "aten::clone": _copy,
    "aten::detach": _copy,
    "aten::alias": _copy,
    "aten::_to_copy": _copy,
    "prims::convert_element_type": _copy,
    "prims::device_put": _copy,  # as Inductor has counts that the host reads
}
