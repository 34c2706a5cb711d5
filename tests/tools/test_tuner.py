"""The tuner on CPU ranks: same result on all ranks, wrong values lose, large tiles are skipped."""

import dataclasses

import pytest
import torch

from halley.core.models import find_model
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.fused.config import KernelConfig, TunedConfig, TunedShape
from halley.ops.kernels.launch import OutOfResources
from halley.strategies.fused import FusedStrategy
from halley.tools import tuner as tune
from halley.tools.layer_case import LayerCase, LayerTensors, make_tensors
from halley.tools.tuner import SPACE, fits, tune_layer
from tests.moe.model_case import CPU, destroy
from tests.rank_pool import RunRanks


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
    assert first.shape == TunedShape(
        hidden_size=32, num_experts=4, top_k=2, dtype="float32", num_tokens=4
    )


@pytest.mark.parametrize("is_rejected", [False, True])
def test_fastest_configuration_with_correct_values_wins(
    is_rejected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are fixed. The fastest one has wrong values, or the compiler rejects it."""
    times_us = {"": 100.0, FEWER: 50.0, MORE: 70.0, "best": 70.0}

    def give(candidates: dict[str, tuple[str, ...]], *_: object, **__: object) -> dict[str, float]:
        return {name: times_us[name] for name in candidates}

    run = tune.outputs_of

    def outputs_of(strategy: FusedStrategy, tensors: LayerTensors) -> list[torch.Tensor]:
        if strategy.workspaces.config.sum_rows != 2:
            return run(strategy, tensors)
        if is_rejected:
            raise OutOfResources(262176, 232448, "shared memory")
        return [value + 1.0 for value in run(strategy, tensors)]

    monkeypatch.setattr(tune, "_time", give)
    monkeypatch.setattr(tune, "outputs_of", outputs_of)
    space = {"sum_rows": (FEWER,), "chunk_columns": (MORE,)}
    found = tune_layer(CASE, groups=ParallelGroups(), device=CPU, space=space)
    assert found.settings == ("chunk_columns=128",)
    assert (found.default_us, found.median_us) == (100.0, 70.0)
    assert found.sweeps["sum_rows"] == {"": 100.0}


def test_configuration_that_exceeds_an_sm_is_not_tried() -> None:
    case = LayerCase(model=TINY, num_tokens=8)
    tensors = make_tensors(case, ParallelGroups(), device=CPU)
    for values in SPACE.values():
        assert any(fits(KernelConfig().changed(value.split()), tensors) for value in values)
    combine = "combine_rows=8 combine_stages=8"
    for settings in ("up.num_stages=5", "up.run=2", "down.per_sm=2", "chunk_columns=128", combine):
        assert not fits(KernelConfig().changed(settings.split()), tensors), settings
