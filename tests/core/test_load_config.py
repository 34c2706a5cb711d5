"""Configurations from TOML files and overrides; tests/hostile/data has the wrong ones."""

import dataclasses
from pathlib import Path

import pytest

from halley.core.config import RunConfig, TrainConfig
from halley.core.models import NAMED_MODELS, load_config


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
    want = RunConfig(
        model=TINY,
        strategy="chunked",
        num_chunks=3,
        train=TrainConfig(num_steps=60, seed=7),
        optimizer=dataclasses.replace(RunConfig(model=TINY).optimizer, learning_rate=1.0),
    )
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
    want = dataclasses.replace(
        olmoe, num_layers=3, moe=dataclasses.replace(olmoe.moe, num_experts=16, top_k=4)
    )
    config = _load(tmp_path, text, "model.num_layers=3", "model.moe.top_k=4")
    assert config.model == want
    assert NAMED_MODELS["olmoe"].num_layers == 16  # the change was made to a copy


@pytest.mark.parametrize("text", ['model = "olmoe"', '[model]\nname = "olmoe"'])
@pytest.mark.parametrize(
    "overrides",
    [
        ("model=mixtral-8x7b", "model.num_layers=2", "model.moe.router.z_coefficient=0.5"),
        ("model.num_layers=2", "model=mixtral-8x7b", "model.moe.router.z_coefficient=0.5"),
        ("model.num_layers=2", "model.moe.router.z_coefficient=0.5", "model.name=mixtral-8x7b"),
    ],
)
def test_order_of_model_name_and_changes_does_not_matter(
    tmp_path: Path, text: str, overrides: tuple[str, ...]
) -> None:
    model = _load(tmp_path, text, *overrides).model
    mixtral = NAMED_MODELS["mixtral-8x7b"]
    router = dataclasses.replace(mixtral.moe.router, z_coefficient=0.5)
    moe = dataclasses.replace(mixtral.moe, router=router)
    assert model == dataclasses.replace(mixtral, num_layers=2, moe=moe)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("output=runs/a b", "output", "runs/a b"),  # not TOML, so a string
        ('output="quoted"', "output", "quoted"),
        ("output=", "output", ""),
        ("output=a=b", "output", "a=b"),
        ("train.num_steps=1_000", "train.num_steps", 1000),
        ("optimizer.learning_rate=3e-4", "optimizer.learning_rate", 3e-4),
        ("optimizer.weight_decay=0", "optimizer.weight_decay", 0.0),
        ("train.tensorboard=true", "train.tensorboard", True),
        ("model.qk_norm=none", "model.qk_norm", "none"),
    ],
)
def test_override_has_the_type_of_its_field(override: str, path: str, value: object) -> None:
    config: object = load_config(None, overrides=[override])
    for name in path.split("."):
        config = getattr(config, name)
    assert config == value
    assert type(config) is type(value)


def test_every_named_model_can_be_loaded_by_its_name() -> None:
    for name, model in NAMED_MODELS.items():
        assert load_config(None, overrides=[f"model={name}"]).model == model


@pytest.mark.parametrize(
    ("num_dense_layers", "moe_interval", "moe_layers"),
    [(0, 1, [0, 1, 2, 3, 4, 5, 6]), (3, 1, [3, 4, 5, 6]), (2, 3, [4]), (7, 1, [])],
)
def test_positions_of_moe_layers(
    num_dense_layers: int, moe_interval: int, moe_layers: list[int]
) -> None:
    model = dataclasses.replace(
        NAMED_MODELS["tiny"],
        num_layers=7,
        num_dense_layers=num_dense_layers,
        moe_interval=moe_interval,
        dense_intermediate_size=128,
    )
    assert [index for index in range(7) if model.is_moe_layer(index)] == moe_layers
