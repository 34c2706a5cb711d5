"""Strategies and cost models are found by name."""

import pytest
import torch

from halley.core.timeline import Recorder
from halley.cost.hardware import CPU as CPU_FIGURES
from halley.cost.hardware import H100, H200, Hardware
from halley.moe.strategy import STRATEGIES, build_strategy, predictor_of
from halley.strategies.chunked import ChunkedStrategy
from halley.strategies.sequential import SequentialStrategy
from tests.moe.model_case import CPU


def test_each_name_builds_its_strategy() -> None:
    recorder = Recorder(CPU)
    built = [build_strategy(name, None, recorder=recorder, device=CPU) for name in STRATEGIES]
    assert [type(strategy) for strategy in built] == [SequentialStrategy, ChunkedStrategy]
    chunked = build_strategy("chunked", None, recorder=recorder, device=CPU, num_chunks=3)
    assert isinstance(chunked, ChunkedStrategy)
    assert (chunked.num_chunks, chunked.predictor.hardware) == (3, CPU_FIGURES)


def test_unknown_strategy_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"strategy \(tiled\) must be one of sequential, chunked"):
        build_strategy("tiled", None, recorder=Recorder(CPU), device=CPU)


@pytest.mark.parametrize(
    ("device_name", "hardware"), [("NVIDIA H100 NVL", H100), ("NVIDIA Something New", H200)]
)
def test_gpu_without_figures_is_taken_for_an_h200(
    monkeypatch: pytest.MonkeyPatch, device_name: str, hardware: Hardware
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: device_name)
    assert predictor_of(torch.device("cuda", 0)).hardware is hardware
