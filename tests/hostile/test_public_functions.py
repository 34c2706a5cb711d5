"""Wrong calls of what users import: each gives one exact line, before any memory is taken."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import halley
from halley.core.config import RunConfig
from halley.core.models import NAMED_MODELS
from halley.moe.memory_check import check_memory, num_parameters, total_memory, training_bytes
from halley.moe.transformer import MoETransformer
from tests.hostile.test_configuration import MODEL, MOE
from tests.hostile.wrong_calls import RECORDER, STRATEGY, WRONG_CALLS
from tests.hostile.wrong_values import WRONG_VALUES


CPU = torch.device("cpu")
GIGABYTES = f"{(total_memory(CPU) or 0) / 1e9:.1f} GB"
ALL_WRONG = WRONG_CALLS | WRONG_VALUES


@pytest.mark.parametrize("name", ALL_WRONG)
def test_wrong_call_is_refused(name: str) -> None:
    call, message = ALL_WRONG[name]
    assert _message(call) == message


def test_every_public_name_has_a_wrong_call() -> None:
    """A name that is added to the package must be added to the tables, too."""
    tested = {
        "ExpertPlacement": "placement: ",
        "MoELayer": "layer: ",
        "ParallelGroups": "parallel groups: ",
        "Recorder": "recorder: ",
        "build_groups": "groups: ",
        "build_strategy": "strategy: ",
        "sync_gradients": "gradients: ",
    }
    elsewhere = {"MoEConfig", "RouterConfig", "Watchdog"}  # test_configuration, test_watchdog
    results = {"MoEOutput"}  # made by the layer alone
    assert set(halley.__all__) <= set(tested) | elsewhere | results
    for start in tested.values():
        assert any(name.startswith(start) for name in ALL_WRONG)


@pytest.mark.parametrize(
    ("config", "hidden_size", "sizes", "need"),
    [
        (
            MOE,
            10**10,
            "hidden_size (10000000000), num_experts (8), intermediate_size (32), "
            "shared_intermediate_size (0)",
            "31040.0 GB",
        ),
        (
            replace(MOE, num_experts=32767, intermediate_size=2**30),
            4096,
            "hidden_size (4096), num_experts (32767), intermediate_size (1073741824), "
            "shared_intermediate_size (0)",
            "1729329480.9 GB",
        ),
        (
            replace(MOE, shared_intermediate_size=2**31 - 8),
            4096,
            "hidden_size (4096), num_experts (8), intermediate_size (32), "
            "shared_intermediate_size (2147483640)",
            "105553.1 GB",
        ),
    ],
)
def test_layer_that_cannot_fit_is_refused(
    config: halley.MoEConfig, hidden_size: int, sizes: str, need: str
) -> None:
    """Without the check, torch's allocator names a number of bytes and none of the sizes."""
    message = _message(lambda: halley.MoELayer(config, hidden_size, strategy=STRATEGY))
    want = f"must fit into the memory of cpu, {GIGABYTES}, and need at least {need}"
    assert message == f"{sizes} {want} of parameters on a rank"


@pytest.mark.parametrize(
    ("changes", "need"),
    [
        ({"hidden_size": 10**9}, "17572.0 GB"),
        ({"vocab_size": 2**31 - 1, "hidden_size": 4096}, "70368.8 GB"),
        ({"num_layers": 2**31 - 1}, "533263.1 GB"),
    ],
)
def test_model_that_cannot_fit_is_refused(changes: dict[str, Any], need: str) -> None:
    config = replace(MODEL, **changes)
    groups = halley.ParallelGroups()
    message = _message(
        lambda: MoETransformer(config, strategy=STRATEGY, groups=groups, recorder=RECORDER)
    )
    sizes = (
        f"vocab_size ({config.vocab_size}), hidden_size ({config.hidden_size}), "
        f"num_layers ({config.num_layers}), num_experts (8), intermediate_size (32)"
    )
    want = f"must fit into the memory of cpu, {GIGABYTES}, and need at least {need}"
    assert message == f"{sizes} {want} of parameters on a rank"


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
        f"data.seq_len (256) must fit into the memory of cpu, {GIGABYTES}, and need at least "
        f"{need:.1f} GB of training state on a rank"
    )


def test_strings_name_devices_wherever_one_is_wanted() -> None:
    """Strings were taken by some and refused with an AttributeError by others."""
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
