"""The transformer equals a slow model in float64, also on several ranks and checkpointed."""

import dataclasses
import math

import pytest
import torch

from halley.core.config import ModelConfig
from halley.core.reference import moe_reference
from halley.core.timeline import Recorder
from halley.core.types import Experts, Routing
from halley.distributed.mesh import build_groups
from halley.moe.layer import MoELayer, grouped_experts
from halley.moe.transformer import Block, MoETransformer, flops_per_token
from halley.tools.layer_case import RELATIVE_TOLERANCE, relative_error
from tests.moe.model_case import CPU, MODELS, build_model, destroy, make_tokens, run_step


Weights = dict[str, torch.Tensor]


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _rotate(x_d: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotate each pair (i, i + d / 2) by its angle, as complex numbers."""
    half = x_d.numel() // 2
    angles = [position * theta ** (-2.0 * i / x_d.numel()) for i in range(half)]
    rotation = torch.polar(torch.ones(half).double(), torch.tensor(angles).double())
    rotated = torch.complex(x_d[:half], x_d[half:]) * rotation
    return torch.cat([rotated.real, rotated.imag])


def _slow_attention(x_SD: torch.Tensor, weights: Weights, config: ModelConfig) -> torch.Tensor:
    """Compute attention for each query and head separately."""
    dim, eps = config.head_dim, config.norm_eps

    def project(name: str) -> torch.Tensor:
        out = x_SD @ weights[f"{name}_proj.weight"].T + weights.get(f"{name}_proj.bias", 0.0)
        if config.qk_norm == "full" and name != "v":
            out = _norm(out, weights[f"{name}_norm.weight"], eps)
        out_SHd = out.unflatten(1, (-1, dim))
        if config.qk_norm == "head" and name != "v":
            out_SHd = _norm(out_SHd, weights[f"{name}_norm.weight"], eps)
        return out_SHd

    q, k, v = project("q"), project("k"), project("v")
    y = torch.zeros_like(q)
    for head in range(config.num_heads):
        kv_head = head // (config.num_heads // config.num_kv_heads)
        for t in range(x_SD.shape[0]):
            query = _rotate(q[t, head], t, config.rope_theta)
            keys = [_rotate(k[s, kv_head], s, config.rope_theta) for s in range(t + 1)]
            scores = torch.stack([query @ key for key in keys]) / math.sqrt(dim)
            y[t, head] = scores.softmax(0) @ v[: t + 1, kv_head]
    return y.flatten(1) @ weights["o_proj.weight"].T


def _slow_mlp(x_SD: torch.Tensor, weights: Weights) -> torch.Tensor:
    up = x_SD @ weights["up_proj.weight"].T
    if "gate_proj.weight" in weights:
        gate = x_SD @ weights["gate_proj.weight"].T
        h = gate * gate.sigmoid() * up
    else:
        h = 0.5 * up * (1.0 + (up / math.sqrt(2.0)).erf())
    return h @ weights["down_proj.weight"].T


def _slow_moe(x_SD: torch.Tensor, weights: Weights, layer: MoELayer) -> torch.Tensor:
    routing = layer.router(x_SD).routing  # the router computes in float32 and has its own tests
    experts = Experts(
        up_LGD=weights["experts.gate_up_proj"],
        down_LDF=weights["experts.down_proj"],
        up_bias_LG=weights.get("experts.gate_up_proj_bias"),
        down_bias_LD=weights.get("experts.down_proj_bias"),
        activation=layer.config.activation,
    )
    weights_TK = routing.topk_weights_TK.double()
    routing = Routing(topk_idx_TK=routing.topk_idx_TK, topk_weights_TK=weights_TK)
    y_SD = moe_reference(x_SD, routing, experts)
    if shared := _below(weights, "shared_expert"):
        gate = weights.get("shared_expert_gate.weight")
        share = 1.0 if gate is None else (x_SD @ gate.T).sigmoid()
        y_SD = y_SD + share * _slow_mlp(x_SD, shared)
    return y_SD


def _below(weights: Weights, prefix: str) -> Weights:
    size = len(prefix) + 1
    return {name[size:]: w for name, w in weights.items() if name.startswith(f"{prefix}.")}


def _slow_logits(model: MoETransformer, tokens_S: torch.Tensor) -> torch.Tensor:
    config = model.config
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    x_SD = weights["embed_tokens.weight"][tokens_S]
    for index, block in enumerate(model.layers):
        assert isinstance(block, Block)
        own = _below(weights, f"layers.{index}")
        normed_SD = _norm(x_SD, own["input_layernorm.weight"], config.norm_eps)
        x_SD = x_SD + _slow_attention(normed_SD, _below(own, "self_attn"), config)
        normed_SD = _norm(x_SD, own["post_attention_layernorm.weight"], config.norm_eps)
        mlp = _below(own, "mlp")
        if isinstance(block.mlp, MoELayer):
            x_SD = x_SD + _slow_moe(normed_SD, mlp, block.mlp)
        else:
            x_SD = x_SD + _slow_mlp(normed_SD, mlp)
    return _norm(x_SD, weights["norm.weight"], config.norm_eps) @ weights["lm_head.weight"].T


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_those_of_a_slow_model(kind: str) -> None:
    model = build_model(MODELS[kind])
    tokens_BS = make_tokens(0, batch_size=1)
    logits_BSV = model(tokens_BS).logits_BSV
    error = relative_error(logits_BSV[0], _slow_logits(model, tokens_BS[0]))
    assert error <= 4 * RELATIVE_TOLERANCE[torch.float32]  # the models have two to four layers


def test_router_losses_are_summed_and_counts_stacked() -> None:
    inputs: list[torch.Tensor] = []
    model = build_model(MODELS["softmax"])
    for block in model.layers:
        block.get_submodule("mlp").register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    both = model(make_tokens(0))
    routed = [
        block.get_submodule("mlp.router")(x.flatten(0, 1))
        for block, x in zip(model.layers, inputs, strict=True)
    ]
    torch.testing.assert_close(both.router_loss, routed[0].loss + routed[1].loss)
    assert both.counts_ME.tolist() == [r.counts_E.tolist() for r in routed]
    one = build_model(MODELS["dense layers"])(make_tokens(0))  # layers 0, 1, 3 are dense
    assert one.counts_ME.shape == (1, 8)
    assert one.counts_ME.sum().item() == 2 * 9 * 2
    config = dataclasses.replace(MODELS["dense layers"], num_dense_layers=4)
    out = build_model(config)(make_tokens(0))
    assert out.router_loss.item() == 0.0
    assert out.counts_ME.tolist() == []


def _initial_weights(rank: int, num_ranks: int, kind: str, ep_size: int) -> Weights:
    groups = build_groups(ep_size, device_type="cpu")
    weights = build_model(MODELS[kind], groups=groups, seed=3).state_dict()
    destroy(groups)
    return weights


@pytest.mark.parametrize(
    ("kind", "ep_size"), [("sigmoid", 1), ("biases", 2), ("shared experts", 4), ("dense layers", 2)]
)
def test_initial_weights_depend_on_the_seed_alone(run_ranks, kind: str, ep_size: int) -> None:
    model = build_model(MODELS[kind], seed=3)
    sharded = grouped_experts(model)
    by_rank: list[Weights] = run_ranks(_initial_weights, 4, kind, ep_size)
    for start in range(0, 4, ep_size):
        ranks = by_rank[start : start + ep_size]
        for name, want in model.state_dict().items():
            if name in sharded:
                assert torch.equal(torch.cat([weights[name] for weights in ranks]), want)
            else:
                assert all(torch.equal(weights[name], want) for weights in ranks)


def test_initial_weights() -> None:
    model = build_model(MODELS["biases"])
    model.init_weights(seed=0)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, weight in first.items():
        if "norm" in name:
            assert weight.unique().tolist() == [1.0]
        elif name.endswith("bias"):
            assert weight.unique().tolist() == [0.0]
        else:  # the tolerance is five standard deviations of the estimate
            allowed = 5.0 * 0.02 / math.sqrt(2.0 * weight.numel())
            assert weight.std().item() == pytest.approx(0.02, abs=allowed)
            assert abs(weight.mean().item()) <= 5.0 * 0.02 / math.sqrt(weight.numel())
    matrices = [w for name, w in first.items() if w.ndim > 1 and "bias" not in name]
    experts = [expert for w in matrices for expert in (w if w.ndim == 3 else [w])]
    assert len({expert.flatten()[0].item() for expert in experts}) == len(experts)
    model.init_weights(seed=1)
    for name, weight in model.named_parameters():
        if "norm" not in name and not name.endswith("bias"):
            assert not torch.equal(weight, first[name])


def _gradients(model: MoETransformer, tokens_BS: torch.Tensor) -> Weights:
    run_step(model, tokens_BS)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _backward_both(rank: int, num_ranks: int, kind: str) -> None:
    groups = build_groups(num_ranks, device_type="cpu")
    recorder = Recorder(CPU)
    tokens_BS = make_tokens(rank)
    case = {"strategy": "chunked", "num_chunks": 2, "groups": groups, "recorder": recorder}
    want = _gradients(build_model(MODELS[kind], **case), tokens_BS)
    num_plain = [span.name for span in recorder.collect()].count("dispatch.wait")
    model = build_model(MODELS[kind], activation_checkpointing=True, **case)
    got = _gradients(model, tokens_BS)
    num_checkpointed = [span.name for span in recorder.collect()].count("dispatch.wait")
    assert num_checkpointed == 2 * num_plain  # backward runs forward again
    assert got.keys() == want.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    destroy(groups)


@pytest.mark.parametrize("kind", ["top2", "shared experts"])
def test_activation_checkpointing_does_not_change_bits(run_ranks, kind: str) -> None:
    run_ranks(_backward_both, 2, kind)


def test_flops_per_token_by_hand() -> None:
    # Attention of a layer: 16 x 32 for queries and output, 16 x 16 for keys and values; causal
    # scores and sums over 10 / 2 positions of 32 columns each. MoE: 16 x 8 for the router, and
    # three 16 x 8 for each of two experts. Logits: 16 x 32. Each element is one multiplication and
    # one addition, once in forward and twice in backward: six operations.
    attention = 2 * 16 * 32 + 2 * 16 * 16 + 2 * 5 * 32
    moe = 16 * 8 + 2 * 3 * 16 * 8
    assert flops_per_token(MODELS["softmax"], seq_len=10) == 6 * (2 * (attention + moe) + 16 * 32)
    dense = 3 * 16 * 24
    want = 6 * (4 * attention + moe + 3 * dense + 16 * 32)
    assert flops_per_token(MODELS["dense layers"], seq_len=10) == want
