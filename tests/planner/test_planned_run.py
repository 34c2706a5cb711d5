"""Runs whose layers have different strategies: steps, checkpoints, and plans on ranks."""

import dataclasses
import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch._dynamo

from halley.core.config import RunConfig
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.moe.layer import MoELayer
from halley.planner import step_plan as planned
from halley.planner.step_plan import StepPlan, check_strategies, describe_plan, plan_run
from halley.strategies.all_to_all import AllToAllStrategy
from halley.strategies.fused import FusedStrategy
from halley.tools.layer_case import RELATIVE_TOLERANCE
from halley.train.step import StepResult, train_step
from tests.rank_pool import RunRanks
from tests.train.run_case import SMALL, built, make_config, make_world, train_on_ranks, write_text


def _take_steps(rank: int, num_ranks: int, config: RunConfig) -> list[StepResult]:
    with built(config, rank=rank, num_ranks=num_ranks) as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch about its tracing
        results = [train_step(run, step) for step in range(2)]
    torch._dynamo.reset()
    return results


def _with(config: RunConfig, strategy: str, *, passes: str = "none") -> RunConfig:
    return dataclasses.replace(config, strategy=strategy, passes=passes)  # type: ignore[arg-type]


def _kinds(rank: int, num_ranks: int, config: RunConfig) -> list[type]:
    with built(config, rank=rank, num_ranks=num_ranks) as run:
        return [type(m.strategy) for m in run.model.modules() if isinstance(m, MoELayer)]


def test_mixed_layers_take_the_same_steps(run_ranks: RunRanks, tmp_path: Path) -> None:
    config = make_config(write_text(tmp_path))
    mixed = _with(config, "chunked,fused")
    kinds = [AllToAllStrategy, FusedStrategy]
    assert run_ranks(_kinds, 2, mixed) == [kinds] * 2
    want = run_ranks(_take_steps, 2, config)
    got = run_ranks(_take_steps, 2, mixed, timeout_s=120.0)
    for mine, others in zip(want[0], got[0], strict=True):
        for name, value in dataclasses.asdict(mine).items():
            tolerance = RELATIVE_TOLERANCE[torch.float32]
            assert getattr(others, name) == pytest.approx(value, rel=tolerance), name


def test_passes_change_no_step_of_mixed_layers(run_ranks: RunRanks, tmp_path: Path) -> None:
    """The graphs have all-to-alls and fused operators."""
    config, strategy = make_config(write_text(tmp_path)), "fused:recompute,functional"
    want = run_ranks(_take_steps, 2, _with(config, strategy), timeout_s=120.0)
    passed = _with(config, strategy, passes="wgrad")
    assert run_ranks(_take_steps, 2, passed, timeout_s=200.0) == want


def test_checkpoint_loads_under_another_strategy(run_ranks: RunRanks, tmp_path: Path) -> None:
    config = make_config(write_text(tmp_path), num_steps=2, every_steps=1)
    mixed = _with(config, "sequential,chunked")
    assert run_ranks(train_on_ranks, 2, mixed) == [[1, 2]] * 2
    longer = dataclasses.replace(config.train, num_steps=3)
    again = dataclasses.replace(config, train=longer)
    assert run_ranks(train_on_ranks, 2, again) == [[3]] * 2  # continues after step 2


def test_plan_of_a_single_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread; a run of tests/cli/test_train_and_export.py plans in a process of its own."""
    monkeypatch.setattr(planned, "ProcessPoolExecutor", lambda n, **_: ThreadPoolExecutor(n))
    model = dataclasses.replace(SMALL, num_layers=1)
    config = make_config(write_text(tmp_path), model=model)
    assert plan_run(config, make_world(), ParallelGroups()) is None
    config = _with(config, "planned")
    check_strategies(config)
    plan = plan_run(config, make_world(), ParallelGroups())
    assert plan is not None
    assert len(plan.strategies) == 1
    assert set(plan.uniform_us) == {"sequential", "chunked"}
    assert plan.problems == {"fused": "its kernels are interpreted on a CPU"}


def _plan_nothing(rank: int, num_ranks: int, config: RunConfig, in_thread: bool) -> str:
    groups = build_groups(0, device_type="cpu")
    with pytest.MonkeyPatch.context() as patch:
        if in_thread:
            patch.setattr(planned, "ProcessPoolExecutor", lambda n, **_: ThreadPoolExecutor(n))
        with pytest.raises(ValueError if in_thread else RuntimeError) as caught:
            plan_run(config, make_world(rank, num_ranks), groups)
    return str(caught.value)


@pytest.mark.parametrize(
    ("in_thread", "text"),
    [
        (True, "strategy (planned) must leave one that can run: not functional"),
        # The ranks of tests are daemons.
        (False, "rank 0 made no plan: AssertionError('daemonic processes"),
    ],
)
def test_failed_plan_is_the_same_error_on_all_ranks(run_ranks, tmp_path, in_thread, text) -> None:
    model = dataclasses.replace(SMALL, moe=dataclasses.replace(SMALL.moe, expert_bias=True))
    config = _with(make_config(write_text(tmp_path), model=model), "planned", passes="wgrad")
    told = run_ranks(_plan_nothing, 2, config, in_thread)
    assert told[0] == told[1]
    assert text in told[0]


def test_wrong_strategies_are_named(tmp_path: Path) -> None:
    config = make_config(write_text(tmp_path))
    check_strategies(_with(config, "chunked, fused:inputs"))
    with pytest.raises(ValueError, match=r"strategy \(planned\) must be one of sequential"):
        check_strategies(_with(config, "planned,fused"))


def test_description_of_a_plan_names_alternatives_and_problems() -> None:
    plan = StepPlan(
        strategies=("functional", "fused", "fused"),
        step_us=1500.0,
        uniform_us={"functional": 1750.0, "fused": 1600.0},
        unpassed_us={},
        problems={"chunked": "no reason"},
    )
    assert describe_plan(plan) == (
        "planned: functional, 2 x fused, 1.50 ms forward and backward, predicted; one for all "
        "layers: functional 1.75 ms, fused 1.60 ms; not chunked: no reason"
    )
    assert json.loads(json.dumps(dataclasses.asdict(plan)))["step_us"] == 1500.0
