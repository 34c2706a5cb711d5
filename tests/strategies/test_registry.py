"""Strategies and cost models are built by name."""

from typing import Any

import pytest
import torch

from halley.core.timeline import Recorder
from halley.cost.hardware import CPU as CPU_FIGURES
from halley.cost.hardware import H100, H200, Hardware, predictor_of
from halley.fused.buffers import Workspaces
from halley.strategies.all_gather import AllGatherStrategy
from halley.strategies.all_to_all import AllToAllStrategy
from halley.strategies.auto import AutoStrategy
from halley.strategies.fused import FusedStrategy
from halley.strategies.hierarchical import HierarchicalStrategy
from halley.strategies.registry import (
    STRATEGIES,
    build_strategies,
    build_strategy,
    check_strategy,
    describe_strategies,
    split_strategies,
)
from halley.strategies.traceable import TraceableStrategy
from tests.moe.model_case import CPU


def _build(name: str) -> Any:
    return build_strategy(name, None, recorder=Recorder(CPU), device=CPU)


def test_each_name_builds_its_strategy() -> None:
    built = [_build(name) for name in STRATEGIES]
    on_collectives = [AllToAllStrategy, AllToAllStrategy, AllGatherStrategy, TraceableStrategy]
    others = [*[FusedStrategy] * 2, *[HierarchicalStrategy] * 2, AutoStrategy]
    assert [type(strategy) for strategy in built] == on_collectives + others
    assert [s.fused for s in built if isinstance(s, FusedStrategy)] == [False, True]
    assert built[0].num_chunks == 1
    assert [s.gemm for s in built[:6]] == [*["torch"] * 4, "halley", "halley"]
    where: Any = {"recorder": Recorder(CPU), "device": CPU}
    chunked: Any = build_strategy("chunked", None, num_chunks=3, **where)
    assert (chunked.num_chunks, chunked.predictor.hardware) == (3, CPU_FIGURES)


def test_variant_follows_from_the_name() -> None:
    for name, num_chunks in {"chunked": 0, "chunked:1": 1, "chunked:12": 12}.items():
        assert _build(name).num_chunks == num_chunks
    for name, save in {"fused": "all", "unfused:inputs": "inputs"}.items():
        assert _build(name).save == save
    assert isinstance(_build("gathered"), AllGatherStrategy)  # its earlier name


def test_strategies_use_the_given_workspaces() -> None:
    workspaces = Workspaces(None, CPU)
    fused, unfused, auto = (
        build_strategy(name, None, recorder=Recorder(CPU), device=CPU, workspaces=workspaces)
        for name in ("fused", "unfused", "auto")
    )
    assert isinstance(auto, AutoStrategy)
    for strategy in (fused, unfused, auto.candidates["fused"]):
        assert isinstance(strategy, FusedStrategy)
        assert strategy.workspaces is workspaces


def test_layers_of_one_name_share_a_strategy_and_all_share_workspaces() -> None:
    names = split_strategies("fused, sequential,fused:inputs,sequential", num_layers=4)
    assert names == ("fused", "sequential", "fused:inputs", "sequential")
    first, second, third, fourth = build_strategies(names, None, recorder=Recorder(CPU), device=CPU)
    assert second is fourth
    assert isinstance(first, FusedStrategy)
    assert isinstance(third, FusedStrategy)
    assert (first.save, third.save) == ("all", "inputs")
    assert first.workspaces is third.workspaces
    assert split_strategies("chunked", num_layers=3) == ("chunked",) * 3
    assert split_strategies("chunked", num_layers=0) == ()


def test_equal_strategies_of_consecutive_layers_are_described_once() -> None:
    assert describe_strategies(["fused"] * 3) == "fused"
    assert describe_strategies(["fused", "fused", "auto", "fused"]) == "2 x fused, auto, fused"
    assert describe_strategies([]) == ""


def test_unknown_strategy_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"strategy \(tiled\) must be one of sequential, chunked"):
        build_strategy("tiled", None, recorder=Recorder(CPU), device=CPU)
    with pytest.raises(ValueError, match=r"strategy \(chunked:inputs\) must be .* fused:inputs"):
        check_strategy("chunked:inputs")
    for name in ("chunked:0", "chunked:-1", "chunked:", "gathered:2", "fused:"):
        with pytest.raises(ValueError, match=r"must be one of .* chunked:<number>, unfused:all"):
            check_strategy(name)
    for name in (*STRATEGIES, "fused:all", "unfused:recompute", "chunked:4"):
        check_strategy(name)


@pytest.mark.parametrize(
    ("device_name", "hardware"), [("NVIDIA H100 NVL", H100), ("NVIDIA Something New", H200)]
)
def test_gpu_without_a_cost_model_gets_that_of_an_h200(
    monkeypatch: pytest.MonkeyPatch, device_name: str, hardware: Hardware
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: device_name)
    assert predictor_of(torch.device("cuda", 0)).hardware is hardware
