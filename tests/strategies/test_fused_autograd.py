"""Gradients of the fused strategy on one rank, for all inputs and hooks that autograd allows."""

import dataclasses
import gc
from collections.abc import Callable

import pytest
import torch

from halley.core.types import Experts, Routing, Save
from halley.fused.buffers import Workspaces
from tests.strategies.layer_case import (
    CPU,
    SAVES,
    LayerCase,
    assert_close,
    assert_same,
    build,
    check_values,
    expected,
    local_experts_of,
    make_tokens,
    run_forward,
    strided,
    train,
)


ALONE = LayerCase(num_tokens_W=(8,), num_experts=4)


def _unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values at an address that is not aligned for vector loads."""
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


def test_strided_unaligned_or_expanded_gradients_of_the_output() -> None:
    """The gradient of a sum is one number, expanded to the shape of the output."""
    layer = build(Workspaces(None, CPU))

    def run(make: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        call = run_forward(layer.forward, ALONE, 0)
        call.y_TD.backward(make(call.grad_TD))
        return call.values()

    want = run(lambda grad_TD: grad_TD)
    for make in (strided, _unaligned):
        assert_same(run(make), want, make.__name__)
    ones = run(torch.ones_like)
    assert_same(run(lambda grad_TD: torch.ones(()).expand(grad_TD.shape)), ones, "expanded")


@pytest.mark.parametrize(
    ("name", "save"), [("x", "all"), ("x", "recompute"), ("weights", "inputs"), ("ids", "all")]
)
def test_strided_tokens_and_routing(name: str, save: Save) -> None:
    layer = build(Workspaces(None, CPU), save=save)
    x_TD, routing, grad_TD = make_tokens(ALONE, 0)
    leaves = {"x": x_TD, "weights": routing.topk_weights_TK}
    if name != "ids":
        leaves[name] = strided(leaves[name]).requires_grad_()
    ids_TK = strided(routing.topk_idx_TK) if name == "ids" else routing.topk_idx_TK
    routing = Routing(topk_idx_TK=ids_TK, topk_weights_TK=leaves["weights"])
    layer.forward(leaves["x"], routing, local_experts_of(ALONE, 0)).backward(grad_TD)
    for key, leaf in leaves.items():
        assert leaf.grad is not None
        assert_close(leaf.grad, expected(ALONE, 0)[f"{key}.grad"], key)


@pytest.mark.parametrize("save", SAVES)
def test_saved_tensors_may_be_unpacked_from_one_shared_buffer(save: Save) -> None:
    """Hooks that offload tensors return other memory, here an arena for two layers.

    A layer must not free memory of the other layer.
    """
    arena, end = torch.empty(1 << 20, dtype=torch.uint8), 0

    def pack(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        nonlocal end
        begin, end = end, end + -(-tensor.nbytes // 64) * 64
        part = arena[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        part.copy_(tensor)
        return lambda: part

    strategy = build(Workspaces(None, CPU), save=save)

    def run_twice(x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        return strategy.forward(strategy.forward(x_TD, routing, experts), routing, experts)

    values: list[dict[str, torch.Tensor]] = []
    for hooks in ((lambda t: t, lambda t: t), (pack, lambda unpack: unpack())):
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            values.append(train(run_twice, ALONE, 0))
    assert len(values[0]) == 5
    assert_same(values[1], values[0], save)


def test_backward_after_the_layer_is_deleted() -> None:
    call = run_forward(build(Workspaces(None, CPU)).forward, ALONE, 0)
    gc.collect()
    call.y_TD.backward(call.grad_TD)
    check_values(call.values(), ALONE, 0)


@pytest.mark.parametrize(
    ("frozen", "save"),
    [
        (("up_LGD",), "all"),
        (("down_LDF",), "inputs"),
        (("up_LGD", "down_LDF"), "recompute"),
        (("x", "weights"), "all"),
    ],
    ids=["up", "down", "experts", "tokens"],
)
def test_frozen_parts(frozen: tuple[str, ...], save: Save) -> None:
    """Frozen tensors get no gradient, and the gradients of the others do not change."""
    layer = build(Workspaces(None, CPU), save=save)
    got, want = train(layer.forward, ALONE, 0, frozen=frozen), expected(ALONE, 0)
    assert set(want) - set(got) == {f"{name}.grad" for name in frozen}
    for name, value in got.items():
        assert_close(value, want[name], name)


@pytest.mark.parametrize(
    ("frozen", "save"),
    [((), "all"), ((), "inputs"), ((), "recompute"), (("up_LGD", "down_LDF"), "all")],
    ids=["all", "inputs", "recompute", "tokens only"],
)
def test_second_derivative_is_refused(frozen: tuple[str, ...], save: Save) -> None:
    """If only the tokens need gradients, autograd itself would raise no error."""
    layer = build(Workspaces(None, CPU), save=save)
    call = run_forward(layer.forward, ALONE, 0, frozen=frozen)
    with pytest.raises(RuntimeError, match="gradients of fused layers have no gradients"):
        torch.autograd.grad(call.y_TD, call.leaves["x"], call.grad_TD, create_graph=True)


@pytest.mark.parametrize("save", SAVES)
def test_backward_after_close_is_an_error(save: Save) -> None:
    """The error is the same if the layer has new buffers, because they do not hold the plan."""
    layer = build(Workspaces(None, CPU), save=save)
    for num_tokens in (0, 3):
        call = run_forward(layer.forward, ALONE, 0)
        layer.workspaces.close()
        if num_tokens:
            run_forward(layer.forward, dataclasses.replace(ALONE, num_tokens_W=(num_tokens,)), 0)
        with pytest.raises(RuntimeError, match="were closed before its backward"):
            call.y_TD.backward(call.grad_TD)
