"""Small models of each family that is exported, and what a run says of them."""

import dataclasses

from halley.core.config import (
    DataConfig,
    ModelConfig,
    MoEConfig,
    RouterConfig,
    RunConfig,
    TrainConfig,
)
from tests.moe.model_case import MODELS as SMALL_MODELS


MOE = MoEConfig(num_experts=4, top_k=2, intermediate_size=8)
_BASE = dataclasses.replace(SMALL_MODELS["softmax"], qk_norm="none", head_dim=4, moe=MOE)
NOT_NORMALIZED = RouterConfig(normalize=False, balance_coefficient=0.25)
MODELS = {
    "mixtral": dataclasses.replace(
        _BASE, hf_family="mixtral", head_dim=8, rope_theta=1e6, norm_eps=1e-3
    ),
    "qwen2_moe": dataclasses.replace(
        _BASE,
        hf_family="qwen2_moe",
        attention_bias=True,
        num_kv_heads=4,
        moe=dataclasses.replace(
            MOE, shared_intermediate_size=12, shared_gate=True, router=NOT_NORMALIZED
        ),
    ),
    "qwen3_moe": dataclasses.replace(
        _BASE,
        hf_family="qwen3_moe",
        qk_norm="head",
        head_dim=8,
        num_layers=4,
        num_dense_layers=1,
        moe_interval=2,
        dense_intermediate_size=24,
    ),
    "olmoe": dataclasses.replace(
        _BASE,
        hf_family="olmoe",
        qk_norm="full",
        moe=dataclasses.replace(MOE, router=NOT_NORMALIZED),
    ),
}


def run_config(model: ModelConfig, dtype: str = "float32") -> RunConfig:
    """Return what a run of a model says of itself."""
    assert dtype in ("float32", "bfloat16")
    return RunConfig(model=model, data=DataConfig(seq_len=64), train=TrainConfig(dtype=dtype))
