"""``halley.MoE`` builds its groups; it and its parts equal the reference on one and two ranks."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import halley
from halley.core.config import MoEConfig
from halley.core.reference import moe_reference
from halley.core.types import Activation
from halley.moe.dense import FeedForward
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from tests.gpus import needs_kernels
from tests.moe.model_case import CPU
from tests.rank_pool import RunRanks


SIZES = {"hidden_size": 16, "num_experts": 8, "top_k": 2, "intermediate_size": 8, "device": "cpu"}
NUM_TOKENS = (9, 5)  # of each rank


def _tokens(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(NUM_TOKENS[rank], 16, generator=generator)


def _expected(num_ranks: int) -> dict[str, torch.Tensor]:
    """Return outputs of all ranks, and gradients of the mean of the ranks' losses."""
    layer = halley.MoE(**SIZES, seed=3).layer
    outputs = []
    for rank in range(num_ranks):
        routed = layer.router(_tokens(rank))
        outputs.append(moe_reference(_tokens(rank), routed.routing, layer.local_experts()))
        loss = outputs[-1].square().mean() + routed.loss
        (loss / num_ranks).backward()
    grads = {f"{name}.grad": parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": torch.cat(outputs).detach()} | {n: g for n, g in grads.items() if g is not None}


def _assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert relative_error(got, want) <= RELATIVE_TOLERANCE[torch.float32]


def _train_step(rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """Run the steps of the class docstring; return output and gradients of this rank."""
    layer = halley.MoE(**SIZES, seed=3, strategy="sequential")
    y_TD = layer(_tokens(rank))
    assert isinstance(y_TD, torch.Tensor)
    assert int(layer.expert_counts.sum()) == 2 * NUM_TOKENS[rank]
    (y_TD.square().mean() + layer.aux_loss).backward()
    layer.sync_gradients()
    names = ("router.weight", "experts.gate_up_proj", "experts.down_proj")
    values = {"y": y_TD.detach()}
    parameters = (*layer.shared_parameters(), *layer.expert_parameters())
    for name, parameter in zip(names, parameters, strict=True):
        assert parameter.grad is not None
        values[f"{name}.grad"] = parameter.grad
    return values


def test_one_rank_equals_the_reference() -> None:
    got, want = _train_step(0, 1), _expected(1)
    assert got.keys() == want.keys()
    for name, value in want.items():
        _assert_close(got[name], value)


@needs_kernels
def test_default_device_is_the_gpu_and_values_equal_the_reference() -> None:
    """In float32, "auto" measures the strategies on collectives; in bfloat16 also "fused"."""
    sizes = {name: value for name, value in SIZES.items() if name != "device"}
    for dtype in (torch.float32, torch.bfloat16):
        moe = halley.MoE(**sizes, seed=3, dtype=dtype)
        x_TD = _tokens(0).to("cuda", dtype)
        with torch.no_grad():
            want_TD = moe_reference(x_TD, moe.layer.router(x_TD).routing, moe.layer.local_experts())
        y_TD = moe(x_TD)
        assert y_TD.device.type == "cuda"
        assert relative_error(y_TD.detach(), want_TD) <= RELATIVE_TOLERANCE[dtype]


def test_two_ranks_equal_the_reference(run_ranks: RunRanks) -> None:
    """The experts are spread over the default group, their initial weights those of one rank."""
    ranks, want = run_ranks(_train_step, 2), _expected(2)
    _assert_close(torch.cat([got["y"] for got in ranks]), want["y"])
    for got in ranks:
        _assert_close(got["router.weight.grad"], want["router.weight.grad"])
    for name in ("experts.gate_up_proj.grad", "experts.down_proj.grad"):
        _assert_close(torch.cat([got[name] for got in ranks]), want[name])


def test_batch_of_sequences_equals_its_tokens() -> None:
    layer = halley.MoE(**SIZES, seed=0)
    x_BSD = torch.randn(2, 3, 16)
    y_BSD = layer(x_BSD)
    y_TD, aux_loss, expert_counts = layer(x_BSD.flatten(0, 1), return_aux=True)
    assert y_BSD.shape == (2, 3, 16)
    assert torch.equal(y_BSD.flatten(0, 1), y_TD)
    assert aux_loss is layer.aux_loss
    assert expert_counts is layer.expert_counts


def _draw(rank: int, num_ranks: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)  # only the first rank's generator matters
    layers = [halley.MoE(**SIZES, strategy="sequential") for _ in range(2)]
    return [layer.layer.router.weight.detach() for layer in layers]


def test_layers_without_a_seed_differ_but_ranks_agree(run_ranks: RunRanks) -> None:
    (first, second), other_rank = run_ranks(_draw, 2)
    assert not torch.equal(first, second)
    assert torch.equal(first, other_rank[0])
    assert torch.equal(second, other_rank[1])


def test_group_of_some_ranks_is_used(run_ranks: RunRanks) -> None:
    """Each rank forms a group alone, so each holds all experts."""
    assert run_ranks(_count_alone, 2) == [8, 8]


def _count_alone(rank: int, num_ranks: int) -> int:
    group = [dist.new_group([0]), dist.new_group([1])][rank]
    assert isinstance(group, dist.ProcessGroup)
    layer = halley.MoE(**SIZES, group=group, strategy="sequential")
    dist.destroy_process_group(group)
    return layer.layer.experts.placement.num_local


def test_torchrun_environment_starts_the_group() -> None:
    code = (
        "import torch, halley, torch.distributed as dist\n"
        "halley.MoE(hidden_size=16, num_experts=8, top_k=2, intermediate_size=8, device='cpu')\n"
        "print(dist.get_backend(), dist.get_world_size())\n"
        "dist.destroy_process_group()"
    )
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, env=os.environ | launched, capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.split() == ["gloo", "1"]


def test_strategy_object_is_run() -> None:
    place = {"recorder": halley.Recorder("cpu"), "device": "cpu"}
    strategy = halley.build_strategy("sequential", None, **place)
    moe = halley.MoE(**SIZES, strategy=strategy)
    assert moe.layer.strategy is strategy
    moe(torch.randn(4, 16))
    assert moe.expert_counts.sum() == 8


def test_compiled_layer_has_the_values_of_the_eager_one() -> None:
    layer = halley.MoE(**SIZES, seed=1, strategy="functional")
    x_TD = torch.randn(6, 16)
    assert torch.equal(halley.compile(layer, inner="eager")(x_TD), layer(x_TD))
    with pytest.raises(ValueError, match=r"options \(speed\) must be of"):
        halley.compile(layer, speed="high")
    torch.compiler.reset()


CONFIG = MoEConfig(num_experts=4, top_k=2, intermediate_size=8, shared_intermediate_size=12)


def _build(config: MoEConfig, dtype: torch.dtype = torch.float32) -> halley.MoELayer:
    place = {"recorder": halley.Recorder(CPU), "device": CPU}
    strategy = halley.build_strategy("sequential", None, **place)
    layer = halley.MoELayer(config, 16, strategy=strategy, dtype=dtype)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            generator = torch.Generator().manual_seed(seed)
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return layer


@pytest.mark.parametrize(
    ("activation", "expert_bias", "gate"), [("swiglu", False, True), ("gelu", True, False)]
)
def test_output_is_the_sum_of_routed_and_shared_experts(
    activation: Activation, expert_bias: bool, gate: bool
) -> None:
    config = dataclasses.replace(
        CONFIG, activation=activation, expert_bias=expert_bias, shared_gate=gate
    )
    layer = _build(config)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(9))
    out = layer(x)
    x_TD = x.view(10, 16)
    routed = layer.router(x_TD)
    w = dict(layer.named_parameters())
    h_TF = x_TD @ w["shared_expert.up_proj.weight"].T
    if activation == "swiglu":
        h_TF = F.silu(x_TD @ w["shared_expert.gate_proj.weight"].T) * h_TF
    else:
        h_TF = F.gelu(h_TF)
    shared_TD = h_TF @ w["shared_expert.down_proj.weight"].T
    if gate:
        shared_TD = torch.sigmoid(x_TD @ w["shared_expert_gate.weight"].T) * shared_TD
    want_TD = moe_reference(x_TD, routed.routing, layer.local_experts()) + shared_TD
    _assert_close(out.y, want_TD.view_as(x))
    assert torch.equal(out.router_loss, routed.loss)
    assert torch.equal(out.counts_E, routed.counts_E)


@pytest.mark.parametrize("gated", [False, True])
def test_dense_network(gated: bool) -> None:
    ffn = FeedForward(4, 3, gated=gated, dtype=torch.float64, device=CPU)
    w = {name: p.detach() for name, p in ffn.named_parameters()}
    x = torch.tensor([[0.5, -1.0, 2.0, 0.25]], dtype=torch.float64)
    up = x @ w["up_proj.weight"].T
    if gated:
        gate = x @ w["gate_proj.weight"].T
        h = gate / (1.0 + (-gate).exp()) * up
    else:
        h = up * 0.5 * (1.0 + (up / 2.0**0.5).erf())
    assert relative_error(ffn(x), h @ w["down_proj.weight"].T) <= 1e-14
    assert (w.get("gate_proj.weight") is not None) == gated


def test_rows_must_be_aligned() -> None:
    config = dataclasses.replace(CONFIG, intermediate_size=12)
    with pytest.raises(ValueError, match=r"intermediate_size \(12\) must be a multiple of 8 for"):
        _build(config, dtype=torch.bfloat16)
