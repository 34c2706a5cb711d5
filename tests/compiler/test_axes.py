"""Rules of the batch: an axis by hand, and a function of parts is the part of the function."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from halley.compiler.partition.axes import (
    Batch,
    BatchFlow,
    Call,
    Division,
    Last,
    Refusal,
    find_axes,
)
from halley.compiler.partition.rules import all_rules


B, S, D = 4, 3, 8
NUM_PARTS = 2
Function = Callable[[torch.Tensor, torch.Tensor], Any]


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return small integers (B, S, D) and a weight (D, D): sums of them are exact."""
    generator = torch.Generator().manual_seed(0)
    x_BSD = torch.randint(-3, 4, (B, S, D), generator=generator).float()
    return x_BSD, torch.randint(-3, 4, (D, D), generator=generator).float()


def _flow(function: Function, **own: Any) -> tuple[fx.Graph, BatchFlow]:
    graph = make_fx(function, tracing_mode="fake")(*_inputs()).graph
    first = next(iter(graph.nodes)).name
    return graph, find_axes(graph, [first], all_rules(own))


def _result(graph: fx.Graph) -> fx.Node:
    (result,) = graph.output_node().all_input_nodes
    return result


def _tokens(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, D)


def _places(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, 0].abs().long()


DIVIDED: dict[str, tuple[Function, Batch]] = {
    "pointwise": (lambda x, w: torch.relu(x) * 2 + w[0], Batch(0)),
    "operand broadcast in front": (lambda x, w: x + w[:S, :], Batch(0)),
    "where": (lambda x, w: torch.where(x > 0, x, 0.0), Batch(0)),
    "cast and copy": (lambda x, w: x.double().clone().detach(), Batch(0)),
    "like": (lambda x, w: torch.zeros_like(x) + x, Batch(0)),
    "tokens": (lambda x, w: _tokens(x), Batch(0, S)),
    "tokens split again": (lambda x, w: _tokens(x).view(-1, S, 2, D // 2), Batch(0)),
    "all in one dimension": (lambda x, w: x.reshape(-1), Batch(0, S * D)),
    "transpose": (lambda x, w: x.transpose(0, 1), Batch(1)),
    "transpose, then merge behind it": (lambda x, w: x.transpose(0, 1).reshape(S, -1), Batch(1, D)),
    "permute": (lambda x, w: x.permute(2, 0, 1), Batch(1)),
    "t": (lambda x, w: _tokens(x).t(), Batch(1, S)),
    "unsqueeze": (lambda x, w: x.unsqueeze(0), Batch(1)),
    "squeeze": (lambda x, w: x[:, :1].squeeze(1), Batch(0)),
    "expand": (lambda x, w: x[:, None].expand(x.shape[0], 2, S, D), Batch(0)),
    "select": (lambda x, w: x.transpose(0, 1)[1], Batch(0)),
    "slice": (lambda x, w: x[:, 1:], Batch(0)),
    "split": (lambda x, w: x.split(4, dim=-1)[1] + x.chunk(2, dim=-1)[0], Batch(0)),
    "unbind": (lambda x, w: x.unbind(1)[2], Batch(0)),
    "cat": (lambda x, w: torch.cat([x, x * 2], dim=1), Batch(0)),
    "stack": (lambda x, w: torch.stack([x, x]), Batch(1)),
    "sum over another dimension": (lambda x, w: x.transpose(0, 1).sum(0), Batch(0)),
    "sum that keeps it": (lambda x, w: x.sum(dim=(1, 2), keepdim=True), Batch(0)),
    "max": (lambda x, w: x.max(dim=-1).values, Batch(0)),
    "softmax": (lambda x, w: x.softmax(dim=-1), Batch(0)),
    "cumsum": (lambda x, w: x.cumsum(dim=1), Batch(0)),
    "topk": (lambda x, w: x.topk(2, dim=-1).indices, Batch(0)),
    "layer norm": (lambda x, w: F.layer_norm(x, (D,), w[0], w[1]), Batch(0)),
    "mm": (lambda x, w: _tokens(x) @ w, Batch(0, S)),
    "mm from the right": (lambda x, w: w @ _tokens(x).t(), Batch(1, S)),
    "addmm": (lambda x, w: F.linear(x, w, w[0]), Batch(0)),
    "bmm": (lambda x, w: x @ x.transpose(1, 2), Batch(0)),
    "bmm of rows": (lambda x, w: torch.bmm(x.transpose(0, 1), w.expand(S, D, D)), Batch(1)),
    "embedding": (lambda x, w: F.embedding(_places(x), w), Batch(0)),
    "index": (lambda x, w: w[_places(x)], Batch(0)),
    "gather": (lambda x, w: x.gather(2, x.argsort(-1)[:, :, :2]), Batch(0)),
}


@pytest.mark.parametrize(("function", "axis"), DIVIDED.values(), ids=DIVIDED.keys())
def test_axis_of_the_result(function: Function, axis: Batch) -> None:
    x, w = _inputs()
    graph, flow = _flow(function)
    assert flow.batch_size == B
    assert flow.axes[_result(graph)] == axis
    assert all(isinstance(call, Division) for call in flow.calls.values())
    parts = [function(part, w) for part in x.chunk(NUM_PARTS)]
    assert torch.equal(torch.cat(parts, axis.dim), function(x, w))


def test_attention_divides_samples() -> None:
    def attend(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q = x.view(-1, S, 2, D // 2).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    graph, flow = _flow(attend)
    assert flow.axes[_result(graph)] == Batch(0)


def test_sums_of_a_softmax_and_copies_to_the_host_as_inductor_has_them() -> None:
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
    flow = find_axes(graph, ["x"], all_rules({}))
    along, over, copy = calls
    assert flow.axes[along] == (Batch(0), Batch(0))
    refusal = flow.calls[over]
    assert isinstance(refusal, Refusal)
    assert refusal.reason.endswith("(prims::prepare_softmax_online) goes along the batch")
    assert flow.axes[copy] == Batch(0)


def test_whole_operand_gives_its_range() -> None:
    graph, flow = _flow(lambda x, w: x.transpose(0, 1) + torch.arange(x.numel()).view(S, B, D))
    (add,) = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    call = flow.calls[add]
    assert isinstance(call, Division)
    assert call.result == Batch(1)
    assert list(call.splits.values()) == [Batch(1)]


REFUSED: dict[str, tuple[Function, str, Batch | None]] = {
    "mean of all": (lambda x, w: x.mean(), "mean (aten::mean) goes over the batch", None),
    "sum over the batch": (lambda x, w: x.sum(0), "goes over the batch", None),
    "cumsum along it": (lambda x, w: x.cumsum(0), "goes along the batch", Batch(0)),
    "softmax over it": (lambda x, w: x.softmax(0), "goes along the batch", Batch(0)),
    "product that adds up": (lambda x, w: _tokens(x).t() @ _tokens(x), "adds up over", None),
    "one sample": (lambda x, w: x[1], "selects one of the batch", None),
    "some samples": (lambda x, w: x[1:], "takes a part of the batch", None),
    "batch behind": (lambda x, w: x.transpose(0, 1).reshape(-1, D), "behind another dim", None),
    "cat along it": (lambda x, w: torch.cat([x, x]), "joins along the batch", None),
    "two axes": (lambda x, w: _tokens(x).t()[:, :D] @ w, "takes a part of the batch", None),
    "outer sum": (lambda x, w: x[:, None] + x[None, :], "divided in several ways", None),
    "random": (lambda x, w: F.dropout(x, 0.5), "draws random numbers", Batch(0)),
    "no rule": (lambda x, w: torch.fft.rfft(x), "has no rule", None),
    "squeeze of all": (lambda x, w: x.squeeze(), "of a part of one sample", None),
    "batch norm": (lambda x, w: F.layer_norm(x, (B, S, D)), "normalizes over the batch", None),
}


@pytest.mark.parametrize(("function", "reason", "axis"), REFUSED.values(), ids=REFUSED.keys())
def test_refusal_says_why(function: Function, reason: str, axis: Batch | None) -> None:
    graph, flow = _flow(function)
    refusals = [call for call in flow.calls.values() if isinstance(call, Refusal)]
    assert any(reason in refusal.reason for refusal in refusals), refusals
    result = flow.axes[_result(graph)]
    assert result == axis


def test_value_without_axis_is_divided_again_beside_one_that_has_it() -> None:
    graph, flow = _flow(lambda x, w: torch.relu(x + torch.fft.ifft(torch.fft.fft(x)).real))
    assert flow.axes[_result(graph)] == Batch(0)


def test_own_rule_wins() -> None:
    def judge(call: Call) -> Division:
        return Division(result=call.axis(call.node.args[0]))

    graph, flow = _flow(lambda x, w: torch.fft.rfft(x).abs(), **{"aten::_fft_r2c": judge})
    assert flow.axes[_result(graph)] == Batch(0)


def _fail(call: Call) -> Division:
    raise KeyError("dim")


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (lambda call: None, TypeError, "must return a Division or a Refusal for .*, not None"),
        (lambda call: Division(result=(Batch(0),)), TypeError, "say how the one result of"),
        (_fail, RuntimeError, r"failed for .*: KeyError\('dim'\)"),
    ],
    ids=["nothing", "several results", "error"],
)
def test_rule_that_is_wrong_is_named(rule: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"the rule of aten::_fft_r2c .*{message}"):
        _flow(lambda x, w: torch.fft.rfft(x), **{"aten::_fft_r2c": rule})


def test_what_follows_a_dropout_is_divided() -> None:
    drop = torch.ops.aten.native_dropout.default
    graph, flow = _flow(lambda x, w: drop(x, 0.5, True)[0] * 2)
    assert flow.axes[_result(graph)] == Batch(0)


def test_weights_and_constants_are_whole() -> None:
    graph, flow = _flow(lambda x, w: w @ w.t() + torch.arange(D))
    assert flow.axes[_result(graph)] is None
    assert not flow.calls


def test_inputs_of_another_size_are_whole() -> None:
    graph = make_fx(lambda x, w: x + w[:B, None], tracing_mode="fake")(*_inputs()).graph
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    flow = find_axes(graph, names, all_rules({}))
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
        (2, False, "takes first choices of the whole batch before second ones"),
        (1, True, "ranks the tokens of the whole batch"),
    ],
)
def test_classes_of_gates(top_k: int, by_weight: bool, reason: str) -> None:
    graph, flow = _flow(_gate(top_k, by_weight))
    assert flow.axes[_result(graph)] == Batch(0, S)  # what follows may run on parts
    (call,) = (c for n, c in flow.calls.items() if "take_slots" in str(n.target))
    if reason:
        assert isinstance(call, Refusal)
        assert reason in re.sub(r"\s+", " ", call.reason)
    else:
        assert isinstance(call, Division)
        assert (call.result, call.carry) == ((Batch(0, S), Last()), (1, 1))
