"""The table of rules by which a batch comes in parts."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from halley.compiler.graph_collectives import collective_kind
from halley.compiler.partition.axes import (
    Batch,
    Call,
    Counts,
    Division,
    Index,
    Last,
    Layout,
    Refusal,
    Rows,
    Rule,
)  # fmt: skip
from halley.compiler.partition.view_rules import VIEW_RULES, moved, place, shape_of


def pointwise(call: Call) -> Division | Refusal:
    """Divide what is computed element by element as its operands are, after broadcasting.

    An operand that is whole gives its range of the batch, unless it is broadcast along it.
    """
    num_dims = len(shape_of(call.node))
    tensors = [n for n in call.node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    result: Batch | Rows | None = None
    for operand in call.node.all_input_nodes:
        axis = call.axis(operand)
        if axis is None:
            continue
        if not isinstance(axis, Batch | Rows):
            return call.refused("computes with what is counted over the batch")
        axis = moved(axis, axis.dim + num_dims - len(shape_of(operand)))
        if result not in (None, axis):
            return call.refused("combines values that are divided in several ways")
        result = axis
    assert result is not None
    splits: dict[fx.Node, Batch] = {}
    for operand in tensors:
        shape = shape_of(operand)
        dim = result.dim - (num_dims - len(shape))
        if call.axis(operand) is not None or dim < 0 or shape[dim] == 1:
            continue
        if isinstance(result, Rows):
            return call.refused("combines rows with a tensor of as many")
        splits[operand] = Batch(dim, result.unit)
    return Division(result=result, splits=splits)


def _dims(call: Call, num_dims: int) -> set[int]:
    """Return the dimensions that a call goes over: all, unless it names some."""
    given: Any = call.get("dim") if call.takes("dim") else None
    if given is None or given == []:
        return set(range(num_dims))
    return {place(dim, num_dims) for dim in ([given] if isinstance(given, int) else given)}


def _reduce(call: Call) -> Division | Refusal:
    """Divide a reduction over other dimensions; sums of counts are counts."""
    source = call.node.args[0]
    axis, shape = call.axis(source), shape_of(source)
    if isinstance(axis, Counts) and call.name == "aten::sum":
        return Division(result=axis)
    if not isinstance(axis, Batch | Rows):
        return call.refused("goes over what is counted over the batch")
    dims = _dims(call, len(shape))
    if axis.dim in dims:
        return call.refused("goes over the batch, and parts would add up in another order")
    keeps = call.takes("keepdim") and call.get("keepdim")
    fewer = 0 if keeps else sum(dim < axis.dim for dim in dims)
    return Division(result=moved(axis, axis.dim - fewer))


def _along(call: Call) -> Division | Refusal:
    """Divide what keeps the shape and works along one dimension, if that is another."""
    axis = call.axis(call.node.args[0])
    if not isinstance(axis, Batch | Rows):
        return call.refused("goes along what is counted over the batch")
    if axis.dim in _dims(call, len(shape_of(call.node.args[0]))):
        return call.refused("goes along the batch", axis)
    return Division(result=axis)


def _softmax_sums(call: Call) -> Division | Refusal:
    """Divide largest elements and sums of exponents, each kept as a dimension of one."""
    axis, shape = call.axis(call.node.args[0]), shape_of(call.node.args[0])
    if not isinstance(axis, Batch | Rows) or axis.dim in _dims(call, len(shape)):
        return call.refused("goes along the batch")
    return Division(result=(axis, axis))


def _norm(call: Call) -> Division | Refusal:
    axis, shape = call.axis(call.node.args[0]), shape_of(call.node.args[0])
    normalized: Sequence[int] = call.get("normalized_shape")
    if not isinstance(axis, Batch | Rows) or axis.dim >= len(shape) - len(normalized):
        return call.refused("normalizes over the batch")
    return Division(result=axis)


def _mm(call: Call) -> Division | Refusal:
    return _gemm(call, call.node.args[0], call.node.args[1])


def _addmm(call: Call) -> Division | Refusal:
    bias, left, right = call.node.args[:3]
    if call.axis(bias) is not None or len(shape_of(bias)) != 1:
        return call.refused("adds a matrix")
    return _gemm(call, left, right)


def _gemm(call: Call, left: object, right: object) -> Division | Refusal:
    """Divide rows of the left matrix or columns of the right; the other one is whole."""
    rows, columns = call.axis(left), call.axis(right)
    if isinstance(rows, Batch | Rows) and rows.dim == 0 and columns is None:
        return Division(result=rows)
    if isinstance(columns, Batch | Rows) and columns.dim == 1 and rows is None:
        return Division(result=columns)
    return call.refused("adds up over the batch")


def _bmm(call: Call) -> Division | Refusal:
    left, right = call.node.args[:2]
    axes = [call.axis(left), call.axis(right)]
    given = [axis for axis in axes if axis is not None]
    axis = given[0]
    if isinstance(axis, Batch) and axis.dim == 0 and all(each == axis for each in given):
        splits = {n: axis for n in (left, right) if isinstance(n, fx.Node) and not call.axis(n)}
        return Division(result=axis, splits=splits)
    if isinstance(axis, Batch | Rows) and len(given) == 1:
        if axes[0] is axis and axis.dim == 1:
            return Division(result=axis)
        if axes[1] is axis and axis.dim == 2:
            return Division(result=axis)
    return call.refused("adds up over the batch, or multiplies values divided in several ways")


def _attention(num_others: int) -> Rule:
    """Return the rule of attention: samples attend alone. The results behind the first two do not
    differ between parts without dropout, and random ones are not read."""

    def judge(call: Call) -> Division | Refusal:
        axes = [call.axis(operand) for operand in call.node.args[:3]]
        axis = axes[0]
        if not isinstance(axis, Batch) or axis.dim != 0 or any(each != axis for each in axes):
            return call.refused("attends over another dimension than the batch's samples")
        splits: dict[fx.Node, Batch] = {}
        for operand in call.node.all_input_nodes:
            shape = shape_of(operand)
            if call.axis(operand) is None and len(shape) == 4 and shape[0] != 1:
                splits[operand] = axis  # a bias of each sample
        others: tuple[Last, ...] = (Last(),) * num_others
        return Division(result=(axis, axis, *others), splits=splits)

    return judge


def _embedding(call: Call) -> Division | Refusal:
    """Divide a look-up in a whole table as the places are."""
    table, places = call.node.args[:2]
    axis = call.axis(places)
    listed = places if isinstance(places, Sequence) else (places,)
    if call.axis(table) is None and isinstance(axis, Batch) and len(listed) == 1:
        return Division(result=axis)
    return call.refused("looks up places in what is divided")


def _gather(call: Call) -> Division | Refusal:
    """Divide a look-up along another dimension than the batch; all operands are divided alike."""
    axis = call.axis(call.node.args[0])
    operands = [n for n in call.node.all_input_nodes if shape_of(n)]
    if not isinstance(axis, Batch) or any(call.axis(operand) != axis for operand in operands):
        return call.refused("looks up places in values that are divided in several ways")
    if place(call.get("dim"), len(shape_of(call.node.args[0]))) == axis.dim:
        return call.refused("looks up places in the whole batch")
    return Division(result=axis)


_REDUCTIONS = (
    "sum", "mean", "amax", "amin", "var_mean", "logsumexp", "any", "all", "max", "min", "prod",
    "argmax", "argmin", "linalg_vector_norm",
)  # fmt: skip
_ALONG = ("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "sort", "topk")
# Of each attention, how many results stand behind output and sums of exponents.
_ATTENTIONS = {
    "_scaled_dot_product_flash_attention_for_cpu": 0,
    "_scaled_dot_product_flash_attention": 7,
    "_scaled_dot_product_efficient_attention": 2,
    "_scaled_dot_product_cudnn_attention": 7,
}

MATH_RULES: dict[str, Rule] = {
    "pointwise": pointwise,  # of all operators with this tag
    "aten::where": pointwise,  # some overloads lack it
    "aten::zeros_like": pointwise,
    "aten::ones_like": pointwise,
    "aten::full_like": pointwise,
    "aten::empty_like": pointwise,
    **{f"aten::{name}": _reduce for name in _REDUCTIONS},
    **{f"aten::{name}": _along for name in _ALONG},
    "prims::prepare_softmax_online": _softmax_sums,
    "aten::native_layer_norm": _norm,
    "aten::_fused_rms_norm": _norm,
    "aten::mm": _mm,
    "aten::addmm": _addmm,
    "aten::bmm": _bmm,
    **{f"aten::{name}": _attention(others) for name, others in _ATTENTIONS.items()},
    "aten::embedding": _embedding,
    "aten::index": _embedding,
    "aten::gather": _gather,
    "aten::scatter": _gather,
}


def _take_slots(call: Call) -> Division | Refusal:
    choices, used = call.node.args[:2]
    axis = call.axis(choices)
    if not isinstance(axis, Batch) or axis.dim != 0 or call.axis(used) is not None:
        return call.refused("counts slots that are not divided by tokens")
    if shape_of(choices)[1] != 1:
        return call.refused(
            "takes first choices of the whole batch before second ones", (axis, None)
        )
    return Division(result=(axis, Last()), carry=(1, 1))


def _take_slots_by_weight(call: Call) -> Division | Refusal:
    return call.refused("ranks the tokens of the whole batch", call.axis(call.node.args[0]))


def _sort_slots(call: Call) -> Division | Refusal:
    axis = call.axis(call.node.args[0])
    if not isinstance(axis, Batch) or axis.dim != 0:
        return call.refused("sorts what is not divided by tokens")
    layout = Layout(call.node, 1)
    return Division(result=(Index(layout), Counts(layout)))


def _read_counts(call: Call) -> Division | Refusal:
    sent, arrived = (call.axis(argument) for argument in call.node.args[:2])
    if isinstance(sent, Counts) and isinstance(arrived, Counts):
        return Division(result=(sent, arrived))
    return call.refused("reads what is not counted over the batch")


def _gather_rows(call: Call) -> Division | Refusal:
    x, slots, num_rows = (call.axis(argument) for argument in call.node.args[:3])
    if isinstance(x, Batch) and isinstance(slots, Index) and num_rows == Counts(slots.layout):
        return Division(result=Rows(0, slots.layout))
    return call.refused("gathers rows by slots of another division")


def _combine_rows(call: Call) -> Division | Refusal:
    rows, slots, weights = (call.axis(argument) for argument in call.node.args[:3])
    if isinstance(weights, Batch) and isinstance(slots, Index) and rows == Rows(0, slots.layout):
        return Division(result=weights)
    return call.refused("combines rows by slots of another division")


def _group_rows(call: Call) -> Division | Refusal:
    counts, num_rows = (call.axis(argument) for argument in call.node.args[:2])
    if not isinstance(counts, Counts) or num_rows != counts:
        return call.refused("groups rows by counts of another division")
    by_expert = Layout(call.node, 3)
    ends = Index(by_expert)  # made again from the whole's counts, as orders are
    return Division(result=(Index(by_expert), Index(counts.layout), ends, Counts(by_expert)))


def _permute_rows(call: Call) -> Division | Refusal:
    rows, order, inverse = (call.axis(argument) for argument in call.node.args[:3])
    if isinstance(order, Index) and isinstance(inverse, Index) and rows == Rows(0, inverse.layout):
        return Division(result=Rows(0, order.layout))
    return call.refused("permutes rows by an order of others")


def _expert_gemm(call: Call) -> Division | Refusal:
    rows, weights, ends = (call.axis(argument) for argument in call.node.args[:3])
    if isinstance(ends, Index) and rows == Rows(0, ends.layout) and weights is None:
        return Division(result=rows)
    return call.refused("multiplies rows by experts of others")


def _all_to_all(call: Call) -> Division | Refusal:
    """Divide an exchange of counts in equal parts, or of rows by numbers that come from counts."""
    x, received, sent = (call.axis(argument) for argument in call.node.args[:3])
    if isinstance(x, Counts) and received is None and sent is None:
        return Division(result=Counts(Layout(call.node)))
    if not isinstance(x, Rows) or x.dim != 0 or not isinstance(received, Counts):
        return call.refused("sends what is not rows")
    if _are_alike(call, 1, received) and _are_alike(call, 2, Counts(x.layout)):
        return Division(result=Rows(0, received.layout))
    return call.refused("sends rows by other counts than their own")


def _are_alike(call: Call, at: int, axis: Counts) -> bool:
    splits = cast(Sequence[object], call.node.args[at])
    return all(call.axis(split) == axis for split in splits)


def _wait(call: Call) -> Division | Refusal:
    """Pass on what was waited for; counts have their numbers from here on."""
    source = cast(fx.Node, call.node.args[0])
    axis = call.axis(source)
    if isinstance(axis, Counts) and collective_kind(source):
        return Division(result=Counts(Layout(call.node)))
    return Division(result=axis)


def _size(call: Call) -> Division | Refusal:
    """Read a count, or add counts of one layout."""
    axes = [call.axis(argument) for argument in call.node.all_input_nodes]
    if isinstance(axes[0], Counts) and all(axis == axes[0] for axis in axes):
        return Division(result=axes[0])
    return call.refused("computes a size of several divisions")


def _size_of(call: Call) -> Division | Refusal:
    """Read how many rows there are."""
    source, dim = call.node.args[:2]
    axis = call.axis(source)
    if isinstance(axis, Rows) and axis.dim == dim:
        return Division(result=Counts(axis.layout))
    return call.refused("reads a size of what is divided")


ROW_RULES: dict[str, Rule] = {
    "halley::take_slots": _take_slots,
    "halley::take_slots_by_weight": _take_slots_by_weight,
    "halley::sort_slots": _sort_slots,
    "halley::read_counts": _read_counts,
    "halley::gather_rows": _gather_rows,
    "halley::combine_rows": _combine_rows,
    "halley::group_rows": _group_rows,
    "halley::permute_rows": _permute_rows,
    "halley::expert_gemm": _expert_gemm,
    "_c10d_functional::all_to_all_single": _all_to_all,
    "_c10d_functional::wait_tensor": _wait,
    "aten::_local_scalar_dense": _size,
    "aten::sym_size": _size_of,
    "add": _size,  # of Python, on sizes
    "sym_sum": _size,
}


def all_rules(own: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the rules of torch's operators and Halley's, with a user's own, which win."""
    return {**VIEW_RULES, **MATH_RULES, **ROW_RULES, **own}
