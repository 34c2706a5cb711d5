"""A wrong call or configuration raises one exact message before memory is allocated.

The calls are Python expressions in ``data/calls.jsonl``. They may use every name of this module.
"""

# ruff: noqa: F401 - data/calls.jsonl uses the names

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import halley
from halley.compiler.options import parse_options
from halley.core import config as configs
from halley.core.models import NAMED_MODELS, load_config
from halley.core.reference import activate
from halley.core.routing import chunk_sizes, sort_keys
from halley.core.timeline import write_chrome_trace
from halley.core.types import Experts, LayerShape, check_tp_size, local_experts
from halley.cost.hardware import Environment, predictor_of
from halley.cost.profiles import Curve
from halley.cost.simulate import Contention, Operation
from halley.moe.layer import GroupedExperts
from halley.moe.memory_check import check_memory, num_parameters, total_memory
from halley.moe.router import build_router
from halley.moe.transformer import MoETransformer
from halley.planner.expert_balance import plan_placement
from halley.strategies.registry import build_strategies, split_strategies
from halley.tools.layer_case import relative_error
from halley.tools.skew import parse_load
from halley.tools.timer import time_interleaved
from halley.train.hf_export import check_family
from tests.hostile.cases import expand, fill, read_cases


MOE = configs.MoEConfig(num_experts=8, top_k=2, intermediate_size=32)
MODEL = configs.ModelConfig(
    name="small", vocab_size=256, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=16, moe=MOE,
)  # fmt: skip
GROUPS = configs.RouterConfig(kind="sigmoid", num_groups=4, num_limited_groups=2)
SWITCH = configs.RouterConfig(kind="switch", capacity_factor=1.0)
TOP2 = configs.RouterConfig(kind="top2", capacity_factor=1.0)
VALID: dict[str, Any] = {
    "router": configs.RouterConfig(),
    "switch": SWITCH,
    "top2": TOP2,
    "groups": GROUPS,
    "moe": MOE,
    "switch moe": replace(MOE, top_k=1, router=SWITCH),
    "top2 moe": replace(MOE, router=TOP2),
    "groups moe": replace(MOE, top_k=4, router=GROUPS),
    "model": MODEL,
    "data": configs.DataConfig(),
    "train": configs.TrainConfig(),
    "optimizer": configs.OptimizerConfig(),
    "checkpoint": configs.CheckpointConfig(),
    "run": configs.RunConfig(model=MODEL),
}
NAMES = {
    "run keys": ", ".join(field.name for field in fields(configs.RunConfig)),
    "train keys": ", ".join(f"train.{field.name}" for field in fields(configs.TrainConfig)),
    "model keys": ", ".join(f"model.{field.name}" for field in fields(configs.ModelConfig)),
    "models": ", ".join(NAMED_MODELS),
}
CPU = torch.device("cpu")
GIGABYTES = f"{(total_memory(CPU) or 0) / 1e9:.1f} GB"
NO_MEMORY = f"must fit into the memory of cpu, {GIGABYTES}, and need at least"
CALLS = read_cases("calls")
RECORDER = halley.Recorder("cpu", enabled=False)
STRATEGY = halley.build_strategy("sequential", None, recorder=RECORDER, device="cpu")
PLAIN = halley.ExpertPlacement.plain(8, num_ranks=1)


def layer(config: Any = MOE, hidden_size: Any = 64, **changes: Any) -> halley.MoELayer:
    given: dict[str, Any] = {"strategy": STRATEGY} | changes
    return halley.MoELayer(config, hidden_size, **given)


def strategy(name: Any = "sequential", group: Any = None, **changes: Any) -> object:
    given: dict[str, Any] = {"recorder": RECORDER, "device": "cpu"} | changes
    return halley.build_strategy(name, group, **given)


def model(config: Any = MODEL, **changes: Any) -> MoETransformer:
    groups = halley.ParallelGroups()
    given: dict[str, Any] = {"strategy": STRATEGY, "groups": groups, "recorder": RECORDER}
    return MoETransformer(config, **(given | changes))


def family(name: str, **changes: Any) -> None:
    check_family(replace(NAMED_MODELS[name], **changes))


