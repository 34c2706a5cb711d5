"""Fused layers add weight gradients to ``main_grad`` buffers of the weights, as in Megatron."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from halley.core.types import Experts, Routing
from halley.fused.buffers import Workspaces
from tests.strategies.layer_case import (
    CPU,
    LayerCase,
    assert_close,
    build,
    expected,
    gradients,
    local_experts_of,
    make_inputs,
    make_tokens,
)


CASE = LayerCase(num_tokens_W=(9,), num_experts=4)
Forward = Callable[[torch.Tensor, Routing, Experts], torch.Tensor]


def _microbatch(forward: Forward, experts: Experts, case: LayerCase) -> torch.Tensor:
    """Run a layer forward and backward with the given experts; return the tokens' gradient."""
    x_TD, routing, grad_TD = make_tokens(case, 0)
    forward(x_TD, routing, experts).backward(grad_TD)
    assert x_TD.grad is not None
    return x_TD.grad


def _add_main_grad(experts: Experts, *names: str) -> dict[str, torch.Tensor]:
    """Give weights float32 buffers for their gradients, as Megatron does; return the buffers."""
    weights = experts.tensors()
    buffers = {name: torch.zeros(weights[name].shape) for name in names or weights}
    for name, buffer in buffers.items():
        vars(weights[name]).update(main_grad=buffer, grad_added_to_main_grad=False)
    return buffers


def _is_added(weight: torch.Tensor) -> bool:
    return weight.grad is None and vars(weight)["grad_added_to_main_grad"]


def _check(grads: dict[str, torch.Tensor]) -> None:
    """Compare gradients of the weights of ``CASE`` with the reference."""
    want = expected(CASE, 0)
    for name, grad in grads.items():
        assert_close(grad, want[f"{name}.grad"], name)


def test_main_grad_is_added_to() -> None:
    forward = build(Workspaces(None, CPU)).forward
    cases = [LayerCase(num_tokens_W=t, num_experts=4, dtype=torch.bfloat16) for t in ((9,), (3,))]
    alone: list[dict[str, torch.Tensor]] = []
    for case in cases:
        plain, experts = local_experts_of(case, 0), local_experts_of(case, 0)
        buffers = _add_main_grad(experts)
        dx_TD = _microbatch(forward, plain, case)
        assert torch.equal(_microbatch(forward, experts, case), dx_TD)
        for name, grad in gradients(plain).items():
            assert torch.equal(buffers[name].bfloat16(), grad)  # the same sum before its rounding
            assert not torch.equal(buffers[name], grad.float())
        alone.append(buffers)
    experts = local_experts_of(cases[0], 0)
    buffers = _add_main_grad(experts)
    for case in cases:
        _microbatch(forward, experts, case)
    assert all(map(_is_added, experts.tensors().values()))
    wants = [expected(case, 0) for case in cases]
    for name, buffer in buffers.items():
        assert torch.equal(buffer, alone[0][name] + alone[1][name]), name
        want = wants[0][f"{name}.grad"] + wants[1][f"{name}.grad"]
        assert_close(buffer, want, name, dtype=torch.bfloat16)


def test_main_grad_of_a_layer_in_parts() -> None:
    """Each buffer gets one gradient, summed over the rows of both parts."""
    experts = local_experts_of(CASE, 0)
    buffers = _add_main_grad(experts)
    x_TD, routing, grad_TD = make_tokens(CASE, 0)
    run = build(Workspaces(None, CPU)).open_parts(experts)
    y_parts: list[torch.Tensor] = []
    for part in (slice(0, 4), slice(4, 9)):
        idx_TK, weights_TK = routing.topk_idx_TK[part], routing.topk_weights_TK[part]
        y_parts.append(run(x_TD[part], Routing(topk_idx_TK=idx_TK, topk_weights_TK=weights_TK)))
    torch.cat(y_parts).backward(grad_TD)
    assert all(map(_is_added, experts.tensors().values()))
    _check(buffers)


def test_main_grad_of_one_projection() -> None:
    experts = local_experts_of(CASE, 0)
    buffers = _add_main_grad(experts, "down_LDF")
    _microbatch(build(Workspaces(None, CPU)).forward, experts, CASE)
    assert _is_added(experts.down_LDF)
    assert experts.up_LGD.grad is not None
    _check({"up_LGD": experts.up_LGD.grad, **buffers})


def _checkpointed(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    y_TD = checkpoint(run, use_reentrant=False)
    assert isinstance(y_TD, torch.Tensor)
    return y_TD


def _offloaded(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return run()


@pytest.mark.parametrize("how", [_checkpointed, _offloaded])
def test_main_grad_of_weights_that_autograd_returns_as_other_tensors(
    how: Callable[[Callable[[], torch.Tensor]], torch.Tensor],
) -> None:
    layer, inputs = build(Workspaces(None, CPU)), make_inputs(CASE, 0)
    buffers = _add_main_grad(inputs.experts)
    how(lambda: layer.forward(*inputs)).backward(make_tokens(CASE, 0)[2])
    assert all(map(_is_added, inputs.experts.tensors().values()))
    _check(buffers)


def test_compiled_layer_does_not_add_to_main_grad() -> None:
    """It returns gradients, and the flag tells that they are not in ``main_grad``."""
    layer, experts = build(Workspaces(None, CPU)), local_experts_of(CASE, 0)
    buffers = _add_main_grad(experts)
    torch.compiler.reset()
    compiled = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    _microbatch(compiled, experts, CASE)
    _check(gradients(experts))
    for name, weight in experts.tensors().items():
        assert not vars(weight)["grad_added_to_main_grad"]
        assert not buffers[name].any()


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: torch.zeros(weight.numel()),
        lambda weight: torch.zeros(weight.shape[::-1]).permute(2, 1, 0),
        lambda weight: torch.zeros(weight.shape, dtype=torch.float16),
        lambda weight: torch.zeros(weight.numel() + 1)[1:].view(weight.shape),
    ],
    ids=["flat", "strided", "half", "unaligned"],
)
def test_unsupported_main_grad_buffer_is_an_error(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    inputs = make_inputs(CASE, 0)
    vars(inputs.experts.down_LDF)["main_grad"] = make(inputs.experts.down_LDF)
    with pytest.raises(ValueError, match=r"main_grad \(torch.*must be contiguous, begin on a"):
        build(Workspaces(None, CPU)).forward(*inputs)
