"""Test gradient-ready hooks: equal gradients, received before the backward graph ends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

from halley.compiler import Backend
from halley.distributed.mesh import ParallelGroups
from halley.ops.gradient_hook import set_gradient_hook
from tests.compiler.model_case import (
    SEQ_LEN,
    AllToAllCalls,
    PaddedModel,
    build_narrow,
    make_input,
    whole_graphs,
)
from tests.moe.model_case import make_tokens


def _set_hooks(model: nn.Module, events: list[str]) -> dict[str, torch.Tensor]:
    """Set a hook on each parameter, which adds to the returned gradients and notes an event."""
    found: dict[str, torch.Tensor] = {}

    def take(name: str, gradient: torch.Tensor) -> None:
        events.append(name)
        found[name] = found[name] + gradient if name in found else gradient.clone()

    for name, parameter in model.named_parameters():
        set_gradient_hook(parameter, lambda gradient, name=name: take(name, gradient))
    return found


def _compile(model: nn.Module, **options: Any) -> Callable[..., Any]:
    options = {"inner": "eager", "memory_margin": 1.0, **options}
    return torch.compile(model, backend=Backend(), fullgraph=True, options=options)


def _build(kind: str, rank: int) -> tuple[nn.Module, Callable[[Any], torch.Tensor]]:
    """Return a model, and a function that calls it, given compiled, and returns a loss.

    The graph of a "narrow" model saves sizes for backward that depend on data.
    """
    if kind == "narrow":
        tokens_BS = make_tokens(rank, step=0, batch_size=2, seq_len=SEQ_LEN)
        model = build_narrow("dropless", ParallelGroups(ep=dist.group.WORLD), num_layers=2)
        return model, lambda call: call(tokens_BS).logits_BSV.square().sum()
    return PaddedModel(), lambda call: call(make_input(rank)).square().sum()


def _run_hooks(
    rank: int, num_ranks: int, kind: str, passes: str, inner: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:
    """Return gradients of hooks and of autograd over two backward passes, and events of one."""
    events: list[str] = []
    model, loss_of = _build(kind, rank)
    with whole_graphs():
        plain = _compile(model, passes=passes, inner=inner)
        for _ in range(2):
            loss_of(plain).backward()
        want = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        torch._dynamo.reset()
        found = _set_hooks(model, events)
        call = _compile(model, passes=passes, inner=inner)
        loss_of(call).backward()
        loss = loss_of(call)
        events.clear()
        with AllToAllCalls(events):
            loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    return found, want, events


@pytest.mark.parametrize(
    ("kind", "passes", "inner"),
    [("padded", "none", "eager"), ("padded", "wgrad", "inductor"), ("narrow", "wgrad", "eager")],
)
def test_gradients_come_while_backward_runs(
    run_ranks: Callable, kind: str, passes: str, inner: str
) -> None:
    for found, want, events in run_ranks(_run_hooks, 2, kind, passes, inner, timeout_s=240.0):
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], gradient) for name, gradient in want.items())
        assert sorted(set(events) - {"all-to-all"}) == sorted(want)
        assert len(events) == len(want) + events.count("all-to-all")
        last = len(events) - events[::-1].index("all-to-all")
        # The narrow model has experts in its last layer only, so most of its backward comes later.
        least = len(want) // 2 if kind == "padded" else 1
        assert len(set(events[:last]) - {"all-to-all"}) >= least


@pytest.fixture(autouse=True)
def _no_graphs():
    """Forget the graphs of other tests and of this one."""
    torch._dynamo.reset()
    with whole_graphs():
        yield


class _Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator))
        self.bias = nn.Parameter(torch.zeros(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight + self.bias).tanh() * self.frozen


def test_modules_that_share_a_graph_get_their_own_gradients() -> None:
    blocks = [_Block(seed) for seed in range(3)]
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(9))
    events: list[str] = []
    taken = [_set_hooks(block, events) for block in blocks]
    shared = torch.compile(_Block.forward, backend=Backend(), options={"inner": "eager"})
    y = x
    for block in blocks:
        y = shared(block, y)
    y.sum().backward()
    assert len(events) == 6
    for block, found in zip(blocks, taken, strict=True):
        assert found.keys() == {"weight", "bias"}
        assert block.weight.grad is None
        assert block.bias.grad is None
    y = x
    for block in blocks:
        y = block(y)
    y.sum().backward()
    for block, found in zip(blocks, taken, strict=True):
        torch.testing.assert_close(found["weight"], block.weight.grad)
        torch.testing.assert_close(found["bias"], block.bias.grad)


def test_parameter_without_hook_gets_its_gradient_from_autograd() -> None:
    block = _Block(0)
    found: list[torch.Tensor] = []
    set_gradient_hook(block.weight, lambda gradient: found.append(gradient.clone()))
    call = torch.compile(block, backend=Backend(), options={"inner": "eager"})
    call(torch.ones(2, 4)).sum().backward()
    assert block.weight.grad is None
    assert len(found) == 1
    assert block.bias.grad is not None


def test_missing_hook_of_a_graph_compiled_with_hooks_is_an_error() -> None:
    first, second = _Block(0), _Block(1)
    _set_hooks(first, [])
    shared = torch.compile(_Block.forward, backend=Backend(), options={"inner": "eager"})
    shared(first, torch.ones(2, 4)).sum().backward()
    y = shared(second, torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=r"shape \(4,?(, 4)?\) has no gradient_ready_hook"):
        y.sum().backward()
