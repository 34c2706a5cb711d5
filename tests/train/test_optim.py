"""The optimizer: its schedule by hand, clipping, float32 masters, and AdamW against torch's own."""

import math

import pytest
import torch
from torch import nn

from halley.core.config import OptimizerConfig
from halley.distributed.mesh import ParallelGroups
from halley.moe.experts import GroupedExperts
from halley.train.optim import ModelOptimizer, learning_rate


def _optimizer(model: nn.Module, **changes: object) -> ModelOptimizer:
    config = OptimizerConfig(**{"kind": "sgd", "clip_norm": 0.0, "weight_decay": 0.0, **changes})  # type: ignore[arg-type]
    return ModelOptimizer(model, config, groups=ParallelGroups())


def _linear(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Linear:
    model = nn.Linear(4, 3, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 8)
    return model


def _backward(model: nn.Module, value: float, optimizer: ModelOptimizer | None = None) -> None:
    """Give each element of all parameters the same gradient."""
    loss = sum((value * parameter).sum() for parameter in model.parameters())
    assert isinstance(loss, torch.Tensor)
    loss.backward() if optimizer is None else optimizer.backward(loss)


@pytest.mark.parametrize(
    ("step", "want"),
    [
        (0, 0.2),  # warm-up of 4 steps reaches 0.8 with its last
        (1, 0.4),
        (3, 0.8),
        (4, 0.8),  # the cosine begins at its top
        (8, 0.8 * (0.25 + 0.75 * 0.5)),  # half-way
        (6, 0.8 * (0.25 + 0.75 * (0.5 + math.sqrt(0.125)))),  # an eighth of a turn
        (12, 0.2),
        (100, 0.2),  # and stays
    ],
)
def test_learning_rate_by_hand(step: int, want: float):
    config = OptimizerConfig(learning_rate=0.8, warmup_steps=4, final_fraction=0.25)
    assert learning_rate(config, step, num_steps=12) == pytest.approx(want, rel=1e-12)


def test_learning_rate_without_warmup():
    config = OptimizerConfig(learning_rate=0.8, warmup_steps=0, final_fraction=0.0)
    rates = [learning_rate(config, step, num_steps=2) for step in range(3)]
    assert rates == pytest.approx([0.8, 0.4, 0.0])


def test_learning_rate_of_a_run_that_is_all_warmup():
    config = OptimizerConfig(learning_rate=0.8, warmup_steps=4)
    rates = [learning_rate(config, step, num_steps=4) for step in range(4)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8])


@pytest.mark.parametrize(("clip_norm", "want"), [(0.0, 6.0), (1.5, 1.5), (6.5, 6.0)])
def test_applied_gradient_has_the_norm_of_clipping(clip_norm: float, want: float):
    model = _linear(bias=False)
    optimizer = _optimizer(model, clip_norm=clip_norm)
    before = model.weight.detach().clone()
    _backward(model, math.sqrt(3.0), optimizer)  # of 12 elements: the norm is 6
    optimizer.sync()
    norm = optimizer.clip()
    optimizer.step(1.0)
    assert float(norm) == pytest.approx(6.0)
    assert float((before - model.weight.detach()).norm()) == pytest.approx(want, rel=1e-5)
    assert model.weight.grad is None


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.experts = GroupedExperts(
            num_experts=2,
            hidden_size=4,
            intermediate_size=4,
            up_size=8,
            bias=True,
            groups=ParallelGroups(),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_matrices_alone_decay(kind: str):
    model = _Experts()
    optimizer = _optimizer(model, kind=kind, weight_decay=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(8.0)
    _backward(model, 0.0, optimizer)
    optimizer.sync()
    optimizer.clip()
    optimizer.step(0.25)
    got = {name: parameter.unique().tolist() for name, parameter in model.named_parameters()}
    assert got == {
        "norm.weight": [8.0],
        "norm.bias": [8.0],
        "experts.gate_up_proj": [7.0],
        "experts.down_proj": [7.0],
        "experts.gate_up_proj_bias": [8.0],  # a vector an expert, stacked
        "experts.down_proj_bias": [8.0],
    }


def test_adamw_is_that_of_torch():
    config = {"weight_decay": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6}
    model, peer = _linear(), _linear()
    optimizer = _optimizer(model, kind="adamw", **config)
    decay = [
        {"params": [peer.weight], "weight_decay": 0.1},
        {"params": [peer.bias], "weight_decay": 0.0},
    ]
    torch_optimizer = torch.optim.AdamW(decay, betas=(0.8, 0.9), eps=1e-6)
    for step in range(1, 4):
        for group in torch_optimizer.param_groups:
            group["lr"] = 0.5 / step
        peer.zero_grad()
        _backward(peer, float(step - 2))
        _backward(model, float(step - 2), optimizer)
        optimizer.sync()
        optimizer.clip()
        optimizer.step(0.5 / step)
        torch_optimizer.step()
    torch.testing.assert_close(model.state_dict(), peer.state_dict(), rtol=0, atol=0)


def test_float32_parameters_are_their_own_masters():
    model = _linear()
    optimizer = _optimizer(model)
    assert all(optimizer.masters[name] is p for name, p in model.named_parameters())


def test_bfloat16_gradients_and_updates_are_added_in_float32():
    model = _linear(torch.bfloat16, bias=False)
    optimizer = _optimizer(model)
    for value in (256.0, 1.0, 1.0):  # in bfloat16 256 + 1 is 256
        _backward(model, value, optimizer)
    assert model.weight.grad is None
    optimizer.sync()
    grad = optimizer.masters["weight"].grad
    assert grad is not None
    assert grad.unique().tolist() == [258.0]
    optimizer.clip()
    master = optimizer.masters["weight"]
    with torch.no_grad():
        master.fill_(1.0)
    optimizer.step(2.0**-18)
    assert master.unique().tolist() == [1.0 - 258 / 2**18]
    assert model.weight.unique().tolist() == [1.0]  # bfloat16 below 1 goes in steps of 2**-8


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_copied_into_another_optimizer_goes_on_alike(kind: str, dtype: torch.dtype):
    first, second = _linear(dtype), nn.Linear(4, 3, dtype=dtype)
    old, new = _optimizer(first, kind=kind), _optimizer(second, kind=kind)

    def take_step(model: nn.Module, optimizer: ModelOptimizer, value: float) -> None:
        _backward(model, value, optimizer)
        optimizer.sync()
        optimizer.clip()
        optimizer.step(0.125)

    for value in (1.0, -3.0):
        take_step(first, old, value)
    with torch.no_grad():
        for group, tensors in new.state().items():
            for name, tensor in tensors.items():  # type: ignore[union-attr]
                tensor.copy_(old.state()[group][name])  # type: ignore[index]
    new.resume(2)
    for value in (0.5, 2.0):
        take_step(first, old, value)
        take_step(second, new, value)
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(new.state(), old.state(), rtol=0, atol=0)
