"""Plans of a step: the choice against all choices, problems, and extrapolation to deep models."""

import dataclasses
import itertools
from typing import Any

import pytest

from halley.compiler import OrderReport
from halley.core.config import DataConfig, RunConfig, TrainConfig
from halley.core.models import find_model
from halley.core.types import LayerShape, Task
from halley.cost.hardware import CPU, H200, Hardware
from halley.cost.simulate import GraphTime
from halley.planner import step_plan
from halley.planner.step_plan import (
    StepTimes,
    choose_strategies,
    find_problems,
    plan_strategies,
    trace_step,
)


NAMES = ("functional", "fused")
NO_ACCESS = "ranks do not address each other's memory"


def _config(num_layers: int, *, passes: str = "wgrad", num_heads: int = 32) -> RunConfig:
    """Return a run whose attention takes longer than its experts."""
    tiny = find_model("tiny")
    heads = {"num_heads": num_heads, "num_kv_heads": num_heads, "head_dim": 128}
    moe = dataclasses.replace(tiny.moe, intermediate_size=512)
    sizes = {"num_layers": num_layers, "hidden_size": 1024, "qk_norm": "none", **heads}
    model = dataclasses.replace(tiny, moe=moe, **sizes)
    train = TrainConfig(batch_size=2, dtype="bfloat16")
    config = RunConfig(model=model, data=DataConfig(seq_len=2048), train=train)
    return dataclasses.replace(config, passes=passes)


def _hardware(gb_per_s: float) -> Hardware:
    free = dict.fromkeys(("graph_us", "split_sum_us", "call_us", "collective_us", "eager_us"), 0.0)
    times = {"link_latency_us": 2.0, "launch_us": 0.5, "kernel_us": 0.5, **free}
    return dataclasses.replace(H200, link_bytes_per_s=gb_per_s * 1e9, **times)


def test_choice_is_the_best_of_all() -> None:
    """Weight gradients hide a slow link, except in the last layer, which has few behind it."""
    times = StepTimes(_config(2), num_ranks=4, hardware=_hardware(100.0))
    chosen = choose_strategies(NAMES, num_layers=2, predict=times)
    assert times(chosen) == min(map(times, itertools.product(NAMES, repeat=2)))
    assert chosen == ("functional", "fused")


def test_search_changes_one_role_at_a_time() -> None:
    """ "fused" is the best strategy for all layers; the first and the last layer are exceptions."""

    def predict(names: tuple[str, ...]) -> float:
        functional_us = (1.0, 3.0, 3.0, 3.0, 1.5)
        pairs = zip(names, functional_us, strict=True)
        return sum(us if name == "functional" else 2.0 for name, us in pairs)

    chosen = choose_strategies(NAMES, num_layers=5, predict=predict)
    assert chosen == ("functional", "fused", "fused", "fused", "functional")


def test_weight_gradients_run_under_all_to_alls_next_to_fused_layers() -> None:
    """Fused operators have a cost and do not move; movable GEMMs run under all-to-alls."""
    options = {"passes": "wgrad", "num_ranks": 4, "hardware": _hardware(100.0)}
    forward, backward = trace_step(_config(2, num_heads=8), ("functional", "fused"), **options)
    spans_us = {span.name: span.duration_us for span in forward.spans_before}
    assert spans_us["fused_experts"] > 10.0 * spans_us["mm"]
    assert len(forward.windows) == 3
    hidden = [name for names in backward.windows.values() for name in names]
    assert len(backward.windows) == 2
    assert {"weight_gemm", "weight_gemm_1"} & set(hidden)
    assert backward.time_after.exposed_us < backward.time_before.exposed_us


def test_strategy_with_a_problem_is_not_chosen() -> None:
    config, hardware = _config(1), _hardware(1.0)
    problems = find_problems(config, hardware=hardware, fused_problem=NO_ACCESS)
    plan = plan_strategies(config, num_ranks=4, hardware=hardware, problems=problems)
    assert plan.strategies == ("functional",)
    assert plan.problems == {"fused": NO_ACCESS}
    assert plan.uniform_us == {"functional": plan.step_us}
    assert list(plan.unpassed_us) == ["sequential", "chunked"]
    assert max(plan.step_us, plan.unpassed_us["chunked"]) < plan.unpassed_us["sequential"]


