"""A batch divided into lanes has the loss, the dropped tokens and the gradients of the batch."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.emulated_link import emulate_link
from benchmarks.graph_bench.gpt2_moe import Gate
from halley.distributed.mesh import build_groups
from halley.lanes import compile_step
from halley.ops.lane_sums import num_lanes, sum_over_lanes
from halley.strategies.traceable import TraceableStrategy
from tests.compiler.model_case import fresh_graphs
from tests.lanes.lane_case import (
    SIZE,
    CutStep,
    Result,
    build_gpt2,
    exchange,
    is_equal,
    make_batch,
    run_uncompiled,
    take_result,
)
from tests.moe.model_case import destroy


BATCH_SIZE = 6  # of the whole batch
NUM_MOE_LAYERS = 2


def _error(result: Result, wanted: Result) -> float:
    """Return the largest error of the loss and of the gradients, relative to the largest value."""
    pairs = zip([result[0], *result[1]], [wanted[0], *wanted[1]], strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def _run_schedules(
    rank: int,
    num_ranks: int,
    gate: Gate,
    num_layers: int,
    nums_lanes: tuple[int, ...],
    max_load: float,
) -> dict[str, tuple[float, bool]]:
    """Return for each schedule its error, and whether it has the bits of lanes in turn, by name."""
    groups = build_groups(num_ranks, device_type="cpu")
    model = build_gpt2(gate, groups, num_layers=num_layers)
    if max_load:
        model.use(TraceableStrategy(groups.ep, deduplicated=True, max_load=max_load))
    batch = make_batch(rank, batch_size=BATCH_SIZE)
    wanted = run_uncompiled(model, batch, num_microbatches=1)
    found: dict[str, tuple[float, bool]] = {}
    with fresh_graphs():
        for lanes in nums_lanes:
            case = CutStep(model, batch, num_microbatches=lanes, divides_batch=True)
            results = case.results()
            for name, result in results.items():
                equal = is_equal(result, results["in turn"])
                found[f"{lanes} lanes of the batch, {name}"] = _error(result, wanted), equal
    destroy(groups)
    return found


@pytest.mark.parametrize(
    ("gate", "num_ranks", "num_layers", "nums_lanes", "max_load"),
    [
        ("switch", 2, 4, (2,), 0.0),
        ("switch", 4, 2, (3,), 0.0),
        ("switch", 2, 4, (2,), 2.0),  # messages of fixed sizes, smaller for a lane than the batch
        ("top2", 2, 2, (1, 3), 0.0),
        ("top2", 4, 4, (2,), 0.0),
        ("dropless", 2, 2, (2, 3), 0.0),
    ],
)
def test_every_schedule_has_the_results_of_the_whole_batch(
    run_ranks,
    gate: Gate,
    num_ranks: int,
    num_layers: int,
    nums_lanes: tuple[int, ...],
    max_load: float,
) -> None:
    arguments = (gate, num_layers, nums_lanes, max_load)
    for found in run_ranks(_run_schedules, num_ranks, *arguments, timeout_s=200.0):
        assert len(found) > 6
        assert {name: each for name, each in found.items() if each[0] > 1e-6 or not each[1]} == {}


class _KeptSlots(TorchDispatchMode):
    """Appends to ``kept`` which slots each ``take_slots`` keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.halley.take_slots.default:
            self.kept.append(result[0])
        return result


def _keep(rank: int, num_ranks: int) -> tuple[list[torch.Tensor], ...]:
    """Return kept slots by layer: of the batch, of its lanes, and of independent microbatches."""
    groups = build_groups(num_ranks, device_type="cpu")
    model = build_gpt2("switch", groups, num_layers=2 * NUM_MOE_LAYERS)
    batch = make_batch(rank, batch_size=BATCH_SIZE)
    with _KeptSlots() as whole:
        model(*batch)
    with fresh_graphs():
        case = CutStep(model, batch, num_microbatches=2, divides_batch=True)
        with _KeptSlots() as lanes:
            case.run(case.orders()["in turn"])  # lane 0 runs its forward first
    with _KeptSlots() as microbatches:
        run_uncompiled(model, batch, num_microbatches=2)
    destroy(groups)
    found = [whole.kept]
    for each in (lanes, microbatches):
        first, second = each.kept[:NUM_MOE_LAYERS], each.kept[NUM_MOE_LAYERS:]
        found.append([torch.cat(halves) for halves in zip(first, second, strict=True)])
    return tuple(found)


