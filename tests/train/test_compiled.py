"""Training with passes over the compiled model: the steps that it takes without."""

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch._dynamo

from halley.core.config import RunConfig
from halley.train.compiled import check_passes
from halley.train.step import StepResult, train_step
from tests.train.run_case import SMALL, built, make_config, write_text


def _take_steps(rank: int, num_ranks: int, config: RunConfig) -> list[StepResult]:
    with built(config, rank=rank, num_ranks=num_ranks) as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of how it traces
        results = [train_step(run, step) for step in range(2)]
    torch._dynamo.reset()
    return results


def test_passes_change_no_step(run_ranks, tmp_path: Path) -> None:
    model = dataclasses.replace(SMALL, num_layers=1)
    config = make_config(write_text(tmp_path), model=model)
    config = dataclasses.replace(config, strategy="functional")
    want = run_ranks(_take_steps, 2, config)
    passed = dataclasses.replace(config, passes="both")
    assert run_ranks(_take_steps, 2, passed, timeout_s=120.0) == want


def test_passes_want_a_whole_graph(tmp_path: Path) -> None:
    config = dataclasses.replace(make_config(write_text(tmp_path)), passes="wgrad")
    with pytest.raises(ValueError, match=r"\(sequential\) must be functional, unfused or fused"):
        check_passes(config)
    with pytest.raises(ValueError, match=r"\(chunked\) must be functional, unfused or fused"):
        check_passes(dataclasses.replace(config, strategy="fused,chunked"))
    for strategy in ("planned", "functional, fused:inputs", "unfused"):
        check_passes(dataclasses.replace(config, strategy=strategy))
    config = dataclasses.replace(config, strategy="functional")
    check_passes(config)
    train = dataclasses.replace(config.train, activation_checkpointing=True)
    with pytest.raises(ValueError, match=r"activation_checkpointing \(true\) must be false"):
        check_passes(dataclasses.replace(config, train=train))
    moe = dataclasses.replace(config.model.moe, expert_bias=True)
    biased = dataclasses.replace(config, model=dataclasses.replace(config.model, moe=moe))
    with pytest.raises(ValueError, match=r"model.moe.expert_bias \(true\) must be false"):
        check_passes(biased)
