"""Models and FSDP-sharded layers with the strategy "fused" equal those with "sequential"."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from halley.distributed.mesh import ParallelGroups, build_groups
from halley.moe.layer import MoELayer
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from tests.moe.model_case import MODELS, build_layer, build_model, destroy, make_tokens, run_step
from tests.rank_pool import RunRanks


TOLERANCE = RELATIVE_TOLERANCE[torch.float32]


def _step(layer: MoELayer, rank: int) -> torch.Tensor:
    """Run forward and backward on the tokens of the rank; return the output."""
    generator = torch.Generator().manual_seed(100 + rank)
    shape = (5 + 3 * rank, MODELS["softmax"].hidden_size)
    out = layer(torch.randn(shape, generator=generator))
    (out.y.square().sum() + out.router_loss).backward()
    return out.y.detach()


def _gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def _train(groups: ParallelGroups, **options: Any) -> dict[str, torch.Tensor]:
    """Return the summed losses and gradients of two microbatches of a model."""
    model = build_model(MODELS["shared experts"], groups=groups, **options)
    tokens = [make_tokens(groups.rank, batch_size=1, step=step) for step in range(2)]
    losses = [run_step(model, tokens_BS) for tokens_BS in tokens]
    return {"losses": torch.stack(losses), **_gradients(model)}


def _compare_models(rank: int, num_ranks: int) -> None:
    groups = build_groups(0, device_type="cpu")
    want, fused = (_train(groups, strategy=name) for name in ("sequential", "fused"))
    checkpointed = _train(groups, strategy="fused", activation_checkpointing=True)
    for name, value in want.items():
        assert relative_error(fused[name], value) <= TOLERANCE, name
        assert torch.equal(checkpointed[name], fused[name]), name
    for strategy in ("deduplicated", "hierarchical:1"):
        across = _train(groups, strategy=strategy)
        for name, value in want.items():
            assert relative_error(across[name], value) <= TOLERANCE, (strategy, name)
    destroy(groups)


def test_models_have_equal_losses_and_gradients(run_ranks: RunRanks) -> None:
    """Results of "fused", and of strategies across nodes, are those of "sequential".

    Activation checkpointing changes no bit.
    """
    run_ranks(_compare_models, 2)


def _shard(rank: int, num_ranks: int) -> None:
    """Train a layer whose weights FSDP shards over the two ranks that have the same experts."""
    groups = build_groups(2, device_type="cpu")
    assert groups.mesh is not None
    plain, sharded = (build_layer("softmax", groups, name) for name in ("sequential", "fused"))
    want = _step(plain, rank)
    fully_shard(sharded, mesh=groups.mesh["edp"])
    for _ in range(2):  # FSDP gathers the weights into other memory for each pass
        sharded.zero_grad()
        # FSDP changes the output, which is a view, in place.
        with warnings.catch_warnings(action="ignore"):
            assert relative_error(_step(sharded, rank), want) <= TOLERANCE
    for name, value in _gradients(sharded).items():
        mean = _gradients(plain)[name].clone()
        dist.all_reduce(mean, group=groups.edp)
        assert relative_error(value, mean / 2) <= TOLERANCE, name
    destroy(groups)


def test_experts_sharded_by_fsdp_have_equal_gradients(run_ranks: RunRanks) -> None:
    run_ranks(_shard, 4)


@pytest.mark.parametrize("strategy", ["sequential", "fused"])
def test_autocast_equals_the_layer_in_that_dtype(strategy: str) -> None:
    layer = build_layer("softmax", ParallelGroups(), strategy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = _step(layer, 2)
    gradients = _gradients(layer)
    assert got.dtype == torch.bfloat16
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    reference = build_layer("softmax", ParallelGroups(), "sequential")
    want = _step(reference, 2)
    assert 0 < relative_error(got, want) <= RELATIVE_TOLERANCE[torch.bfloat16]
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        error = relative_error(gradients[name], _gradients(reference)[name])
        assert 0 < error <= RELATIVE_TOLERANCE[torch.bfloat16], name
