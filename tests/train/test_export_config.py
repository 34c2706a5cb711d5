"""An exported model's configuration has its fields, and models of no family are refused."""

import dataclasses

import pytest

from halley.core.models import NAMED_MODELS
from halley.train.hf_export import check_family, differences, hf_config
from tests.train.export_case import MODELS, MOE, NOT_NORMALIZED, run_config


def test_config_of_mixtral():
    assert hf_config(run_config(MODELS["mixtral"])) == {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "float32",
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-3,
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.01,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "intermediate_size": 8,
        "num_local_experts": 4,
        "sliding_window": None,
    }


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        (
            "qwen2_moe",
            {
                "num_experts": 4,
                "norm_topk_prob": False,
                "moe_intermediate_size": 8,
                "shared_expert_intermediate_size": 12,
                "qkv_bias": True,
                "mlp_only_layers": [],
                "router_aux_loss_coef": 0.25,
            },
        ),
        (
            "qwen3_moe",
            {
                "num_experts": 4,
                "norm_topk_prob": True,
                "moe_intermediate_size": 8,
                "intermediate_size": 24,
                "mlp_only_layers": [0, 1, 3],
                "decoder_sparse_step": 1,
            },
        ),
        ("olmoe", {"num_experts": 4, "norm_topk_prob": False, "intermediate_size": 8}),
    ],
)
def test_config_of_other_families(family: str, wanted: dict[str, object]):
    config = hf_config(run_config(MODELS[family]))
    assert {name: config.get(name) for name in wanted} == wanted


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_families_of_named_models(name: str):
    model = NAMED_MODELS[name]
    if model.hf_family:
        check_family(model)
        return
    with pytest.raises(ValueError, match=rf"hf_family \(''\).* {name} differs in: "):
        check_family(model)


@pytest.mark.parametrize(
    ("family", "changes", "wanted"),
    [
        ("mixtral", {"attention_bias": True}, "attention_bias is True, not False"),
        ("mixtral", {"qk_norm": "head"}, "qk_norm is 'head', not 'none'"),
        ("qwen3_moe", {"qk_norm": "full"}, "qk_norm is 'full', not 'head'"),
        ("olmoe", {"head_dim": 8}, "head_dim is 8, not 4"),
        (
            "olmoe",
            {"num_dense_layers": 1, "dense_intermediate_size": 8},
            "number of dense layers is 1, not 0",
        ),
        (
            "qwen2_moe",
            {"moe": MOE},
            "moe.shared_gate is False, not True; "
            "moe.shared_intermediate_size is 0, not 'at least 1'",
        ),
        (
            "mixtral",
            {"moe": dataclasses.replace(MOE, router=NOT_NORMALIZED)},
            "moe.router.normalize is False, not True",
        ),
        (
            "mixtral",
            {"moe": dataclasses.replace(MOE, activation="gelu", expert_bias=True)},
            "moe.activation is 'gelu', not 'swiglu'; moe.expert_bias is True, not False",
        ),
    ],
)
def test_parts_that_differ(family: str, changes: dict[str, object], wanted: str):
    model = dataclasses.replace(MODELS[family], **changes)  # pyright: ignore[reportArgumentType]
    assert "; ".join(differences(model, family)) == wanted
    with pytest.raises(ValueError, match=rf"model.hf_family \({family}\) must have"):
        check_family(model)
