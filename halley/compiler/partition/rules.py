"""Rules of compute operators and of Halley's operators on routed rows; all rules in one table."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from halley.compiler.graph_collectives import collective_kind
from halley.compiler.partition.propagation import (
    Axis,
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
)
from halley.compiler.partition.view_rules import VIEW_RULES, moved, positive_dim, shape_of


def _pointwise(call: Call) -> Division | Refusal:
    """Divide an elementwise operator with broadcasting; all operands must agree on the batch.

    Of an operand without an axis, each microbatch reads a slice, unless it is broadcast there.
    """
    num_dims = len(shape_of(call.node))
    tensors = [n for n in call.node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    result: Batch | Rows | None = None
    # Broadcasting aligns the last dimensions, so axes of shorter operands move to the right.
    for operand in call.node.all_input_nodes:
        axis = call.axis(operand)
        if axis is None:
            continue
        if not isinstance(axis, Batch | Rows):
            return call.refused("reads counts or indices of rows")
        axis = moved(axis, axis.dim + num_dims - len(shape_of(operand)))
        if result not in (None, axis):
            return call.refused("combines values with different batch dimensions")
        result = axis
    assert result is not None
    splits: dict[fx.Node, Batch] = {}
    for operand in tensors:
        shape = shape_of(operand)
        dim = result.dim - (num_dims - len(shape))
        if call.axis(operand) is not None or dim < 0 or shape[dim] == 1:
            continue
        if isinstance(result, Rows):
            return call.refused("combines sorted rows with a tensor that is not sorted like them")
        splits[operand] = Batch(dim, result.unit)
    return Division(result=result, splits=splits)


def _reduced_dims(call: Call, num_dims: int) -> set[int]:
    """Return the dimensions that a reduction removes: all, unless the call names some."""
    given: Any = call.get("dim") if call.takes("dim") else None
    if given is None or given == []:
        return set(range(num_dims))
    listed: Sequence[int] = [given] if isinstance(given, int) else given
    return {positive_dim(dim, num_dims) for dim in listed}


def _reduce(call: Call) -> Division | Refusal:
    source = call.node.args[0]
    axis, shape = call.axis(source), shape_of(source)
    if isinstance(axis, Counts) and call.name == "aten::sum":
        return Division(result=axis)  # sums of counts are counts
    if not isinstance(axis, Batch | Rows):
        return call.refused("reduces counts or indices of rows")
    dims = _reduced_dims(call, len(shape))
    if axis.dim in dims:
        # Microbatches would add in another order than the full batch: other bits.
        return call.refused("reduces over the batch")
    keeps = call.takes("keepdim") and call.get("keepdim")
    num_removed = 0 if keeps else sum(dim < axis.dim for dim in dims)
    return Division(result=moved(axis, axis.dim - num_removed))


def _along_dim(call: Call) -> Division | Refusal:
    """Divide an operator that works along one dimension and keeps the shape."""
    axis = call.axis(call.node.args[0])
    if not isinstance(axis, Batch | Rows):
        return call.refused("reads counts or indices of rows")
    if axis.dim in _reduced_dims(call, len(shape_of(call.node.args[0]))):
        return call.refused("works along the batch", axis)
    return Division(result=axis)


def _online_softmax(call: Call) -> Division | Refusal:
    """Divide Inductor's maxima and sums of exponentials, which keep the reduced dimension."""
    found = _along_dim(call)
    if isinstance(found, Division):
        return Division(result=(cast(Axis, found.result),) * 2)
    return call.refused("works along the batch")


def _norm(call: Call) -> Division | Refusal:
    axis, shape = call.axis(call.node.args[0]), shape_of(call.node.args[0])
    normalized: Sequence[int] = call.get("normalized_shape")
    if not isinstance(axis, Batch | Rows) or axis.dim >= len(shape) - len(normalized):
        return call.refused("normalizes over the batch")
    return Division(result=axis)


def _mm(call: Call) -> Division | Refusal:
    """Divide rows of the left matrix or columns of the right one; the other has no batch."""
    operands: Sequence[object] = call.node.args
    if call.name == "aten::addmm":
        bias, *operands = operands
        if call.axis(bias) is not None or len(shape_of(bias)) != 1:
            return call.refused("adds a matrix instead of a bias vector")
    rows, columns = map(call.axis, operands[:2])
    if isinstance(rows, Batch | Rows) and rows.dim == 0 and columns is None:
        return Division(result=rows)
    if isinstance(columns, Batch | Rows) and columns.dim == 1 and rows is None:
        return Division(result=columns)
    return call.refused("sums over the batch")