def router(device: Any) -> object:
    return build_router(MOE, hidden_size=64, dtype=torch.float32, device=device)


def grouped(**changes: Any) -> GroupedExperts:
    given: dict[str, Any] = {"device": "cpu"} | changes
    return GroupedExperts(MOE, 64, groups=halley.ParallelGroups(), dtype=torch.float32, **given)


def experts(activation: Any) -> Experts:
    weight = torch.zeros(1, 4, 4)
    return Experts(up_LGD=weight, down_LDF=weight, activation=activation)


def placement(*experts_WL: Any, num_experts: Any = 2) -> halley.ExpertPlacement:
    return halley.ExpertPlacement(num_experts=num_experts, experts_WL=experts_WL)


def shape(activation: Any) -> LayerShape:
    sizes = {"num_tokens": 1, "hidden_size": 4, "intermediate_size": 4, "num_experts": 2}
    return LayerShape(**sizes, top_k=1, ep_size=1, activation=activation)


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_wrong_call_is_refused(call: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        eval(call, globals())
    assert str(caught.value) == fill(message, {"no_memory": NO_MEMORY})


def test_every_public_name_has_a_wrong_call() -> None:
    """Each public name of ``halley`` has a case of a wrong call, or is listed as an exception."""
    short = {"MoELayer": "layer(", "ExpertPlacement": "placement(", "build_strategy": "strategy("}
    # Wrong calls of these names are in the tests below, test_watchdog, test_moe, cost, strategies.
    elsewhere = {"MoEConfig", "RouterConfig", "Watchdog", "compile", "Predictor", "Task", "Routing"}
    unchecked = {"MoEOutput", "AbstractStrategy", "__version__"}
    for name in set(halley.__all__) - elsewhere - unchecked:
        start = short.get(name, f"halley.{name}(")
        assert any(call.startswith(start) for call, _ in CALLS), name


def test_every_device_argument_accepts_a_string() -> None:
    recorder = halley.Recorder("cpu")
    strategy = halley.build_strategy("chunked", None, recorder=recorder, device="cpu")
    layer = halley.MoELayer(MOE, 64, strategy=strategy, device="cpu", recorder=recorder)
    groups = halley.build_groups(1, device_type="cpu")
    on_meta = model(strategy=strategy, groups=groups, recorder=recorder, device="meta")
    assert {parameter.device.type for parameter in layer.parameters()} == {"cpu"}
    assert {parameter.device.type for parameter in on_meta.parameters()} == {"meta"}
    number = sum(parameter.numel() for parameter in on_meta.parameters())
    assert number == num_parameters(MODEL, ep_size=1, tp_size=1)


# Values that JSON cannot hold are in data/calls.jsonl.
@pytest.mark.parametrize(("config", "field", "value", "message"), read_cases("fields"))
def test_wrong_field_is_refused(config: str, field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        replace(VALID[config], **{field: value})
    assert str(caught.value) == message


@pytest.mark.parametrize("config", VALID)
def test_each_field_refuses_an_object_of_another_type(config: str) -> None:
    """A field without a check would accept a wrong value, which then fails far from its cause."""
    for field in fields(VALID[config]):
        with pytest.raises(ValueError, match=rf"^[a-z.]*{field.name} \(<object object") as caught:
            replace(VALID[config], **{field.name: object()})
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("config", VALID)
def test_each_float_field_must_be_finite(config: str, value: float) -> None:
    for field in fields(VALID[config]):
        if field.type is float:
            with pytest.raises(ValueError, match=rf"{field.name} \({value}\) must be finite"):
                replace(VALID[config], **{field.name: value})


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
    assert configs.RouterConfig(capacity_factor=1).capacity_factor == 1.0
    assert load_config(None, overrides=["max_load=2"]).max_load == 2.0


def test_largest_allowed_values_are_accepted() -> None:
    assert replace(MOE, num_experts=2**15 - 1).num_experts == 32767
    assert configs.DataConfig(seq_len=2**31 - 1).seq_len == 2147483647
    assert replace(MODEL, num_layers=2**31 - 1).num_moe_layers == 2147483647  # without a loop
