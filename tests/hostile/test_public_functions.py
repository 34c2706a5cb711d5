"""A wrong call of a public function raises one exact message before memory is allocated.

The calls are Python expressions in ``data/calls.jsonl``. They may use every name of this module.
"""

import math  # noqa: F401 - data/calls.jsonl uses the names marked so
from dataclasses import replace
from pathlib import Path  # noqa: F401
from typing import Any

import pytest
import torch

import halley
from halley.core.config import RunConfig
from halley.core.models import NAMED_MODELS
from halley.core.reference import activate  # noqa: F401
from halley.core.routing import (  # noqa: F401
    check_tp_size,
    chunk_sizes,
    local_experts,
    sort_keys,
)
from halley.core.timeline import write_chrome_trace  # noqa: F401
from halley.core.types import Experts, LayerShape
from halley.cost.hardware import Environment  # noqa: F401
from halley.cost.profiles import Curve  # noqa: F401
from halley.cost.simulate import (
    Contention,  # noqa: F401
    Operation,  # noqa: F401
)
from halley.moe.layer import GroupedExperts
from halley.moe.memory_check import check_memory, num_parameters, total_memory, training_bytes
from halley.moe.router import build_router
from halley.moe.transformer import MoETransformer
from halley.planner.expert_balance import plan_placement  # noqa: F401
from halley.strategies.registry import (
    build_strategies,  # noqa: F401
    predictor_of,  # noqa: F401
    split_strategies,  # noqa: F401
)
from halley.tools.skew import parse_load  # noqa: F401
from tests.hostile.cases import read_cases
from tests.hostile.test_configuration import MODEL, MOE


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


def router(device: Any) -> object:
    return build_router(MOE, hidden_size=64, dtype=torch.float32, device=device)


def grouped(**changes: Any) -> GroupedExperts:
    given: dict[str, Any] = {
        "num_experts": 8, "hidden_size": 64, "intermediate_size": 32, "up_size": 64, "bias": False,
        "groups": halley.ParallelGroups(), "dtype": torch.float32, "device": "cpu",
    }  # fmt: skip
    return GroupedExperts(**(given | changes))


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
    assert _message(lambda: eval(call, globals())) == message


def test_every_public_name_has_a_wrong_call() -> None:
    """A name that is added to the package must be added to the cases, too."""
    short = {"MoELayer": "layer(", "ExpertPlacement": "placement(", "build_strategy": "strategy("}
    # In test_configuration, test_watchdog, tests/moe/test_moe, tests/cost and tests/strategies.
    elsewhere = {"MoEConfig", "RouterConfig", "Watchdog", "compile", "Predictor", "Task", "Routing"}
    unchecked = {"MoEOutput", "AbstractStrategy", "__version__"}
    for name in set(halley.__all__) - elsewhere - unchecked:
        start = short.get(name, f"halley.{name}(")
        assert any(call.startswith(start) for call, _ in CALLS), name


def test_layer_that_cannot_fit_is_refused() -> None:
    """Without the check, torch's allocator names a number of bytes and none of the sizes."""
    config = replace(MOE, num_experts=32767, shared_intermediate_size=2**30)
    sizes = (
        "hidden_size (4096), num_experts (32767), intermediate_size (32), "
        "shared_intermediate_size (1073741824)"
    )
    message = _message(lambda: layer(config, 4096))
    assert message == f"{sizes} {NO_MEMORY} 52828.6 GB of parameters on a rank"


@pytest.mark.parametrize(
    ("changes", "need"),
    [
        ({"vocab_size": 2**31 - 1, "hidden_size": 4096}, "70368.8 GB"),
        ({"num_layers": 2**31 - 1}, "533263.1 GB"),
    ],
)
def test_model_that_cannot_fit_is_refused(changes: dict[str, Any], need: str) -> None:
    config = replace(MODEL, **changes)
    sizes = (
        f"vocab_size ({config.vocab_size}), hidden_size ({config.hidden_size}), "
        f"num_layers ({config.num_layers}), num_experts (8), intermediate_size (32)"
    )
    assert _message(lambda: model(config)) == f"{sizes} {NO_MEMORY} {need} of parameters on a rank"


def test_run_that_cannot_fit_is_refused() -> None:
    config = RunConfig(model=NAMED_MODELS["deepseek-v3"])  # 10 TB on one rank
    moe = config.model.moe
    need = training_bytes(config, num_ranks=1) / 1e9
    assert _message(lambda: check_memory(config, num_ranks=1, device=CPU)) == (
        f"model.vocab_size ({config.model.vocab_size}), "
        f"model.hidden_size ({config.model.hidden_size}), "
        f"model.num_layers ({config.model.num_layers}), "
        f"model.moe.num_experts ({moe.num_experts}), "
        f"model.moe.intermediate_size ({moe.intermediate_size}), train.batch_size (8), "
        f"data.seq_len (256) {NO_MEMORY} {need:.1f} GB of training state on a rank"
    )


def test_every_device_argument_accepts_a_string() -> None:
    recorder = halley.Recorder("cpu")
    strategy = halley.build_strategy("chunked", None, recorder=recorder, device="cpu")
    layer = halley.MoELayer(MOE, 64, strategy=strategy, device="cpu", recorder=recorder)
    model = MoETransformer(
        MODEL,
        strategy=strategy,
        groups=halley.build_groups(1, device_type="cpu"),
        recorder=recorder,
        device="meta",
    )
    assert {parameter.device.type for parameter in layer.parameters()} == {"cpu"}
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    number = sum(parameter.numel() for parameter in model.parameters())
    assert number == num_parameters(MODEL, ep_size=1, tp_size=1)


def _message(call: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - callers compare the text
        call()
    return str(caught.value)