def _bmm(call: Call) -> Division | Refusal:
    operands = call.node.args[:2]
    left, right = map(call.axis, operands)
    axis = left or right
    if isinstance(axis, Batch) and axis.dim == 0 and {left, right} <= {axis, None}:
        splits = {n: axis for n in operands if isinstance(n, fx.Node) and not call.axis(n)}
        return Division(result=axis, splits=splits)
    if isinstance(left, Batch | Rows) and left.dim == 1 and right is None:
        return Division(result=left)
    if isinstance(right, Batch | Rows) and right.dim == 2 and left is None:
        return Division(result=right)
    return call.refused("sums over the batch, or its operands have different batch dimensions")


def _attention(num_others: int) -> Rule:
    """Return the rule of an attention operator that returns output, log-sum-exp and others.

    Without dropout nobody reads random state, and the other results are equal in all microbatches.
    """

    def rule(call: Call) -> Division | Refusal:
        axis, *others = map(call.axis, call.node.args[:3])
        if not isinstance(axis, Batch) or axis.dim != 0 or any(each != axis for each in others):
            return call.refused("has queries, keys or values without the batch as dimension 0")
        splits: dict[fx.Node, Batch] = {}
        for operand in call.node.all_input_nodes:
            shape = shape_of(operand)
            if call.axis(operand) is None and len(shape) == 4 and shape[0] != 1:
                splits[operand] = axis  # a bias for each sample
        return Division(result=(axis, axis, *(Last() for _ in range(num_others))), splits=splits)

    return rule


def _embedding(call: Call) -> Division | Refusal:
    """Divide a look-up in a table without a batch, by indices that have one."""
    table, indices = call.node.args[:2]
    axis = call.axis(indices)
    num_indices = len(indices) if isinstance(indices, Sequence) else 1
    if call.axis(table) is None and isinstance(axis, Batch) and num_indices == 1:
        return Division(result=axis)
    return call.refused("indexes a tensor that depends on the batch")


def _gather(call: Call) -> Division | Refusal:
    """Divide a gather along another dimension; all operands have the same batch dimension."""
    axis = call.axis(call.node.args[0])
    operands = [n for n in call.node.all_input_nodes if shape_of(n)]
    if not isinstance(axis, Batch) or any(call.axis(operand) != axis for operand in operands):
        return call.refused("combines values with different batch dimensions")
    if positive_dim(call.get("dim"), len(shape_of(call.node.args[0]))) == axis.dim:
        return call.refused("indexes the batch")
    return Division(result=axis)


