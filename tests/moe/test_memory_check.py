"""Memory estimates have exact parameter counts; a model beyond the limit is an error."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halley.core.config import OptimizerConfig, RunConfig, TrainConfig
from halley.core.models import NAMED_MODELS
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups
from halley.moe.memory_check import (
    check_fits,
    check_memory,
    num_parameters,
    total_memory,
    training_bytes,
)
from halley.moe.transformer import MoETransformer
from halley.strategies.registry import build_strategy


CPU = torch.device("cpu")
TINY = NAMED_MODELS["tiny"]


@pytest.mark.parametrize("name", [*NAMED_MODELS, "without gate"])
def test_number_of_parameters_equals_the_model(name: str) -> None:
    """An estimate above the size of the model would reject models that fit."""
    gelu = replace(TINY, moe=replace(TINY.moe, activation="gelu", shared_intermediate_size=8))
    config = NAMED_MODELS.get(name, gelu)
    recorder = Recorder("cpu", enabled=False)
    strategy = build_strategy("sequential", None, recorder=recorder, device="cpu")
    parts = {"strategy": strategy, "groups": ParallelGroups(), "recorder": recorder}
    model = MoETransformer(config, device="meta", **parts)
    number = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters(config, ep_size=1, tp_size=1) == number


def test_estimate_divides_experts_over_ranks() -> None:
    one_rank = num_parameters(TINY, ep_size=1, tp_size=1)
    expert = 3 * 128 * 256  # gate, up and down
    for tp_size in (1, 2, 4):
        assert one_rank - num_parameters(TINY, ep_size=4, tp_size=tp_size) == 4 * 6 * expert


def test_bytes_of_training_state() -> None:
    """In the update: weights, float32 gradients, two moments, masters of weights in bfloat16."""
    number = num_parameters(TINY, ep_size=1, tp_size=1)
    run = RunConfig(model=TINY)
    assert training_bytes(run, num_ranks=1) == number * 16
    sgd = replace(run, optimizer=OptimizerConfig(kind="sgd"))
    assert training_bytes(sgd, num_ranks=1) == number * 8
    half = replace(run, train=TrainConfig(dtype="bfloat16"))
    assert training_bytes(half, num_ranks=1) == number * (2 + 4 + 4 + 8)
    long = replace(run, train=TrainConfig(batch_size=2**15))
    inputs = 2**15 * 256 * 128 * 5 * 4  # of 4 layers and the last norm
    assert training_bytes(long, num_ranks=1) == number * 12 + inputs


def test_limit_is_the_memory_of_the_device() -> None:
    run = RunConfig(model=TINY)
    available = total_memory(CPU)
    assert available is not None
    need = training_bytes(run, num_ranks=1)
    check_memory(run, num_ranks=1, device=CPU)
    check_memory(run, num_ranks=1, device=CPU, num_sharing=available // need)
    with pytest.raises(ValueError, match=r"of training state on the \d+ ranks that share it$"):
        check_memory(run, num_ranks=1, device=CPU, num_sharing=available // need + 1)


def test_models_without_memory_are_not_checked() -> None:
    """Plans and exports build large models on "meta" or with fake tensors."""
    check_fits(2**60, {}, device=torch.device("meta"))
    with FakeTensorMode():
        check_fits(2**60, {}, device=CPU)


def test_missing_device_is_named() -> None:
    index = torch.cuda.device_count()
    with pytest.raises(RuntimeError, match=rf"device \(cuda:{index}\) must be one of {index} CUDA"):
        total_memory(torch.device("cuda", index))
