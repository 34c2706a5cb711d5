"""Every rule of the configuration: what breaks it raises, and names name, value and rule."""

import dataclasses
import math
from typing import Any

import pytest

from halley.core.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RouterConfig,
    RunConfig,
    TrainConfig,
)


MOE = MoEConfig(num_experts=8, top_k=2, intermediate_size=32)
MODEL = ModelConfig(
    name="small",
    vocab_size=256,
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    moe=MOE,
)
GROUPS = RouterConfig(kind="sigmoid", num_groups=4, num_limited_groups=2)
VALID = {
    "router": RouterConfig(),
    "switch": RouterConfig(kind="switch", capacity_factor=1.0),
    "top2": RouterConfig(kind="top2", capacity_factor=1.0),
    "groups": GROUPS,
    "moe": MOE,
    "switch moe": dataclasses.replace(
        MOE, top_k=1, router=RouterConfig(kind="switch", capacity_factor=1.0)
    ),
    "top2 moe": dataclasses.replace(MOE, router=RouterConfig(kind="top2", capacity_factor=1.0)),
    "groups moe": dataclasses.replace(MOE, top_k=4, router=GROUPS),
    "model": MODEL,
    "data": DataConfig(),
    "train": TrainConfig(),
    "optimizer": OptimizerConfig(),
    "checkpoint": CheckpointConfig(),
    "run": RunConfig(model=MODEL),
}


