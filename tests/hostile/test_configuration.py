"""Wrong configurations: each is refused, before any memory is taken, with one exact message."""

import dataclasses
from pathlib import Path
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
from halley.core.load_config import load_config
from halley.core.models import NAMED_MODELS
from tests.hostile.wrong_fields import WRONG_FIELDS
from tests.hostile.wrong_toml import WRONG_OVERRIDES, WRONG_TOML


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
VALID: dict[str, Any] = {
    "router": RouterConfig(),
    "moe": MOE,
    "model": MODEL,
    "data": DataConfig(),
    "train": TrainConfig(),
    "optimizer": OptimizerConfig(),
    "checkpoint": CheckpointConfig(),
    "run": RunConfig(model=MODEL),
}


@pytest.mark.parametrize(("config", "field", "value", "message"), WRONG_FIELDS)
def test_wrong_field_is_refused(config: str, field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        dataclasses.replace(VALID[config], **{field: value})
    assert str(caught.value) == message


@pytest.mark.parametrize("config", VALID)
def test_each_field_refuses_an_object_of_another_type(config: str) -> None:
    """A field without a check would keep what a user mistyped and fail far from the mistake."""
    for field in dataclasses.fields(VALID[config]):
        with pytest.raises(ValueError, match=rf"^[a-z.]*{field.name} \(<object object") as caught:
            dataclasses.replace(VALID[config], **{field.name: object()})
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", WRONG_TOML)
def test_wrong_file_is_refused(tmp_path: Path, name: str) -> None:
    content, message = WRONG_TOML[name]
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        load_config(path, overrides=[])
    assert str(caught.value) == _fill(message).replace("{folder}", str(tmp_path))


@pytest.mark.parametrize("name", WRONG_OVERRIDES)
def test_wrong_override_is_refused(name: str) -> None:
    overrides, message = WRONG_OVERRIDES[name]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        load_config(None, overrides=overrides)
    assert str(caught.value) == _fill(message)


def test_whole_numbers_are_taken_for_floats() -> None:
    """The checks of types must not refuse ``capacity_factor=1``, which Python's typing allows."""
    assert RouterConfig(capacity_factor=1).capacity_factor == 1.0
    assert load_config(None, overrides=["max_load=2"]).max_load == 2.0


def test_limits_themselves_are_allowed() -> None:
    assert dataclasses.replace(MOE, num_experts=2**15 - 1).num_experts == 32767
    assert DataConfig(seq_len=2**31 - 1).seq_len == 2147483647
    model = dataclasses.replace(MODEL, num_layers=2**31 - 1)  # no loop over the layers
    assert model.num_moe_layers == 2147483647


def _fill(message: str) -> str:
    """Return a message with the names of fields and models in place of their placeholders."""
    names = {
        "{run keys}": [field.name for field in dataclasses.fields(RunConfig)],
        "{train keys}": [f"train.{field.name}" for field in dataclasses.fields(TrainConfig)],
        "{model keys}": [f"model.{field.name}" for field in dataclasses.fields(ModelConfig)],
        "{models}": list(NAMED_MODELS),
    }
    for placeholder, listed in names.items():
        message = message.replace(placeholder, ", ".join(listed))
    return message