def test_lanes_drop_the_tokens_that_the_whole_batch_drops(run_ranks) -> None:
    for whole, lanes, microbatches in run_ranks(_keep, 2):
        assert len(whole) == len(lanes) == NUM_MOE_LAYERS
        assert all(map(torch.equal, lanes, whole))
        for half in (0, 1):
            assert any(not kept.chunk(2)[half].all() for kept in whole)
        # With capacities of their own, the microbatches drop others: the test can fail.
        assert not all(map(torch.equal, microbatches, whole))


def _train(rank: int, num_ranks: int) -> tuple[list[bool], list[float], torch.Size, int]:
    link = emulate_link(bytes_per_s=1e6)  # so slow that lanes are predicted to be faster
    groups = build_groups(num_ranks, device_type="cpu")
    slow = replace(groups, ep=dist.new_group(backend=link.backend))
    model = build_gpt2("switch", slow, num_layers=2)
    batch = make_batch(rank, batch_size=BATCH_SIZE)
    with fresh_graphs():
        step = compile_step(model, 2, divides_batch=True, inner="eager")
        results = [take_result(step(*batch), model) for _ in range(5)]
        assert step.plan is not None
        lanes = step.plan.num_lanes
    wanted = run_uncompiled(model, batch, num_microbatches=1)
    destroy(groups)
    equal = [is_equal(result, results[0]) for result in results]
    return equal, [_error(each, wanted) for each in results], results[0][0].shape, lanes


def test_planned_steps_have_the_results_of_the_whole_batch(run_ranks) -> None:
    for equal, errors, shape, lanes in run_ranks(_train, 2):
        assert equal == [True] * 5
        assert max(errors) <= 1e-6
        assert shape == ()
        assert lanes == 2


def _fall_back(rank: int, num_ranks: int) -> tuple[str, str, list[bool]]:
    """Return the warning, the fallback, and which steps equal the uncompiled one."""
    groups = build_groups(num_ranks, device_type="cpu")
    model = build_gpt2("prioritized", groups, num_layers=2)
    batch = make_batch(rank, batch_size=BATCH_SIZE)
    with fresh_graphs(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = compile_step(model, 2, divides_batch=True, inner="eager")
        results = [take_result(step(*batch)[None], model) for _ in range(2)]
    wanted = run_uncompiled(model, batch, num_microbatches=1)
    destroy(groups)
    warned = [str(each.message) for each in caught if "divided" in str(each.message)]
    return "".join(warned), step.fallback, [is_equal(each, wanted) for each in results]


def test_router_with_priorities_runs_the_whole_batch_and_names_the_reason(run_ranks) -> None:
    for warned, fallback, equal in run_ranks(_fall_back, 2):
        assert "rank the tokens of the whole batch: halley::take_slots_by_weight" in fallback
        assert warned == f"the batch is not divided: {fallback}"
        assert equal == [True, True]


class _Masked(nn.Module):
    """A mean over the rows that a mask keeps, after two all-to-alls that return all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x_TD: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
        error_T = exchange(exchange(self.linear(x_TD).tanh())).square().mean(1)
        return num_lanes() * (error_T * mask_T).sum() / sum_over_lanes(mask_T.sum())


def _run_masked(rank: int, num_ranks: int) -> float:
    torch.manual_seed(rank)
    model = _Masked()
    batch = torch.randn(8, SIZE), torch.tensor([1, 1, 1, 1, 0, 0, 1, 0])
    with fresh_graphs():
        step = compile_step(model, 2, divides_batch=True, inner="eager")
        result = take_result(step(*batch)[None], model)
    return _error(result, run_uncompiled(model, batch, num_microbatches=1))


def test_loss_may_divide_by_a_sum_over_lanes(run_ranks) -> None:
    assert max(run_ranks(_run_masked, 2)) <= 1e-6