@pytest.mark.parametrize(
    ("config", "field", "value", "message"),
    [
        ("router", "capacity_factor", -0.5, "capacity_factor (-0.5) must be at least 0"),
        ("router", "capacity_factor", math.inf, "capacity_factor (inf) must be finite"),
        ("router", "balance_coefficient", -1.0, "balance_coefficient (-1.0) must be at least 0"),
        ("router", "balance_coefficient", math.nan, "balance_coefficient (nan) must be finite"),
        ("router", "z_coefficient", -1.0, "z_coefficient (-1.0) must be at least 0"),
        ("router", "bias_update_rate", -1.0, "bias_update_rate (-1.0) must be at least 0"),
        ("router", "scaling_factor", 0.0, "scaling_factor (0.0) must be above 0"),
        ("router", "num_groups", 0, "num_groups (0) must be at least 1"),
        ("router", "num_limited_groups", 0, "num_limited_groups (0) must be between 1 and "),
        ("groups", "num_limited_groups", 5, "num_limited_groups (5) must be between 1 and num_gr"),
        ("switch", "capacity_factor", 0.0, "capacity_factor (0.0) must be above 0 for the switch"),
        ("top2", "capacity_factor", 0.0, "capacity_factor (0.0) must be above 0 for the top2"),
        ("moe", "num_experts", 0, "num_experts (0) must be at least 1"),
        ("moe", "intermediate_size", 0, "intermediate_size (0) must be at least 1"),
        ("moe", "top_k", 0, "top_k (0) must be between 1 and num_experts (8)"),
        ("moe", "top_k", 9, "top_k (9) must be between 1 and num_experts (8)"),
        ("groups moe", "num_experts", 10, "num_experts (10) must be divisible by num_groups (4)"),
        ("groups moe", "top_k", 5, "top_k (5) must be at most the experts of num_limited_groups"),
        ("switch moe", "top_k", 2, "top_k (2) must be 1 for switch"),
        ("top2 moe", "top_k", 1, "top_k (1) must be 2 for top2"),
        ("model", "vocab_size", 0, "vocab_size (0) must be at least 1"),
        ("model", "hidden_size", 0, "hidden_size (0) must be at least 1"),
        ("model", "num_layers", 0, "num_layers (0) must be at least 1"),
        ("model", "num_heads", 0, "num_heads (0) must be at least 1"),
        ("model", "num_kv_heads", 0, "num_kv_heads (0) must be at least 1"),
        ("model", "num_kv_heads", 3, "num_heads (4) must be divisible by num_kv_heads (3)"),
        ("model", "head_dim", 15, "head_dim (15) must be even, >= 2"),
        ("model", "head_dim", 0, "head_dim (0) must be even, >= 2"),
        ("model", "moe_interval", 0, "moe_interval (0) must be at least 1"),
        ("model", "num_dense_layers", -1, "num_dense_layers (-1) must be between 0 and num_lay"),
        ("model", "num_dense_layers", 5, "num_dense_layers (5) must be between 0 and num_layers"),
        ("model", "num_dense_layers", 1, "dense_intermediate_size (0) must be at least 1 for de"),
        ("model", "moe_interval", 2, "dense_intermediate_size (0) must be at least 1 for dense"),
        ("data", "seq_len", 0, "data.seq_len (0) must be at least 1"),
        ("data", "path", "", "data.path () must be a file or a folder, or left out"),
        ("train", "num_steps", 0, "train.num_steps (0) must be at least 1"),
        ("train", "batch_size", 0, "train.batch_size (0) must be at least 1"),
        ("train", "num_microbatches", 0, "train.num_microbatches (0) must be at least 1"),
        ("train", "log_every", 0, "train.log_every (0) must be at least 1"),
        ("optimizer", "learning_rate", 0.0, "optimizer.learning_rate (0.0) must be above 0"),
        ("optimizer", "learning_rate", math.nan, "optimizer.learning_rate (nan) must be finite"),
        ("optimizer", "warmup_steps", -1, "optimizer.warmup_steps (-1) must be at least 0"),
        ("optimizer", "weight_decay", -0.1, "optimizer.weight_decay (-0.1) must be at least 0"),
        ("optimizer", "clip_norm", math.inf, "optimizer.clip_norm (inf) must be finite"),
        ("optimizer", "final_fraction", -0.1, "optimizer.final_fraction (-0.1) must be at least"),
        ("optimizer", "beta1", 1.0, "optimizer.beta1 (1.0) must be at least 0 and below 1"),
        ("optimizer", "beta2", -0.1, "optimizer.beta2 (-0.1) must be at least 0 and below 1"),
        ("checkpoint", "every_steps", -1, "checkpoint.every_steps (-1) must be at least 0"),
        ("checkpoint", "keep", 0, "checkpoint.keep (0) must be at least 1"),
        ("run", "ep_size", -1, "ep_size (-1) must be at least 0"),
        ("run", "num_chunks", -1, "num_chunks (-1) must be at least 0"),
    ],
)
def test_broken_rule(config: str, field: str, value: object, message: str) -> None:
    changes: dict[str, Any] = {field: value}
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        dataclasses.replace(VALID[config], **changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("config", "field"),
    [
        (config, field.name)
        for config, valid in VALID.items()
        for field in dataclasses.fields(valid)
        if field.type is float
    ],
)
def test_numbers_are_finite(config: str, field: str, value: float) -> None:
    changes: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=rf"{field} \({value}\) must be finite"):
        dataclasses.replace(VALID[config], **changes)


@pytest.mark.parametrize("config", VALID)
def test_config_is_frozen(config: str) -> None:
    name = dataclasses.fields(VALID[config])[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(VALID[config], name, None)


@pytest.mark.parametrize(
    ("num_dense_layers", "moe_interval", "moe_layers"),
    [
        (0, 1, [0, 1, 2, 3, 4, 5, 6]),
        (3, 1, [3, 4, 5, 6]),
        (0, 2, [1, 3, 5]),
        (1, 2, [2, 4, 6]),
        (2, 3, [4]),
        (7, 1, []),
    ],
)
def test_which_layers_are_moe(
    num_dense_layers: int, moe_interval: int, moe_layers: list[int]
) -> None:
    model = dataclasses.replace(
        MODEL,
        num_layers=7,
        num_dense_layers=num_dense_layers,
        moe_interval=moe_interval,
        dense_intermediate_size=128,
    )
    assert [index for index in range(7) if model.is_moe_layer(index)] == moe_layers