def test_problems_that_need_no_rank() -> None:
    config = _config(1)
    assert find_problems(config, hardware=H200) == {}
    single = dataclasses.replace(config, train=dataclasses.replace(config.train, dtype="float32"))
    assert list(find_problems(single, hardware=H200)) == ["fused"]
    assert find_problems(single, hardware=CPU) == {}
    moe = dataclasses.replace(config.model.moe, expert_bias=True)
    model = dataclasses.replace(config.model, moe=moe)
    biased = dataclasses.replace(config, model=model)
    problems = find_problems(biased, hardware=H200)
    assert list(problems) == ["functional", "fused"]
    rule = r"strategy \(planned\) must leave one that can run: not f"
    with pytest.raises(ValueError, match=rule):
        plan_strategies(biased, num_ranks=4, hardware=H200, problems=problems)


def _by_hand(traced: list[tuple[tuple[str, ...], str]], us: dict[str, float]):
    """Return a fake ``trace_step``: a step takes 100 us and the given time of each layer."""

    def trace(
        config: RunConfig, strategies: tuple[str, ...], *, passes: str, **_: object
    ) -> list[OrderReport]:
        assert config.model.num_moe_layers == len(strategies)
        traced.append((strategies, passes))
        time_us = 100.0 + sum(us[name] for name in strategies)
        time = GraphTime(makespan_us=time_us, comm_us=0.0, exposed_us=0.0)
        times: dict[str, Any] = {"time_before": time, "time_after": time}
        return [OrderReport(windows={}, peak_before=0, peak_after=0, **times)]

    return trace


def test_time_of_a_deep_model_is_extrapolated_from_short_models(monkeypatch) -> None:
    traced: list[tuple[tuple[str, ...], str]] = []
    monkeypatch.setattr(step_plan, "trace_step", _by_hand(traced, {"functional": 3, "fused": 2}))
    deep = dataclasses.replace(
        _config(41).model, num_dense_layers=1, moe_interval=2, dense_intermediate_size=64
    )
    config = dataclasses.replace(_config(41), model=deep)
    plan = plan_strategies(config, num_ranks=4, hardware=H200, problems={})
    assert plan.strategies == ("fused",) * 20
    assert plan.step_us == pytest.approx(100.0 + 20 * 2.0)
    assert plan.uniform_us == pytest.approx({"functional": 160.0, "fused": 140.0})
    assert max(len(strategies) for strategies, _ in traced) == 4
    assert len(set(traced)) == len(traced) <= 2 * (2 + 3) + 2  # two of them without passes


def test_chunked_layers_count_each_shard_as_an_expert(monkeypatch) -> None:
    shapes: list[LayerShape] = []

    def sketch(shape: LayerShape, *_: object, num_chunks: int) -> list[Task]:
        shapes.append(shape)
        return []

    monkeypatch.setattr(step_plan, "all_to_all_tasks", sketch)
    config = dataclasses.replace(_config(1), expert_tp_size=2, num_chunks=2)
    StepTimes(config, num_ranks=4, hardware=H200)
    moe = config.model.moe
    found = {(s.num_experts, s.top_k, s.intermediate_size, s.ep_size) for s in shapes}
    assert found == {(2 * moe.num_experts, 2 * moe.top_k, moe.intermediate_size // 2, 4)}


def test_chunks_are_chosen_where_the_wire_is_slow(monkeypatch) -> None:
    """Without passes, layers do not overlap, so all have the strategy that is best for one."""
    monkeypatch.setattr(step_plan, "trace_step", _by_hand([], {"functional": 5e3, "fused": 4e3}))
    config = _config(3, passes="none")
    slow, fast = _hardware(20.0), _hardware(20000.0)
    plan = plan_strategies(config, num_ranks=4, hardware=slow, problems={"fused": NO_ACCESS})
    assert plan.strategies == ("chunked",) * 3
    assert plan.step_us < plan.uniform_us["sequential"] == 100.0 + 3 * 5000.0
    assert plan.unpassed_us == {}
    plan = plan_strategies(config, num_ranks=4, hardware=fast, problems={})
    assert plan.strategies == ("fused",) * 3
