"""Named models against published numbers, and configurations from TOML files and overrides."""

import dataclasses
from operator import attrgetter
from pathlib import Path

import pytest

from halley.core.config import OptimizerConfig, RunConfig, TrainConfig
from halley.core.models import NAMED_MODELS, find_model, load_config
from halley.moe.memory_check import num_parameters
from halley.moe.transformer import flops_per_token


TINY = NAMED_MODELS["tiny"]


def _load(folder: Path, text: str, *overrides: str) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides=list(overrides))


def test_no_file_gives_defaults_and_the_tiny_model() -> None:
    assert load_config(None, overrides=[]) == RunConfig(model=TINY)


def test_overrides_replace_the_file_which_replaces_defaults(tmp_path: Path) -> None:
    text = """
        strategy = "chunked"
        num_chunks = 2

        [train]
        num_steps = 50
        seed = 7

        [optimizer]
        learning_rate = 1
    """
    config = _load(tmp_path, text, "train.num_steps=60", "num_chunks=4", "num_chunks=3")
    train, optimizer = TrainConfig(num_steps=60, seed=7), OptimizerConfig(learning_rate=1.0)
    want = RunConfig(model=TINY, strategy="chunked", num_chunks=3, train=train, optimizer=optimizer)
    assert config == want
    assert isinstance(config.optimizer.learning_rate, float)


def test_file_and_overrides_change_a_named_model(tmp_path: Path) -> None:
    text = """
        [model]
        name = "olmoe"
        num_layers = 2

        [model.moe]
        num_experts = 16
    """
    olmoe = NAMED_MODELS["olmoe"]
    moe = dataclasses.replace(olmoe.moe, num_experts=16, top_k=4)
    config = _load(tmp_path, text, "model.num_layers=3", "model.moe.top_k=4")
    assert config.model == dataclasses.replace(olmoe, num_layers=3, moe=moe)
    assert NAMED_MODELS["olmoe"].num_layers == 16  # the change was made to a copy


@pytest.mark.parametrize("text", ['model = "olmoe"', '[model]\nname = "olmoe"'])
@pytest.mark.parametrize("name", ["model=mixtral-8x7b", "model.name=mixtral-8x7b"])
def test_order_of_model_name_and_changes_does_not_matter(tmp_path, text, name) -> None:
    mixtral = NAMED_MODELS["mixtral-8x7b"]
    router = dataclasses.replace(mixtral.moe.router, z_coefficient=0.5)
    moe = dataclasses.replace(mixtral.moe, router=router)
    changes = ["model.num_layers=2", "model.moe.router.z_coefficient=0.5"]
    for place in range(3):
        overrides = [*changes[:place], name, *changes[place:]]
        model = _load(tmp_path, text, *overrides).model
        assert model == dataclasses.replace(mixtral, num_layers=2, moe=moe)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("output=runs/a b", "runs/a b"),  # not TOML, so a string
        ('output="quoted"', "quoted"),
        ("output=", ""),
        ("output=a=b", "a=b"),
        ("train.num_steps=1_000", 1000),
        ("optimizer.learning_rate=3e-4", 3e-4),
        ("optimizer.weight_decay=0", 0.0),
        ("train.tensorboard=true", True),
        ("model.qk_norm=none", "none"),
    ],
)
def test_override_has_the_type_of_its_field(override: str, value: object) -> None:
    path = override.partition("=")[0]
    found = attrgetter(path)(load_config(None, overrides=[override]))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("num_dense_layers", "moe_interval", "moe_layers"),
    [(0, 1, [0, 1, 2, 3, 4, 5, 6]), (3, 1, [3, 4, 5, 6]), (2, 3, [4]), (7, 1, [])],
)
def test_positions_of_moe_layers(num_dense_layers, moe_interval, moe_layers) -> None:
    sizes = {"num_layers": 7, "num_dense_layers": num_dense_layers, "moe_interval": moe_interval}
    model = dataclasses.replace(TINY, dense_intermediate_size=128, **sizes)
    assert [index for index in range(7) if model.is_moe_layer(index)] == moe_layers


# DeepSeek-V3's latent attention has 187.1 million parameters a layer (arXiv:2412.19437, section
# 4.2: ranks 1536 and 512, heads of 128 + 64). The plain attention in Halley has 469.8 million.
_PLAIN_ATTENTION = 61 * (469.8e6 - 187.1e6)
# In each layer, gpt-oss has sinks (64), router biases (32) and biases of the output projection
# (2880) that Halley's model lacks.
_GPT_OSS_EXTRAS = 24 * (64 + 32 + 2880)


# Totals with tolerance 0 are numbers of elements of the released tensors. Active parameters are
# published with two digits; two of these numbers exclude the input embedding.
@pytest.mark.parametrize(
    ("name", "total", "tolerance", "active", "with_embedding"),
    [
        ("mixtral-8x7b", 46_702_792_704, 0, 12.9e9, True),
        ("qwen3-30b-a3b", 30_532_122_624, 0, 3.3e9, True),
        ("olmoe", 6_919_161_856, 0, 1.3e9, True),
        ("phi-3.5-moe", 41.9e9, 1e-3, 6.6e9, True),
        ("gpt-oss-20b", 20_914_757_184 - _GPT_OSS_EXTRAS, 0, 3.6e9, False),
        ("deepseek-v3", 671e9 + _PLAIN_ATTENTION, 1e-3, 37e9 + _PLAIN_ATTENTION, False),
        ("qwen2-moe", 14_315_784_192, 0, 2.7e9, True),
    ],
)
def test_number_of_all_and_of_active_parameters(name, total, tolerance, active, with_embedding):
    model = find_model(name)
    if name == "qwen2-moe":  # the released model has 60 experts
        model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, num_experts=60))
    found = num_parameters(model, ep_size=1, tp_size=1)
    assert found == pytest.approx(total, rel=tolerance, abs=0)
    # Each parameter that a token uses counts six operations, except those of the input embedding.
    found_active = flops_per_token(model, seq_len=0) / 6
    found_active += model.vocab_size * model.hidden_size * with_embedding
    assert found_active == pytest.approx(active, rel=0.02)
