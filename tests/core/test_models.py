"""The parameter counts of named models, compared with published numbers."""

import dataclasses

import pytest

from halley.core.config import ModelConfig
from halley.core.models import find_model


# DeepSeek-V3's latent attention has 187.1 million parameters a layer (arXiv:2412.19437, section
# 4.2: ranks 1536 and 512, heads of 128 + 64). The plain attention in Halley has 469.8 million.
_PLAIN_ATTENTION = 61 * (469.8e6 - 187.1e6)


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Return the number of parameters of a model, and of those that one token uses."""
    moe, hidden = config.moe, config.hidden_size
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    attention = 2 * hidden * queries + 2 * hidden * keys
    if config.attention_bias:
        attention += queries + 2 * keys
    attention += {"none": 0, "head": 2 * config.head_dim, "full": queries + keys}[config.qk_norm]
    gated = 3 if moe.activation == "swiglu" else 2
    expert = gated * hidden * moe.intermediate_size
    if moe.expert_bias:
        expert += (gated - 1) * moe.intermediate_size + hidden
    outside = moe.num_experts * hidden + gated * hidden * moe.shared_intermediate_size
    outside += hidden if moe.shared_gate else 0
    total = active = 2 * config.vocab_size * hidden + hidden
    for index in range(config.num_layers):
        total += attention + 2 * hidden
        active += attention + 2 * hidden
        if config.is_moe_layer(index):
            total += outside + moe.num_experts * expert
            active += outside + moe.top_k * expert
        else:
            total += 3 * hidden * config.dense_intermediate_size
            active += 3 * hidden * config.dense_intermediate_size
    return total, active


# In each layer, gpt-oss has sinks (64), router biases (32) and biases of the output projection
# (2880) that Halley's model lacks.
_GPT_OSS_EXTRAS = 24 * (64 + 32 + 2880)


# Totals with tolerance 0 are numbers of elements of the released tensors. Active parameters are
# published with two digits; two of these numbers exclude the input embedding.
@pytest.mark.parametrize(
    ("name", "total", "tolerance", "active", "outside"),
    [
        ("mixtral-8x7b", 46_702_792_704, 0, 12.9e9, 0),
        ("qwen3-30b-a3b", 30_532_122_624, 0, 3.3e9, 0),
        ("olmoe", 6_919_161_856, 0, 1.3e9, 0),
        ("phi-3.5-moe", 41.9e9, 1e-3, 6.6e9, 0),
        ("gpt-oss-20b", 20_914_757_184 - _GPT_OSS_EXTRAS, 0, 3.6e9, 201088 * 2880),
        ("deepseek-v3", 671e9 + _PLAIN_ATTENTION, 1e-3, 37e9 + _PLAIN_ATTENTION, 129280 * 7168),
    ],
)
def test_number_of_all_and_of_active_parameters(
    name: str, total: float, tolerance: float, active: float, outside: int
) -> None:
    found_total, found_active = count_parameters(find_model(name))
    assert found_total == pytest.approx(total, rel=tolerance, abs=0)
    assert found_active - outside == pytest.approx(active, rel=0.02)


def test_number_of_parameters_of_qwen2_moe_with_60_experts() -> None:
    model = find_model("qwen2-moe")
    model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, num_experts=60))
    assert count_parameters(model)[0] == 14_315_784_192
    assert count_parameters(model)[1] == pytest.approx(2.7e9, rel=0.01)
