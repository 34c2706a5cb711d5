"""A compiled step on two ranks: measured, predicted and simulated."""

import dataclasses
import math

import pytest
import torch
import torch._dynamo

from halley.core.config import DataConfig, RunConfig, TrainConfig
from halley.core.models import find_model
from halley.tools.compiled_step import measure_graphs, simulated_step


def _config(*, tp_size: int) -> RunConfig:
    tiny = find_model("tiny")
    num_experts, top_k = (4, 2) if tp_size == 1 else (1, 1)  # fewer than ranks
    moe = dataclasses.replace(tiny.moe, num_experts=num_experts, top_k=top_k, intermediate_size=32)
    model = dataclasses.replace(tiny, hidden_size=32, num_layers=1, head_dim=8, moe=moe)
    train = dataclasses.replace(TrainConfig(), batch_size=2)
    data = DataConfig(seq_len=16)
    return RunConfig(model=model, data=data, train=train, expert_tp_size=tp_size)


def _measured(
    rank: int, num_ranks: int, tp_size: int
) -> tuple[float, float, float, list[str], list[float]]:
    options = {"passes": "wgrad", "memory_margin": 1.0, "unknown_size": 64}
    config = _config(tp_size=tp_size)
    found = measure_graphs(config, options=options, device=torch.device("cpu"), num_steps=3)
    torch._dynamo.reset()
    step = simulated_step(found.reports, passed=True)
    lengths = [max(span.end_us for span in step), min(span.start_us for span in step)]
    ratio = found.predicted_over_measured
    streams = sorted({span.stream for span in found.measured})
    return found.predicted_us, found.measured_us, ratio, streams, lengths


def test_measured_and_predicted_step_have_the_same_order_of_magnitude(run_ranks) -> None:
    results = run_ranks(_measured, 2, 1, timeout_s=120.0)
    assert results[0][1] == results[1][1]  # the slowest rank's
    for predicted_us, measured_us, ratio, streams, (end_us, start_us) in results:
        assert ratio == predicted_us / measured_us
        assert end_us == pytest.approx(predicted_us)
        assert start_us == 0.0
        assert {"comm", "compute", "exposed"} <= set(streams)
    predicted_us, measured_us, *_ = results[0]  # rank 0 has the measured times
    # Operators of microseconds: the interpreter between them is most of the step.
    assert 0.02 * measured_us < predicted_us < 2.0 * measured_us


def test_tensor_parallel_experts_are_measured(run_ranks) -> None:
    for predicted_us, measured_us, ratio, streams, _ in run_ranks(_measured, 2, 2, timeout_s=120.0):
        assert ratio == predicted_us / measured_us > 0.0
        assert {"comm", "compute", "exposed"} <= set(streams)


def test_wrong_options_are_named_before_the_model_is_traced() -> None:
    options = {"memory_margin": math.nan}
    with pytest.raises(ValueError, match=r"memory_margin \(nan\) must be finite and at least 0"):
        measure_graphs(_config(tp_size=1), options=options, device=torch.device("cpu"), num_steps=1)
