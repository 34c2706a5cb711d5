"""Gradient buckets: sums over microbatches and ranks during backward, compared with autograd."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halley.core.config import OptimizerConfig
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.train import optim
from halley.train.optim import GradientBuckets, ModelOptimizer


SIZES = (3, 5, 2, 4)  # of one parameter each; the second and the last are experts'


class _Chain(nn.Module):
    """Parameters that meet one after another, so that backward comes to the last one first."""

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

    for _ in range(2):  # the second step begins anew
        under_way.clear()
        for microbatch in range(num_microbatches):
            last = microbatch + 1 == num_microbatches
            handle = model.parts[0].register_hook(count_sums)  # before its gradient is taken
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


def test_microbatches_are_added_in_float32(run_ranks: Callable) -> None:
    for got, want, _ in run_ranks(_sums, 2, 1, 3, torch.float32):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def _small_buckets(rank: int, num_ranks: int, *case) -> tuple[dict, dict, list[int]]:
    optim.BUCKET_BYTES = 1  # a parameter each
    return _sums(rank, num_ranks, *case)


def test_sums_begin_in_the_last_backward_pass(run_ranks: Callable) -> None:
    for got, want, under_way in run_ranks(_small_buckets, 2, 1, 2, torch.float32):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        # None in the first microbatch; in the last all but that of the first parameter.
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
    _loss(model, 0, 0).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    with pytest.raises(RuntimeError, match="stop here"):
        optimizer.backward(_Stop.apply(_loss(model, 0, 0)))
    _loss(model, 0, 0).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class _Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("stop here")
