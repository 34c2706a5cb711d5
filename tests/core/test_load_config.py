"""A run's configuration from TOML and overrides: who wins, and what a wrong key or value says."""

import dataclasses
from pathlib import Path

import pytest

from halley.core.config import (
    CheckpointConfig,
    ModelConfig,
    MoEConfig,
    RouterConfig,
    RunConfig,
    TrainConfig,
)
from halley.core.load_config import build, load_config
from halley.core.models import NAMED_MODELS


TINY = NAMED_MODELS["tiny"]


def _load(folder: Path, text: str, *overrides: str) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides=list(overrides))


def _message(*overrides: str) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - callers compare the text
        load_config(None, overrides=list(overrides))
    return str(caught.value)


def test_nothing_gives_the_defaults_and_the_tiny_model() -> None:
    assert load_config(None, overrides=[]) == RunConfig(model=TINY)


def test_file_wins_over_defaults_and_overrides_win_over_the_file(tmp_path: Path) -> None:
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


def test_model_by_name_with_changes_of_the_file_and_of_an_override(tmp_path: Path) -> None:
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
    assert NAMED_MODELS["olmoe"].num_layers == 16  # the named shape itself is as it was


@pytest.mark.parametrize("text", ['model = "olmoe"', '[model]\nname = "olmoe"', ""])
@pytest.mark.parametrize(
    "overrides",
    [
        ("model=mixtral-8x7b", "model.num_layers=2", "model.moe.router.z_coefficient=0.5"),
        ("model.num_layers=2", "model=mixtral-8x7b", "model.moe.router.z_coefficient=0.5"),
        ("model.num_layers=2", "model.moe.router.z_coefficient=0.5", "model.name=mixtral-8x7b"),
    ],
)
def test_named_model_and_changes_come_in_any_order(
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
        ("output=runs/a b", "output", "runs/a b"),  # no TOML: a string
        ('output="quoted"', "output", "quoted"),
        ("output=", "output", ""),
        ("output=a=b", "output", "a=b"),
        ("train.num_steps=1_000", "train.num_steps", 1000),
        ("optimizer.learning_rate=3e-4", "optimizer.learning_rate", 3e-4),
        ("optimizer.weight_decay=0", "optimizer.weight_decay", 0.0),
        ("train.tensorboard=true", "train.tensorboard", True),
        ("train.dtype=bfloat16", "train.dtype", "bfloat16"),
        ("data.path=texts", "data.path", "texts"),
        ("model.qk_norm=none", "model.qk_norm", "none"),
    ],
)
def test_override(override: str, path: str, value: object) -> None:
    config: object = load_config(None, overrides=[override])
    for name in path.split("."):
        config = getattr(config, name)
    assert config == value
    assert type(config) is type(value)


@pytest.mark.parametrize(
    ("override", "key", "near"),
    [
        ("train.num_step=1", "train.num_step", "train.num_steps"),
        ("stratgy=chunked", "stratgy", "strategy"),
        ("model.moe.num_expert=4", "model.moe.num_expert", "model.moe.num_experts"),
        ("model.moe.router.capacity=1.0", "model.moe.router.capacity", ".router.capacity_factor"),
        ("trains.seed=1", "trains", "train"),
    ],
)
def test_unknown_key_names_the_nearest(override: str, key: str, near: str) -> None:
    message = _message(override)
    assert message.startswith(f"key ({key}) must be one of ")
    assert message.endswith(f"{near}")
    assert ", did you mean " in message


def test_unknown_key_far_from_all_names_all() -> None:
    names = [field.name for field in dataclasses.fields(CheckpointConfig)]
    want = ", ".join(f"checkpoint.{name}" for name in names)
    assert _message("checkpoint.zzz=1") == f"key (checkpoint.zzz) must be one of {want}"
    assert _message("nothere=1").endswith(", checkpoint")  # nothing is near: no hint


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.moe.router.bias_update_rate=nan",
            "model.moe.router.bias_update_rate (nan) must be finite",
        ),
        ("max_load=inf", "max_load (inf) must be finite"),
        ("train.num_steps=many", "train.num_steps ('many') must be of type int"),
        ("train.num_steps=1.0", "train.num_steps (1.0) must be of type int"),
        ("train.num_steps=true", "train.num_steps (True) must be of type int"),
        ("optimizer.learning_rate=true", "optimizer.learning_rate (True) must be of type float"),
        ("optimizer.learning_rate='1'", "optimizer.learning_rate ('1') must be of type float"),
        ("train.tensorboard=1", "train.tensorboard (1) must be of type bool"),
        ("output=3", "output (3) must be of type str"),
        ("data.path=3", "data.path (3) must be of type str"),
        ("train.dtype=float64", "train.dtype ('float64') must be one of 'float32', 'bfloat16'"),
        ("device=[1]", "device ([1]) must be one of 'auto', 'cpu', 'cuda'"),
        ("train=3", "train (3) must be a table"),
        ("model.moe=3", "model.moe (3) must be a table"),
        ("model.moe.top_k={a = 1}", "model.moe.top_k ({'a': 1}) must be of type int"),
        ("model=3", "model (3) must be a name or a table"),
        ("model.name=3", "model.name (3) must be of type str"),
        ("train.num_steps=0", "train.num_steps (0) must be at least 1"),
        ("model.moe.top_k=9", "top_k (9) must be between 1 and num_experts (8)"),
        ("train.num_steps", "--set (train.num_steps) must be KEY=VALUE"),
        ("=3", "--set (=3) must be KEY=VALUE"),
    ],
)
def test_wrong_value(override: str, message: str) -> None:
    assert _message(override) == message


def test_override_below_a_value_is_an_error() -> None:
    text = "--set (output.folder=b) must name a key below a table, output is none"
    assert _message("output=a", "output.folder=b") == text


def test_unknown_model_names_the_nearest() -> None:
    message = _message("model=mixtral-8x8b")
    assert message.startswith("model (mixtral-8x8b) must be one of tiny, mixtral-8x7b, ")
    assert message.endswith(", did you mean mixtral-8x7b")


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    with pytest.raises(ValueError, match="must be a readable file: No such file") as caught:
        load_config(path, overrides=[])
    assert f"config ({path})" in str(caught.value)
    with pytest.raises(ValueError, match="must be a readable file: Is a directory"):
        load_config(tmp_path, overrides=[])


@pytest.mark.parametrize("content", [b"train = [", b"a = 1\na = 2"])
def test_broken_toml_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"config \(.*broken.toml\) must be TOML: "):
        load_config(path, overrides=[])


def test_build_asks_for_what_has_no_default() -> None:
    with pytest.raises(ValueError, match=r"^model.moe.top_k is required$"):
        build(MoEConfig, {"num_experts": 8, "intermediate_size": 4}, prefix="model.moe.")
    assert build(RouterConfig, {"z_coefficient": 1}) == RouterConfig(z_coefficient=1.0)


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_named_model_survives_its_table(name: str) -> None:
    model = NAMED_MODELS[name]
    assert build(ModelConfig, dataclasses.asdict(model)) == model
    assert load_config(None, overrides=[f"model={name}"]).model == model
