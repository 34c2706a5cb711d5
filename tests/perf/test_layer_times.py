"""Ways to run a layer of experts, compared by predictions whose sums are known."""

import dataclasses
import subprocess
import sys

import pytest

from halley.compiler import OrderReport
from halley.core.config import DataConfig, RunConfig, TrainConfig
from halley.core.models import find_model
from halley.cost.graph_cost import GraphTime
from halley.cost.hardware import H200
from halley.perf.layer_times import layer_times


def _report(before_us: float, after_us: float) -> OrderReport:
    times = [GraphTime(makespan_us=us, comm_us=0.0, exposed_us=0.0) for us in (before_us, after_us)]
    return OrderReport(
        windows={}, time_before=times[0], time_after=times[1], peak_before=0, peak_after=0
    )


def _times(link_bytes_per_s: float, *, gain_us: float) -> dict[str, float]:
    model = dataclasses.replace(
        find_model("mixtral-8x7b"), num_layers=4, moe_interval=2, dense_intermediate_size=64
    )
    train = dataclasses.replace(TrainConfig(), batch_size=8, dtype="bfloat16")
    config = RunConfig(model=model, data=DataConfig(seq_len=1024), train=train)
    hardware = dataclasses.replace(H200, link_bytes_per_s=link_bytes_per_s)
    reports = [_report(1000.0, 1000.0 - gain_us), _report(2000.0, 2000.0)]
    return layer_times(config, reports, passes="both", num_ranks=4, hardware=hardware)


def test_layers_share_what_passes_take_off() -> None:
    times_us = _times(278e9, gain_us=600.0)
    assert times_us["sequential"] - times_us["functional, both"] == pytest.approx(300.0)
    assert list(times_us.values()) == sorted(times_us.values())


def test_fastest_follows_the_gain() -> None:
    assert next(iter(_times(278e9, gain_us=0.0))) == "fused"
    assert next(iter(_times(20e9, gain_us=60e3))) == "functional, both"


def test_chunks_of_columns_are_those_of_the_kernels() -> None:
    from halley.kernels.knobs import Knobs
    from halley.perf import layer_times as module

    assert Knobs().chunk_columns == module._CHUNK_COLUMNS


def test_import_leaves_kernels_alone() -> None:
    code = "import sys, halley.perf.layer_times; sys.exit('halley.kernels.knobs' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
