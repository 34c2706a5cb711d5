"""A wrong configuration raises one exact message before any memory is allocated."""

import dataclasses
import math
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
from halley.core.models import NAMED_MODELS, load_config
from tests.hostile.cases import expand, fill, read_cases


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
SWITCH = RouterConfig(kind="switch", capacity_factor=1.0)
TOP2 = RouterConfig(kind="top2", capacity_factor=1.0)
VALID: dict[str, Any] = {
    "router": RouterConfig(),
    "switch": SWITCH,
    "top2": TOP2,
    "groups": GROUPS,
    "moe": MOE,
    "switch moe": dataclasses.replace(MOE, top_k=1, router=SWITCH),
    "top2 moe": dataclasses.replace(MOE, router=TOP2),
    "groups moe": dataclasses.replace(MOE, top_k=4, router=GROUPS),
    "model": MODEL,
    "data": DataConfig(),
    "train": TrainConfig(),
    "optimizer": OptimizerConfig(),
    "checkpoint": CheckpointConfig(),
    "run": RunConfig(model=MODEL),
}


# Values that JSON cannot hold; all others are in data/fields.jsonl.
PYTHON_VALUES: list[tuple[str, str, object, str]] = [
    ("router", "capacity_factor", 10**400, f"capacity_factor (1{'0' * 76}...) must be finite"),
    ("router", "balance_coefficient", 1j, "balance_coefficient (1j) must be of type float"),
    ("moe", "activation", b"gelu", "activation (b'gelu') must be one of 'swiglu', 'gelu'"),
    ("data", "path", b"text", "data.path (b'text') must be of type str"),
    ("optimizer", "kind", ("adamw",), "optimizer.kind (('adamw',)) must be one of 'adamw', 'sgd'"),
    ("run", "strategy", ("fused",), "strategy (('fused',)) must be of type str"),
    ("run", "train", TrainConfig, f"train ({TrainConfig}) must be of type TrainConfig"),
    (
        "run",
        "train",
        TrainConfig(batch_size=2**22, num_steps=1),
        "train.batch_size * data.seq_len * model.moe.top_k * expert_tp_size (2147483648) must be "
        "at most 2147483647",
    ),
]
NAMES = {
    "run keys": ", ".join(field.name for field in dataclasses.fields(RunConfig)),
    "train keys": ", ".join(f"train.{field.name}" for field in dataclasses.fields(TrainConfig)),
    "model keys": ", ".join(f"model.{field.name}" for field in dataclasses.fields(ModelConfig)),
    "models": ", ".join(NAMED_MODELS),
}


@pytest.mark.parametrize(
    ("config", "field", "value", "message"), [*read_cases("fields"), *PYTHON_VALUES]
)
def test_wrong_field_is_refused(config: str, field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        dataclasses.replace(VALID[config], **{field: value})
    assert str(caught.value) == message


@pytest.mark.parametrize("config", VALID)
def test_each_field_refuses_an_object_of_another_type(config: str) -> None:
    """A field without a check would accept a wrong value, which then fails far from its cause."""
    for field in dataclasses.fields(VALID[config]):
        with pytest.raises(ValueError, match=rf"^[a-z.]*{field.name} \(<object object") as caught:
            dataclasses.replace(VALID[config], **{field.name: object()})
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("config", VALID)
def test_each_float_field_must_be_finite(config: str, value: float) -> None:
    for field in dataclasses.fields(VALID[config]):
        if field.type is float:
            with pytest.raises(ValueError, match=rf"{field.name} \({value}\) must be finite"):
                dataclasses.replace(VALID[config], **{field.name: value})


@pytest.mark.parametrize(("name", "content", "message"), read_cases("toml"))
def test_wrong_file_is_refused(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(expand(content).encode("latin-1"))  # each character is one byte
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        load_config(path, overrides=[])
    assert str(caught.value) == fill(message, NAMES | {"folder": str(tmp_path)})


@pytest.mark.parametrize(("name", "overrides", "message"), read_cases("overrides"))
def test_wrong_override_is_refused(name: str, overrides: list[Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        load_config(None, overrides=[expand(text) for text in overrides])
    assert str(caught.value) == fill(message, NAMES)


def test_integers_are_accepted_for_floats() -> None:
    """Python's typing allows an int for a float, so ``capacity_factor=1`` must work."""
    assert RouterConfig(capacity_factor=1).capacity_factor == 1.0
    assert load_config(None, overrides=["max_load=2"]).max_load == 2.0


def test_largest_allowed_values_are_accepted() -> None:
    assert dataclasses.replace(MOE, num_experts=2**15 - 1).num_experts == 32767
    assert DataConfig(seq_len=2**31 - 1).seq_len == 2147483647
    model = dataclasses.replace(MODEL, num_layers=2**31 - 1)  # no loop over the layers
    assert model.num_moe_layers == 2147483647
