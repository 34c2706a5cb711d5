"""A compiled model with passes takes the same training steps as an eager model."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

from halley.core.config import RunConfig
from halley.cost.hardware import default_path
from halley.train import optim
from halley.train.optim import ModelOptimizer
from halley.train.step import StepResult, _find_profiles, train_step
from tests.compiler.model_case import AllToAllCalls, whole_graphs
from tests.train.run_case import SMALL, built, make_config, write_text


def _take_steps(rank: int, num_ranks: int, config: RunConfig) -> list[StepResult]:
    with built(config, rank=rank, num_ranks=num_ranks) as run, whole_graphs():
        return [train_step(run, step) for step in range(2)]


def test_passes_change_no_step_and_plan_by_measured_times(run_ranks, tmp_path: Path) -> None:
    """Rank 0 writes the measured times to its file; losses equal those without passes."""
    model = dataclasses.replace(SMALL, num_layers=1)
    config = make_config(write_text(tmp_path), model=model)
    config = dataclasses.replace(config, strategy="functional")
    want = run_ranks(_take_steps, 2, config)
    path = tmp_path / "profiles.jsonl"
    measured = dataclasses.replace(config, passes="wgrad", profiles=str(path))
    assert run_ranks(_take_steps, 2, measured, timeout_s=120.0) == want
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = {kind for line in lines for kind in ("op", "collective", "contention") if kind in line}
    assert kinds == {"op", "collective", "contention"}
    assert {line["environment"]["topology"] for line in lines} == {"ranks 2"}
    path.write_text("no profiles\n")
    with pytest.raises(Exception, match=r"profiles.jsonl.* must be a line of profiles"):
        run_ranks(_take_steps, 2, measured, timeout_s=120.0)


def test_deduplicated_rows_train_with_passes(run_ranks, tmp_path: Path) -> None:
    """One graph without a break; passes change no bit, and the loss is that of other rows."""
    config = make_config(write_text(tmp_path), model=dataclasses.replace(SMALL, num_layers=1))
    losses: dict[str, list[float]] = {}
    for strategy, passes in (
        ("functional", "none"),
        ("functional:deduplicated", "none"),
        ("functional:deduplicated", "wgrad"),
    ):
        run = dataclasses.replace(config, strategy=strategy, passes=passes)
        steps = run_ranks(_take_steps, 2, run, timeout_s=120.0)[0]
        losses[f"{strategy} {passes}"] = [step.loss for step in steps]
    plain, none, wgrad = losses.values()
    assert none == wgrad
    assert none == pytest.approx(plain, rel=1e-5)


def test_where_measured_times_are(tmp_path: Path) -> None:
    config = make_config(write_text(tmp_path))
    wanted = [("auto", "cpu", ""), ("times.jsonl", "cpu", "times.jsonl"), ("", "cuda", "")]
    wanted += [("auto", "cuda", str(default_path()))]
    for profiles, device, path in wanted:
        config = dataclasses.replace(config, profiles=profiles)
        assert _find_profiles(config, torch.device(device)) == path


def _find_events(
    rank: int, num_ranks: int, config: RunConfig
) -> tuple[list[StepResult], list[str]]:
    """Return the steps, and all-to-alls and sums of gradients in the order that backward starts."""
    events: list[str] = []
    all_reduce, backward = dist.all_reduce, ModelOptimizer.backward

    def noted_sum(*args: Any, **kwargs: Any) -> object:
        events.append("sum")
        return all_reduce(*args, **kwargs)

    def noted_backward(optimizer: ModelOptimizer, loss: torch.Tensor, **kwargs: Any) -> None:
        events.clear()
        with AllToAllCalls(events), mock.patch.object(dist, "all_reduce", noted_sum):
            backward(optimizer, loss, **kwargs)

    with (
        mock.patch.object(optim, "BUCKET_BYTES", 1),
        mock.patch.object(ModelOptimizer, "backward", noted_backward),
    ):
        return _take_steps(rank, num_ranks, config), events


def test_sums_of_gradients_run_beside_backward(run_ranks, tmp_path: Path) -> None:
    """All-reduces of gradients start between the all-to-alls of backward, also with passes.

    Passes that plan by predicted times change no step.
    """
    config = dataclasses.replace(make_config(write_text(tmp_path)), strategy="functional")
    found: list[list[StepResult]] = []
    for passes in ("none", "wgrad"):
        passed = dataclasses.replace(config, passes=passes)
        for steps, events in run_ranks(_find_events, 2, passed, timeout_s=120.0):
            last = len(events) - events[::-1].index("all-to-all")
            assert events.count("sum") > events[:last].count("sum") > 3, passes
            found.append(steps)
    assert found[2:] == found[:2]
