"""Rules of gates and of rows on their way: all-to-alls, routed rows, sizes that depend on data.

What a gate needs of the batch is its class. Per token: it chooses by operators that have rules for
tokens, and no more is said. Prefix: an expert of bounded capacity takes the first tokens, so a part
begins with the counter that the part before has left. Whole batch: the choice of one token depends
on later ones, and only what follows it may run on parts.

Source: Lancet (arXiv:2404.19429), section 5.
"""

from collections.abc import Sequence
from typing import cast

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
from halley.compiler.partition.view_rules import shape_of


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
