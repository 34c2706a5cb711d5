"""The tuner on CPU ranks: same result on all ranks, wrong values lose, large tiles are skipped."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from halley.core.models import find_model
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.fused.config import KernelConfig, TunedConfig
from halley.ops.kernels.launch import OutOfResources
from halley.strategies.fused import FusedStrategy
from halley.tools import tuner as tune
from halley.tools.bar_charts import draw_sweeps, gains
from halley.tools.layer_case import LayerCase, LayerTensors, make_tensors
from halley.tools.tuner import SPACE, fits, tune_layer
from tests.moe.model_case import destroy
from tests.rank_pool import RunRanks


CPU = torch.device("cpu")
TINY = find_model("tiny")
# The interpreter runs each kernel row by row, so the layer is as small as its tiles allow.
SMALL = dataclasses.replace(
    TINY, hidden_size=32, moe=dataclasses.replace(TINY.moe, num_experts=4, intermediate_size=16)
)
CASE = LayerCase(model=SMALL, num_tokens=4, dtype=torch.float32)
FEWER, MORE = "sum_rows=2 combine_rows=8", "chunk_columns=128"


def _tune(rank: int, num_ranks: int) -> TunedConfig:
    groups = build_groups(0, device_type="cpu")
    space = {"sum_rows": (FEWER,)}
    with pytest.MonkeyPatch.context() as patch:  # fewer samples: times do not matter here
        patch.setattr("halley.tools.timer._NUM_WAIT_SAMPLES", 1)
        found = tune_layer(CASE, groups=groups, device=CPU, space=space, num_samples=1)
    destroy(groups)
    return found


def test_all_ranks_find_the_same_configuration(run_ranks: RunRanks) -> None:
    first, second = run_ranks(_tune, 2, timeout_s=240)
    assert first == second
    assert first.sweeps.keys() == {"sum_rows"}
    assert first.sweeps["sum_rows"].keys() == {"", FEWER}
    assert min(t for sweep in first.sweeps.values() for t in sweep.values()) > 0
    assert first.median_us <= first.default_us
    assert set(first.settings) <= {*FEWER.split()}
    assert (first.shape.hidden_size, first.shape.num_tokens) == (32, 4)


def test_fastest_configuration_with_correct_values_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are fixed, so that the winner is known; values are computed."""
    times_us = {"": 100.0, FEWER: 50.0, MORE: 70.0, "best": 70.0}

    def give(candidates: dict[str, tuple[str, ...]], *_: object, **__: object) -> dict[str, float]:
        return {name: times_us[name] for name in candidates}

    is_right = tune._is_correct

    def break_fewer(config: KernelConfig, want: list[torch.Tensor], *others: object) -> bool:
        wrong = [value + 1.0 for value in want] if config.sum_rows == 2 else want
        return is_right(config, wrong, *others)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(tune, "_time", give)
    monkeypatch.setattr(tune, "_is_correct", break_fewer)
    space = {"sum_rows": (FEWER,), "chunk_columns": (MORE,)}
    found = tune_layer(CASE, groups=ParallelGroups(), device=CPU, space=space)
    assert found.settings == ("chunk_columns=128",)
    assert (found.default_us, found.median_us) == (100.0, 70.0)
    assert found.sweeps["sum_rows"] == {"": 100.0}


def test_configuration_that_the_compiler_rejects_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tune.outputs_of

    def outputs_of(strategy: FusedStrategy, tensors: LayerTensors) -> list[torch.Tensor]:
        if strategy.workspaces.config.sum_rows == 2:
            raise OutOfResources(262176, 232448, "shared memory")
        return run(strategy, tensors)

    monkeypatch.setattr(tune, "outputs_of", outputs_of)
    space = {"sum_rows": (FEWER,)}
    found = tune_layer(CASE, groups=ParallelGroups(), device=CPU, space=space, num_samples=1)
    assert found.settings == ()
    assert found.sweeps["sum_rows"].keys() == {""}


def test_configuration_that_exceeds_an_sm_is_not_tried() -> None:
    case = LayerCase(model=TINY, num_tokens=8)
    tensors = make_tensors(case, ParallelGroups(), device=CPU)
    for values in SPACE.values():
        assert any(fits(KernelConfig().changed(value.split()), tensors) for value in values)
    combine = "combine_rows=8 combine_stages=8"
    for settings in ("up.num_stages=5", "up.run=2", "down.per_sm=2", "chunk_columns=128", combine):
        assert not fits(KernelConfig().changed(settings.split()), tensors), settings


def test_chart_shows_the_change_of_each_setting(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    shape = tune.tuned_shape(CASE)
    sweeps = {"up": {"": 200.0, "up.run=2": 190.0, "up.group=16": 210.0}, "down": {"": 190.0}}
    tuned = TunedConfig(
        shape=shape, settings=("up.run=2",), median_us=190.0, default_us=200.0, sweeps=sweeps
    )
    (first, faster), (second, slower) = gains(tuned)
    assert (first, second) == ("up.run=2", "up.group=16")
    assert (faster, slower) == (pytest.approx(-5.0), pytest.approx(5.0))
    draw_sweeps([tuned], tmp_path / "sweeps.png")
    pixels = np.round(image.imread(tmp_path / "sweeps.png")[..., :3] * 255).astype(int)
    kept, tried = ((pixels == colour).all(axis=2) for colour in ((230, 159, 0), (0, 114, 178)))
    assert np.flatnonzero(kept.any(axis=0)).max() < np.flatnonzero(tried.any(axis=0)).min()
    assert np.flatnonzero(kept.any(axis=1)).max() < np.flatnonzero(tried.any(axis=1)).min()


def test_chart_without_sweeps_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"found \(no sweeps\) must hold at least one layer"):
        draw_sweeps([], tmp_path / "sweeps.png")
