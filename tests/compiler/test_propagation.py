"""Batch-dim propagation: axes of operators, compared with the operators on microbatches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from halley.compiler.partition.propagation import (
    Batch,
    BatchFlow,
    Call,
    Division,
    Last,
    Refusal,
    propagate_batch,
)
from halley.compiler.partition.rules import all_rules


B, S, D = 4, 3, 8
NUM_PARTS = 2
Function = Callable[[torch.Tensor, torch.Tensor], Any]


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return small integers (B, S, D) and a weight (D, D), so that all sums are exact."""
    generator = torch.Generator().manual_seed(0)
    x_BSD = torch.randint(-3, 4, (B, S, D), generator=generator).float()
    return x_BSD, torch.randint(-3, 4, (D, D), generator=generator).float()


def _flow(function: Function, **own: Any) -> tuple[fx.Graph, BatchFlow]:
    graph = make_fx(function, tracing_mode="fake")(*_inputs()).graph
    first = next(iter(graph.nodes)).name
    return graph, propagate_batch(graph, [first], all_rules(own))


def _result(graph: fx.Graph) -> fx.Node:
    (result,) = graph.output_node().all_input_nodes
    return result


def _tokens(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, D)


def _ids(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, 0].abs().long()


DIVIDED: dict[str, tuple[Function, Batch]] = {
    "pointwise": (lambda x, w: torch.relu(x) * 2 + w[0], Batch(0)),
    "broadcast operand": (lambda x, w: x + w[:S, :], Batch(0)),
    "where": (lambda x, w: torch.where(x > 0, x, 0.0), Batch(0)),
    "cast and copy": (lambda x, w: x.double().clone().detach(), Batch(0)),
    "like": (lambda x, w: torch.zeros_like(x) + x, Batch(0)),
    "tokens": (lambda x, w: _tokens(x), Batch(0, S)),
    "tokens split again": (lambda x, w: _tokens(x).view(-1, S, 2, D // 2), Batch(0)),
    "transpose": (lambda x, w: x.transpose(0, 1), Batch(1)),
    "merge behind the batch": (lambda x, w: x.transpose(0, 1).reshape(S, -1), Batch(1, D)),
    "permute": (lambda x, w: x.permute(2, 0, 1), Batch(1)),
    "t": (lambda x, w: _tokens(x).t(), Batch(1, S)),
    "unsqueeze": (lambda x, w: x.unsqueeze(0), Batch(1)),
    "squeeze": (lambda x, w: x[:, :1].squeeze(1), Batch(0)),
    "expand": (lambda x, w: x[:, None].expand(x.shape[0], 2, S, D), Batch(0)),
    "select": (lambda x, w: x.transpose(0, 1)[1], Batch(0)),
    "slice": (lambda x, w: x[:, 1:], Batch(0)),
    "split": (lambda x, w: x.split(4, dim=-1)[1] + x.chunk(2, dim=-1)[0], Batch(0)),
    "cat": (lambda x, w: torch.cat([x, x * 2], dim=1), Batch(0)),
    "stack": (lambda x, w: torch.stack([x, x]), Batch(1)),
    "sum over another dimension": (lambda x, w: x.transpose(0, 1).sum(0), Batch(0)),
    "sum with keepdim": (lambda x, w: x.sum(dim=(1, 2), keepdim=True), Batch(0)),
    "max": (lambda x, w: x.max(dim=-1).values, Batch(0)),
    "softmax": (lambda x, w: x.softmax(dim=-1), Batch(0)),
    "cumsum": (lambda x, w: x.cumsum(dim=1), Batch(0)),
    "topk": (lambda x, w: x.topk(2, dim=-1).indices, Batch(0)),
    "layer norm": (lambda x, w: F.layer_norm(x, (D,), w[0], w[1]), Batch(0)),
    "mm": (lambda x, w: _tokens(x) @ w, Batch(0, S)),
    "mm on the right": (lambda x, w: w @ _tokens(x).t(), Batch(1, S)),
    "addmm": (lambda x, w: F.linear(x, w, w[0]), Batch(0)),
    "bmm": (lambda x, w: x @ x.transpose(1, 2), Batch(0)),
    "bmm by rows": (lambda x, w: torch.bmm(x.transpose(0, 1), w.expand(S, D, D)), Batch(1)),
    "embedding": (lambda x, w: F.embedding(_ids(x), w), Batch(0)),
    "index": (lambda x, w: w[_ids(x)], Batch(0)),
    "gather": (lambda x, w: x.gather(2, x.argsort(-1)[:, :, :2]), Batch(0)),
}


@pytest.mark.parametrize(("function", "axis"), DIVIDED.values(), ids=DIVIDED.keys())
def test_concatenated_microbatches_along_the_axis_are_the_full_batch(
    function: Function, axis: Batch
) -> None:
    x, w = _inputs()
    graph, flow = _flow(function)
    assert flow.batch_size == B
    assert flow.axes[_result(graph)] == axis
    assert all(isinstance(call, Division) for call in flow.calls.values())
    results = [function(microbatch, w) for microbatch in x.chunk(NUM_PARTS)]
    assert torch.equal(torch.cat(results, axis.dim), function(x, w))


def test_attention_keeps_the_batch() -> None:
    def attend(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q = x.view(-1, S, 2, D // 2).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    graph, flow = _flow(attend)
    assert flow.axes[_result(graph)] == Batch(0)


def test_operators_that_only_inductor_inserts_have_rules() -> None:
    prims = torch.ops.prims
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(B, S, D, device="meta")
    calls = [
        graph.call_function(target, (x, argument))
        for target, argument in (
            (prims.prepare_softmax_online.default, -1),
            (prims.prepare_softmax_online.default, 0),
            (prims.device_put.default, torch.device("cpu")),
        )
    ]
    graph.output(tuple(calls))
    flow = propagate_batch(graph, ["x"], all_rules({}))
    along, over, copy = calls
    assert flow.axes[along] == (Batch(0), Batch(0))
    refusal = flow.calls[over]
    assert isinstance(refusal, Refusal)
    assert refusal.reason.endswith("(prims::prepare_softmax_online) works along the batch")
    assert flow.axes[copy] == Batch(0)


def test_operand_without_a_batch_is_sliced() -> None:
    graph, flow = _flow(lambda x, w: x.transpose(0, 1) + torch.arange(x.numel()).view(S, B, D))
    (add,) = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    call = flow.calls[add]
    assert isinstance(call, Division)
    assert call.result == Batch(1)
    assert list(call.splits.values()) == [Batch(1)]


REFUSED: dict[str, tuple[Function, str, Batch | None]] = {
    "mean of all": (lambda x, w: x.mean(), "mean (aten::mean) reduces over the batch", None),
    "sum over the batch": (lambda x, w: x.sum(0), "reduces over the batch", None),
    "softmax over it": (lambda x, w: x.softmax(0), "works along the batch", Batch(0)),
    "mm that sums": (lambda x, w: _tokens(x).t() @ _tokens(x), "sums over the batch", None),
    "one sample": (lambda x, w: x[1], "takes single elements of the batch", None),
    "some samples": (lambda x, w: x[1:], "slices the batch", None),
    "batch merged behind": (
        lambda x, w: x.transpose(0, 1).reshape(-1, D),
        "merges the batch behind another dimension",
        None,
    ),
    "cat along it": (lambda x, w: torch.cat([x, x]), "concatenates along the batch", None),
    "outer sum": (lambda x, w: x[:, None] + x[None, :], "different batch dimensions", None),
    "random": (lambda x, w: F.dropout(x, 0.5), "draws random numbers", Batch(0)),
    "no rule": (lambda x, w: torch.fft.rfft(x), "has no rule", None),
    "squeeze of all": (lambda x, w: x.squeeze(), "a microbatch of one sample", None),
    "batch norm": (lambda x, w: F.layer_norm(x, (B, S, D)), "normalizes over the batch", None),
}


@pytest.mark.parametrize(("function", "reason", "axis"), REFUSED.values(), ids=REFUSED.keys())
def test_refusal_gives_the_reason(function: Function, reason: str, axis: Batch | None) -> None:
    graph, flow = _flow(function)
    refusals = [call for call in flow.calls.values() if isinstance(call, Refusal)]
    assert any(reason in refusal.reason for refusal in refusals), refusals
    result = flow.axes[_result(graph)]
    assert result == axis


def test_value_without_an_axis_is_sliced_next_to_one_with_an_axis() -> None:
    graph, flow = _flow(lambda x, w: torch.relu(x + torch.fft.ifft(torch.fft.fft(x)).real))
    assert flow.axes[_result(graph)] == Batch(0)


def test_user_rule_is_applied() -> None:
    def rule(call: Call) -> Division:
        return Division(result=call.axis(call.node.args[0]))

    graph, flow = _flow(lambda x, w: torch.fft.rfft(x).abs(), **{"aten::_fft_r2c": rule})
    assert flow.axes[_result(graph)] == Batch(0)


def _fail(call: Call) -> Division:
    raise KeyError("dim")


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (lambda call: None, TypeError, "must return a Division or a Refusal for .*, not None"),
        (lambda call: Division(result=(Batch(0),)), TypeError, "must return one axis for the one"),
        (_fail, RuntimeError, r"failed for .*: KeyError\('dim'\)"),
    ],
    ids=["nothing", "several results", "error"],
)
def test_wrong_rule_is_named(rule: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"the rule of aten::_fft_r2c .*{message}"):
        _flow(lambda x, w: torch.fft.rfft(x), **{"aten::_fft_r2c": rule})


def test_operators_behind_dropout_have_a_batch() -> None:
    drop = torch.ops.aten.native_dropout.default
    graph, flow = _flow(lambda x, w: drop(x, 0.5, True)[0] * 2)
    assert flow.axes[_result(graph)] == Batch(0)


def test_weights_and_constants_have_no_batch() -> None:
    graph, flow = _flow(lambda x, w: w @ w.t() + torch.arange(D))
    assert flow.axes[_result(graph)] is None
    assert not flow.calls


def test_inputs_of_another_size_have_no_batch() -> None:
    graph = make_fx(lambda x, w: x + w[:B, None], tracing_mode="fake")(*_inputs()).graph
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    flow = propagate_batch(graph, names, all_rules({}))
    assert [flow.axes[node] for node in graph.find_nodes(op="placeholder")] == [Batch(0), None]


def _gate(top_k: int, by_weight: bool) -> Function:
    def gate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        weights, choices = (_tokens(x) @ w).softmax(-1).topk(top_k, dim=-1)
        if by_weight:
            return torch.ops.halley.take_slots_by_weight(choices, weights, D, 2)
        return torch.ops.halley.take_slots(choices, torch.zeros(D, dtype=torch.int64), 2)[0]

    return gate


@pytest.mark.parametrize(
    ("top_k", "by_weight", "reason"),
    [
        (1, False, ""),
        (2, False, "takes first choices of the full batch before second ones"),
        (1, True, "ranks the tokens of the full batch"),
    ],
)
def test_gate_by_what_it_needs_of_the_batch(top_k: int, by_weight: bool, reason: str) -> None:
    graph, flow = _flow(_gate(top_k, by_weight))
    # Operators behind the gate may run in microbatches in any case.
    assert flow.axes[_result(graph)] == Batch(0, S)
    (call,) = (c for n, c in flow.calls.items() if "take_slots" in str(n.target))
    if reason:
        assert isinstance(call, Refusal)
        assert reason in call.reason
    else:
        assert isinstance(call, Division)
        assert (call.result, call.carry) == ((Batch(0, S), Last()), (1, 1))
