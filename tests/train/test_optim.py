"""The optimizer by hand, and gradient buckets whose sums equal those of autograd."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halley.core.config import MoEConfig, OptimizerConfig
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.moe.layer import GroupedExperts
from halley.train import optim
from halley.train.optim import GradientBuckets, ModelOptimizer, learning_rate


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


def _apply(optimizer: ModelOptimizer, rate: float) -> torch.Tensor:
    """Take a step; return the norm of the gradients before clipping."""
    optimizer.sync()
    norm = optimizer.clip()
    optimizer.step(rate)
    return norm


@pytest.mark.parametrize(
    ("warmup_steps", "final_fraction", "num_steps", "want"),
    [
        # Warm-up of 4 steps reaches 0.8 with its last. Step 8 is half of the cosine, 12 its end.
        (4, 0.25, 12, {0: 0.2, 1: 0.4, 3: 0.8, 4: 0.8, 8: 0.5, 12: 0.2, 100: 0.2}),
        (4, 0.25, 12, {6: 0.8 * (0.25 + 0.75 * (0.5 + math.sqrt(0.125)))}),
        (0, 0.0, 2, {0: 0.8, 1: 0.4, 2: 0.0}),
        (4, 0.1, 4, {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8}),  # warm-up alone
    ],
)
def test_learning_rate_by_hand(
    warmup_steps: int, final_fraction: float, num_steps: int, want: dict[int, float]
):
    config = OptimizerConfig(
        learning_rate=0.8, warmup_steps=warmup_steps, final_fraction=final_fraction
    )
    got = {step: learning_rate(config, step, num_steps=num_steps) for step in want}
    assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(("clip_norm", "want"), [(0.0, 6.0), (1.5, 1.5), (6.5, 6.0)])
def test_applied_gradient_has_the_norm_of_clipping(clip_norm: float, want: float):
    model = _linear(bias=False)
    optimizer = _optimizer(model, clip_norm=clip_norm)
    before = model.weight.detach().clone()
    _backward(model, math.sqrt(3.0), optimizer)  # the gradient has 12 elements, so its norm is 6
    assert float(_apply(optimizer, 1.0)) == pytest.approx(6.0)
    assert float((before - model.weight.detach()).norm()) == pytest.approx(want, rel=1e-5)
    assert model.weight.grad is None


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.experts = GroupedExperts(
            MoEConfig(num_experts=2, top_k=1, intermediate_size=4, expert_bias=True), 4,
            groups=ParallelGroups(), dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_matrices_alone_decay(kind: str):
    model = _Experts()
    optimizer = _optimizer(model, kind=kind, weight_decay=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(8.0)
    _backward(model, 0.0, optimizer)
    _apply(optimizer, 0.25)
    got = {name: parameter.unique().tolist() for name, parameter in model.named_parameters()}
    assert got == {
        "norm.weight": [8.0],
        "norm.bias": [8.0],
        "experts.gate_up_proj": [7.0],
        "experts.down_proj": [7.0],
        "experts.gate_up_proj_bias": [8.0],  # a stack with a bias vector for each expert
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
        _apply(optimizer, 0.5 / step)
        torch_optimizer.step()
    torch.testing.assert_close(model.state_dict(), peer.state_dict(), rtol=0, atol=0)


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
    assert model.weight.unique().tolist() == [1.0]  # bfloat16 values below 1 have steps of 2**-8


SIZES = (3, 5, 2, 4)  # one parameter each; the second and last are of experts


class _Chain(nn.Module):
    """Parameters in a chain of operations, so that backward reaches the last one first."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ParameterList(
            nn.Parameter(torch.linspace(0.5, 1.5, size).to(dtype)) for size in SIZES
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, part in enumerate(self.parts):
            x = (x * part).sum() * (1 + index) / 8
        return x


EXPERTS = {"parts.1": None, "parts.3": None}


def _loss(model: nn.Module, rank: int, microbatch: int) -> torch.Tensor:
    return model(torch.tensor(1.0 + rank + microbatch / 4)).float()


def _sums(
    rank: int, num_ranks: int, ep_size: int, num_microbatches: int, dtype: torch.dtype
) -> tuple[dict, dict, list[int]]:
    groups = build_groups(ep_size, device_type="cpu")
    model = _Chain(dtype)
    parameters = dict(model.named_parameters())
    own = GradientBuckets(parameters, EXPERTS, groups=groups)
    under_way: list[int] = []

    def count_sums(_: torch.Tensor) -> None:
        under_way.append(sum(bucket.sum is not None for bucket in own._buckets))

    for _ in range(2):  # the second step starts from empty buckets
        under_way.clear()
        for microbatch in range(num_microbatches):
            last = microbatch + 1 == num_microbatches
            handle = model.parts[0].register_hook(count_sums)  # before its bucket gets the gradient
            with own.collecting(last=last):
                _loss(model, rank, microbatch).backward()
            handle.remove()
        assert all(parameter.grad is None for parameter in parameters.values())
        got = {name: sums.clone() for name, sums in own.wait_for_sums().items()}
        own.clear()
    for microbatch in range(num_microbatches):
        _loss(model, rank, microbatch).backward()
    want = {name: p.grad.float() for name, p in parameters.items() if p.grad is not None}
    for name, total in want.items():
        group = groups.edp if name in EXPERTS else groups.world
        if group is not None:
            dist.all_reduce(total, group=group)
    return got, want, under_way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_sums_are_those_of_autograd(run_ranks: Callable, ep_size: int, dtype: torch.dtype) -> None:
    for got, want, _ in run_ranks(_sums, 4, ep_size, 1, dtype):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def _small_buckets(rank: int, num_ranks: int, *case) -> tuple[dict, dict, list[int]]:
    optim.BUCKET_BYTES = 1  # one bucket for each parameter
    return _sums(rank, num_ranks, *case)


def test_sums_of_microbatches_begin_in_the_last_backward_pass(run_ranks: Callable) -> None:
    for got, want, under_way in run_ranks(_small_buckets, 2, 1, 2, torch.float32):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        # No sum starts in the first microbatch. In the last, all but the first parameter's start.
        assert under_way == [0, len(SIZES) - 1]


def test_a_parameter_without_a_gradient_is_named() -> None:
    model = _Chain(torch.float32)
    own = GradientBuckets(dict(model.named_parameters()), {}, groups=ParallelGroups())
    with (
        pytest.raises(AssertionError, match=r"\['parts.0', 'parts.1'\] have no gradient"),
        own.collecting(last=True),
    ):
        (model.parts[2].sum() * model.parts[3].sum()).backward()


def test_hooks_are_gone_after_backward() -> None:
    model = _Chain(torch.float32)
    config = OptimizerConfig(kind="sgd", clip_norm=0.0)
    optimizer = ModelOptimizer(model, config, groups=ParallelGroups())
    optimizer.backward(_loss(model, 0, 0))
    for _ in range(2):
        _loss(model, 0, 0).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()
        with pytest.raises(RuntimeError, match="stop here"):
            optimizer.backward(_Stop.apply(_loss(model, 0, 0)))


class _Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("stop here")