_POINTWISE = ("where", "zeros_like", "ones_like", "full_like", "empty_like")  # may lack the tag
_REDUCTIONS = (
    "sum", "mean", "amax", "amin", "var_mean", "logsumexp", "any", "all", "max", "min", "prod",
    "argmax", "argmin", "linalg_vector_norm",
)  # fmt: skip
_ALONG_DIM = ("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "sort", "topk")
# For each attention operator, the number of results behind output and log-sum-exp.
_ATTENTIONS = {
    "_scaled_dot_product_flash_attention_for_cpu": 0,
    "_scaled_dot_product_flash_attention": 7,
    "_scaled_dot_product_efficient_attention": 2,
    "_scaled_dot_product_cudnn_attention": 7,
}

MATH_RULES: dict[str, Rule] = {
    "pointwise": _pointwise,  # all operators with this tag
    **{f"aten::{name}": _pointwise for name in _POINTWISE},
    **{f"aten::{name}": _reduce for name in _REDUCTIONS},
    **{f"aten::{name}": _along_dim for name in _ALONG_DIM},
    **{f"aten::{name}": _attention(others) for name, others in _ATTENTIONS.items()},
    "prims::prepare_softmax_online": _online_softmax,
    "aten::native_layer_norm": _norm,
    "aten::_fused_rms_norm": _norm,
    "aten::mm": _mm,
    "aten::addmm": _mm,
    "aten::bmm": _bmm,
    "aten::embedding": _embedding,
    "aten::index": _embedding,
    "aten::gather": _gather,
    "aten::scatter": _gather,
}


# The rules below follow rows through an MoE layer: slots are sorted by expert, counts are
# exchanged, rows are gathered, sent, grouped by local expert, multiplied, sent back and combined.


def _take_slots(call: Call) -> Division | Refusal:
    """Divide a gate with capacity by passing the used capacity from microbatch to microbatch."""
    choices, used = call.node.args[:2]
    axis = call.axis(choices)
    if not isinstance(axis, Batch) or axis.dim != 0 or call.axis(used) is not None:
        return call.refused("counts slots that are not split by tokens")
    # With several choices per token, the second choice of an early token competes with the first
    # choice of a late one.
    if shape_of(choices)[1] != 1:
        return call.refused(
            "takes first choices of the full batch before second ones", (axis, None)
        )
    return Division(result=(axis, Last()), carry=(1, 1))


def _take_slots_by_weight(call: Call) -> Division | Refusal:
    return call.refused("ranks the tokens of the full batch", call.axis(call.node.args[0]))


def _sort_slots(call: Call) -> Division | Refusal:
    axis = call.axis(call.node.args[0])
    if not isinstance(axis, Batch) or axis.dim != 0:
        return call.refused("sorts slots that are not split by tokens")
    layout = Layout(call.node, 1)  # the second result counts the slots of each expert
    return Division(result=(Index(layout), Counts(layout)))


def _read_counts(call: Call) -> Division | Refusal:
    sent, received = map(call.axis, call.node.args[:2])
    if isinstance(sent, Counts) and isinstance(received, Counts):
        return Division(result=(sent, received))
    return call.refused("reads values that are not counts of rows")


def _gather_rows(call: Call) -> Division | Refusal:
    x, slots, num_rows = map(call.axis, call.node.args[:3])
    if isinstance(x, Batch) and isinstance(slots, Index) and num_rows == Counts(slots.layout):
        return Division(result=Rows(0, slots.layout))
    return call.refused("gathers rows with indices of another layout")


def _combine_rows(call: Call) -> Division | Refusal:
    rows, slots, weights = map(call.axis, call.node.args[:3])
    if isinstance(weights, Batch) and isinstance(slots, Index) and rows == Rows(0, slots.layout):
        return Division(result=weights)
    return call.refused("combines rows with indices of another layout")


def _group_rows(call: Call) -> Division | Refusal:
    counts, num_rows = map(call.axis, call.node.args[:2])
    if not isinstance(counts, Counts) or num_rows != counts:
        return call.refused("groups rows by counts of another layout")
    by_expert = Layout(call.node, 3)  # rows of each local expert
    # The third result, the end of each expert's rows, is no Counts: the epilogue computes it again
    # from the counts of the full batch, like the permutations.
    return Division(
        result=(Index(by_expert), Index(counts.layout), Index(by_expert), Counts(by_expert))
    )


def _permute_rows(call: Call) -> Division | Refusal:
    rows, order, inverse = map(call.axis, call.node.args[:3])
    if isinstance(order, Index) and isinstance(inverse, Index) and rows == Rows(0, inverse.layout):
        return Division(result=Rows(0, order.layout))
    return call.refused("permutes rows with indices of another layout")


def _expert_gemm(call: Call) -> Division | Refusal:
    rows, weights, ends = map(call.axis, call.node.args[:3])
    if isinstance(ends, Index) and rows == Rows(0, ends.layout) and weights is None:
        return Division(result=rows)
    return call.refused("multiplies rows of another layout")


def _all_to_all(call: Call) -> Division | Refusal:
    """Divide an all-to-all of counts with equal splits, or one of rows with splits from counts."""
    x, received, sent = map(call.axis, call.node.args[:3])
    if isinstance(x, Counts) and received is None and sent is None:
        return Division(result=Counts(Layout(call.node)))
    if not isinstance(x, Rows) or x.dim != 0 or not isinstance(received, Counts):
        return call.refused("sends values that are not sorted rows")
    for splits, axis in zip(call.node.args[1:3], (received, Counts(x.layout)), strict=True):
        if any(call.axis(split) != axis for split in cast(Sequence[object], splits)):
            return call.refused("sends rows with splits of another layout")
    return Division(result=Rows(0, received.layout))


def _wait(call: Call) -> Division | Refusal:
    """Keep the axis; the result of the wait is the layout of counts that were received."""
    source = cast(fx.Node, call.node.args[0])
    axis = call.axis(source)
    if isinstance(axis, Counts) and collective_kind(source):
        axis = Counts(Layout(call.node))
    return Division(result=axis)


def _size(call: Call) -> Division | Refusal:
    """Divide a count that the host reads, or a sum of counts of one layout."""
    axis, *others = map(call.axis, call.node.all_input_nodes)
    if isinstance(axis, Counts) and all(each == axis for each in others):
        return Division(result=axis)
    return call.refused("computes a size from counts of different layouts")


def _sym_size(call: Call) -> Division | Refusal:
    source, dim = call.node.args[:2]
    axis = call.axis(source)
    if isinstance(axis, Rows) and axis.dim == dim:
        return Division(result=Counts(axis.layout))
    return call.refused("reads a size that differs between microbatches")


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
    "aten::sym_size": _sym_size,
    "add": _size,  # Python's +, on sizes
    "sym_sum": _size,
}


def all_rules(own: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the rules of PyTorch's and Halley's operators; a user's own rules override them."""
    return {**VIEW_RULES, **MATH_RULES, **ROW_RULES, **own}
