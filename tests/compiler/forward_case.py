"""Hand-made forward graphs of dense and MoE layers, on the meta device."""

import operator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from tests.compiler.graph_case import GROUP, GraphBuilder, aten, c10d


halley = torch.ops.halley


@dataclass(frozen=True, kw_only=True)
class ForwardCase:
    """Sizes of a graph.

    Attributes:
        batch_size: number of samples of ``seq_len`` tokens each.
        widths: intermediate sizes of the dense layers before, between and after the MoE layers, so
            one list more than there are MoE layers.
        by_weight: whether gates rank the tokens of the full batch.
    """

    batch_size: int = 4
    seq_len: int = 8
    hidden_size: int = 8
    widths: tuple[tuple[int, ...], ...] = ((16,), (16,))
    by_weight: bool = False


def build_forward(case: ForwardCase) -> tuple[GraphBuilder, str]:
    """Return a forward graph and the name of its input that has the batch."""
    b = GraphBuilder()
    size = case.hidden_size
    x = b.input("x", case.batch_size, case.seq_len, size)
    weights = [
        [(b.input(f"up_{i}_{j}", size, n), b.input(f"down_{i}_{j}", n, size)) for j, n in each]
        for i, each in enumerate(map(enumerate, case.widths))
    ]
    gates = [b.input(f"gate_{i}", size, 4) for i in range(len(case.widths) - 1)]
    experts = b.input("experts", 4, size, size)
    tokens = b.call(aten.view.default, x, [case.batch_size * case.seq_len, size])
    for i, dense in enumerate(weights):
        for up, down in dense:
            tokens = b.mm(b.call(aten.relu.default, b.mm(tokens, up)), down)
        if i < len(gates):
            tokens = _add_experts(b, tokens, gates[i], experts, case)
    b.done(tokens)
    return b, "x"


def _add_experts(
    b: GraphBuilder, tokens: fx.Node, gate: fx.Node, experts: fx.Node, case: ForwardCase
) -> fx.Node:
    """Add an MoE layer in a group of one rank, which sends to itself; return its output."""
    num_tokens = tokens.meta["val"].shape[0]
    best = b.call(aten.topk.default, b.mm(tokens, gate), 1)
    weights, choices = _item(b, best, 0), _item(b, best, 1)
    if case.by_weight:
        kept = b.call(halley.take_slots_by_weight.default, choices, weights, 4, num_tokens)
        choices = b.call(aten.where.ScalarOther, kept, choices, -1)
    slots = b.call(halley.sort_slots.default, choices, 4)
    _, received = b.all_to_all(_item(b, slots, 1), f"counts_{tokens.name}")
    sent_size = _size(b, _item(b, slots, 1), num_tokens)
    received_size = _size(b, received, num_tokens)
    rows = b.call(halley.gather_rows.default, tokens, _item(b, slots, 0), sent_size, 1)
    rows = _exchange(b, rows, received_size, sent_size, f"dispatch_{tokens.name}")
    counts = b.call(aten.view.default, received, [1, 4])
    grouped = b.call(halley.group_rows.default, counts, received_size)
    order, inverse, ends = (_item(b, grouped, at) for at in range(3))
    rows = b.call(halley.permute_rows.default, rows, order, inverse)
    rows = b.call(halley.expert_gemm.default, rows, experts, ends)
    rows = b.call(halley.permute_rows.default, rows, inverse, order)
    rows = _exchange(b, rows, sent_size, received_size, f"combine_{tokens.name}")
    return b.call(halley.combine_rows.default, rows, _item(b, slots, 0), weights)


def _item(b: GraphBuilder, source: fx.Node, at: int) -> fx.Node:
    for user in source.users:
        if user.args[1] == at:
            return user
    node = b.graph.call_function(operator.getitem, (source, at))
    node.meta["val"] = source.meta["val"][at]
    return node


def _size(b: GraphBuilder, counts: fx.Node, value: int) -> fx.Node:
    total = b.call(aten.sum.default, counts)
    node = b.graph.call_function(aten._local_scalar_dense.default, (total,))
    node.meta["val"] = value
    return node


def _exchange(
    b: GraphBuilder, rows: fx.Node, received: fx.Node, sent: fx.Node, name: str
) -> fx.Node:
    target = cast(Any, c10d.all_to_all_single.default)
    start = b.graph.create_node(
        "call_function", target, (rows, [received], [sent], GROUP), name=name
    )
    start.meta["val"] = torch.empty_like(rows.meta["val"])
    return b.call(c10d.wait_tensor.default, start)
