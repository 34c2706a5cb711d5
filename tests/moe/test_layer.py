"""The layer sums routed and shared experts, and names sizes that do not fit."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from halley.core.config import MoEConfig
from halley.core.reference import moe_reference
from halley.core.timeline import Recorder
from halley.core.types import Activation
from halley.distributed.mesh import ParallelGroups
from halley.moe.dense import FeedForward
from halley.moe.layer import MoELayer
from halley.strategies.registry import build_strategy
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from tests.moe.model_case import CPU


CONFIG = MoEConfig(num_experts=4, top_k=2, intermediate_size=8, shared_intermediate_size=12)


def _build(config: MoEConfig, hidden_size: int = 16, **changes) -> MoELayer:
    device = changes.get("device", CPU)
    strategy = build_strategy("sequential", None, recorder=Recorder(device), device=device)
    layer = MoELayer(config, hidden_size, strategy=strategy, **changes)
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
    assert relative_error(out.y, want_TD.view_as(x)) <= RELATIVE_TOLERANCE[torch.float32]
    assert torch.equal(out.router_loss, routed.loss)
    assert torch.equal(out.counts_E, routed.counts_E)


def test_layer_without_shared_experts() -> None:
    layer = _build(dataclasses.replace(CONFIG, shared_intermediate_size=0))
    x_TD = torch.randn(7, 16, generator=torch.Generator().manual_seed(9))
    want_TD = moe_reference(x_TD, layer.router(x_TD).routing, layer.local_experts())
    assert relative_error(layer(x_TD).y, want_TD) <= RELATIVE_TOLERANCE[torch.float32]


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


@pytest.mark.parametrize(
    ("hidden_size", "intermediate_size", "dtype", "message"),
    [
        (18, 8, torch.float32, r"hidden_size \(18\) must be a multiple of 4 for torch.float32"),
        (16, 6, torch.float32, r"intermediate_size \(6\) must be a multiple of 4 for"),
        (16, 12, torch.bfloat16, r"intermediate_size \(12\) must be a multiple of 8 for"),
    ],
)
def test_rows_must_be_aligned(
    hidden_size: int, intermediate_size: int, dtype: torch.dtype, message: str
) -> None:
    config = dataclasses.replace(CONFIG, intermediate_size=intermediate_size)
    with pytest.raises(ValueError, match=message):
        _build(config, hidden_size, dtype=dtype)


def test_experts_must_divide_over_the_ranks() -> None:
    groups = ParallelGroups(num_ranks=8, ep_size=8)
    with pytest.raises(ValueError, match=r"num_experts \(4\) must be divisible by ep_size \(8\)"):
        _build(CONFIG, groups=groups)
