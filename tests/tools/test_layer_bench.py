"""The layer benchmark: result lines, lower bounds by hand, and no time for wrong values."""

import dataclasses
import json
import math
from pathlib import Path
from typing import final

import pytest
import torch

from halley.core.models import find_model
from halley.core.timeline import Recorder
from halley.core.types import Experts, LayerShape, Routing, Task
from halley.cost.hardware import Predictor
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.strategies.all_to_all import AllToAllStrategy
from halley.strategies.base import AbstractStrategy
from halley.tools import layer_case
from halley.tools.candidates import build_candidates, check_experts, wire_us
from halley.tools.layer_bench import _hidden, bench_layer, measure_layers
from halley.tools.layer_case import (
    RELATIVE_TOLERANCE,
    LayerCase,
    make_tensors,
    outputs_of,
    reference_outputs,
    relative_error,
)
from halley.tools.timer import Row, results_path, to_float, write_rows
from tests.moe.model_case import CPU, destroy
from tests.rank_pool import RunRanks


GPU = torch.device("cuda")
ONE_SAMPLE = {"device": CPU, "num_samples": 1, "commit": "abc"}
BAD = (math.nan, math.inf)
NAMES = ("y", "x.grad", "weights.grad", "up.grad", "down.grad")  # of the values of a layer
TINY = find_model("tiny")
MOE = dataclasses.replace(TINY.moe, intermediate_size=8)
SMALL = dataclasses.replace(TINY, hidden_size=16, moe=MOE)
CASE = LayerCase(model=SMALL, num_tokens=32, dtype=torch.float32)


@final
class ScaledStrategy(AbstractStrategy):
    """The correct output times a factor, or an error."""

    def __init__(self, groups: ParallelGroups, factor: float, *, problem: str = "") -> None:
        self.right = AllToAllStrategy(groups.ep, recorder=Recorder(CPU, enabled=False))
        self.factor, self.problem = factor, problem

    def forward(self, x_TD: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
        if self.problem:
            raise RuntimeError(self.problem)
        return self.factor * self.right.forward(x_TD, routing, experts)

    def tasks(self, shape: LayerShape, predictor: Predictor) -> list[Task]:
        return self.right.tasks(shape, predictor)


def _measure(rank: int, num_ranks: int) -> list[Row]:
    groups = build_groups(0, device_type="cpu")
    recorder = Recorder(CPU, enabled=False)
    names = ["sequential", "chunked"]
    candidates = build_candidates(CASE, names, groups=groups, recorder=recorder, device=CPU)
    del candidates["chunked n=3"]  # two settings are enough to choose from
    candidates["wrong"] = ScaledStrategy(groups, 1.01)
    candidates["rounded:float8"] = ScaledStrategy(groups, 1.01)
    where = {"groups": groups, "recorder": recorder, "device": CPU}
    rows = bench_layer(CASE, candidates, link_bytes_per_s=1e6, num_samples=3, **where)
    destroy(groups)
    return rows


def test_wrong_strategy_gets_no_time(run_ranks: RunRanks) -> None:
    rows, others = run_ranks(_measure, 2)
    names = ("sequential", "chunked", "wrong", "rounded:float8")
    expected = [(d, name) for d in ("forward", "forward_backward") for name in names]
    assert [(row["direction"], row["strategy"]) for row in rows] == expected
    for row, other in zip(rows, others, strict=True):
        assert row["median_us"] == other["median_us"]
        error = to_float(row["max_rel_err"])
        assert row["floor_us"] == max(to_float(row["gemm_us"]), to_float(row["wire_us"]))
        if row["strategy"] in ("wrong", "rounded:float8"):
            untimed = row["median_us"] is None
            assert (untimed, row["bit_equal"]) == (row["strategy"] == "wrong", False)
            assert error == pytest.approx(0.01, rel=0.01)
            continue
        assert (row["samples"], row["bit_equal"]) == (3, True)
        assert error < 1e-6
        p10, median, p90 = (to_float(row[key]) for key in ("p10_us", "median_us", "p90_us"))
        assert 0 < p10 <= median <= p90
        assert to_float(row["exposed_comm_us"]) > 0
    forward, both = (to_float(rows[i]["wire_us"]) for i in (0, 4))
    assert both == pytest.approx(2 * forward, abs=0.2)  # rounded to a tenth
    assert (rows[0]["setting"], str(rows[1]["setting"])[:2]) == (None, "n=")


def _wire(rank: int, num_ranks: int, tp_size: int = 1) -> float:
    groups = build_groups(0, device_type="cpu", tp_size=tp_size)
    tensors = make_tensors(CASE, groups, device=CPU)
    # 8 experts on 4 ranks. Rank 0 sends tokens 0 and 1 to rank 1 (token 0 has two experts there)
    # and token 1 to rank 3. The other ranks keep their tokens.
    home = torch.tensor([[2 * rank, 2 * rank + 1]] * 2)
    idx_TK = torch.tensor([[2, 3], [3, 6]]) if rank == 0 else home
    routing = Routing(topk_idx_TK=idx_TK, topk_weights_TK=torch.ones(2, 2))
    result = wire_us(dataclasses.replace(tensors, routing=routing), link_bytes_per_s=3e6)
    destroy(groups)
    return result


@pytest.mark.parametrize(
    ("tp_size", "num_rows"),
    [
        (1, 3),  # leave rank 0
        # Two sets of two ranks with 4 experts each, so ranks 0 and 1 share experts 2 and 3. Of
        # rank 0, both tokens go to rank 1 and token 1 to ranks 2 and 3; both of each other rank go
        # to its tensor-parallel peer. Rank 0 receives two rows and sends four.
        (2, 4),
    ],
)
def test_wire_time_counts_a_token_once_per_destination_rank(
    run_ranks: RunRanks, tp_size: int, num_rows: int
) -> None:
    """A row is 16 float32, 64 bytes, at 3 MB/s."""
    assert run_ranks(_wire, 4, tp_size) == pytest.approx([num_rows * 64 / 3e6 * 1e6] * 4)


def _compare_with_one_rank(
    rank: int, num_ranks: int, case: LayerCase, tp_size: int = 1
) -> list[float]:
    """Compare values; return the load of each rank, or of each set that shares experts."""
    groups = build_groups(0, device_type="cpu", tp_size=tp_size)
    tensors = make_tensors(case, groups, device=CPU)
    strategy = AllToAllStrategy(groups.ep, recorder=Recorder(CPU, enabled=False), tp_size=tp_size)
    got, want = outputs_of(strategy, tensors), reference_outputs(tensors)
    destroy(groups)
    for name, value, wanted in zip(NAMES, got, want, strict=True):
        torch.testing.assert_close(value, wanted.to(value.dtype), msg=name, rtol=1e-4, atol=1e-5)
    return tensors.counts_WE.sum(0).view(num_ranks // tp_size, -1).sum(1).tolist()


@pytest.mark.parametrize(("num_ranks", "tp_size"), [(1, 1), (2, 2), (4, 2)])
def test_reference_over_ranks_equals_the_layer(run_ranks, num_ranks: int, tp_size: int) -> None:
    run_ranks(_compare_with_one_rank, num_ranks, CASE, tp_size)


def test_placement_reduces_the_largest_load(run_ranks: RunRanks) -> None:
    """Of 4 x 32 tokens with 2 experts each, about half go to expert 0: replicas share them."""
    most: list[float] = []
    for spare in (None, 0, 1):
        case = dataclasses.replace(CASE, skew="zipf:1.2", spare=spare)
        loads, *others = run_ranks(_compare_with_one_rank, 4, case)
        assert all(other == loads for other in others)
        assert sum(loads) == 4 * 32 * 2
        most.append(max(loads) / 64)
    assert most[0] > most[1] > 1.7
    assert most[2] < 1.2


def test_a_placement_allows_uneven_experts() -> None:
    odd = dataclasses.replace(CASE.model, moe=dataclasses.replace(CASE.model.moe, num_experts=6))
    case = dataclasses.replace(CASE, model=odd)
    assert check_experts(dataclasses.replace(case, spare=0), ep_size=4) == 2


def test_hidden_is_the_saved_share_of_the_wire_time() -> None:
    def row(strategy: str, direction: str, median_us: float | None, wire_us: float) -> Row:
        keys: Row = {"strategy": strategy, "direction": direction}
        return keys | {"median_us": median_us, "wire_us": wire_us}

    rows = [
        row("unfused", "forward", 100.0, 40.0),
        row("fused", "forward", 70.0, 40.0),
        row("unfused", "forward_backward", 300.0, 80.0),
        row("fused", "forward_backward", 200.0, 80.0),
    ]
    assert [_hidden(each, rows, GPU) for each in rows] == [None, 0.75, None, 1.0]
    for wrong in (rows[1:], [row("unfused", "forward", None, 40.0), *rows[1:]]):
        assert _hidden(rows[1], wrong, GPU) is None  # no unfused time
    alone = [row("unfused", "forward", 9.0, 0.0), row("fused", "forward", 9.0, 0.0)]
    assert _hidden(alone[1], alone, GPU) is None  # one rank


def test_lines_have_all_keys_and_are_written_to_their_file(tmp_path: Path) -> None:
    cases = [CASE, dataclasses.replace(CASE, skew="zipf:1.0", spare=0)]
    rows = measure_layers(cases, ["sequential"], groups=ParallelGroups(), **ONE_SAMPLE)
    loads = [(row["skew"], row["spare"]) for row in rows]
    assert loads == [("balanced", None)] * 2 + [("zipf:1.0", 0)] * 2
    assert [row["load_max_over_mean"] for row in rows] == [1.0] * 4  # one rank
    required = {"median_us", "floor_us", "gpu", "num_gpus", "torch", "commit", "date", "dtype"}
    assert all(required <= set(row) for row in rows)
    assert rows[0]["commit"] == "abc"
    path = write_rows(rows, tmp_path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    row: Row = {"gpu": "NVIDIA H200", "num_gpus": 4, "case": "layer"}
    assert results_path(tmp_path, row) == tmp_path / "h200x4" / "layer.jsonl"


def _measure_memory(rank: int, num_ranks: int) -> list[Row]:
    groups = build_groups(0, device_type="cpu")
    model = dataclasses.replace(TINY, hidden_size=32, moe=dataclasses.replace(MOE, num_experts=4))
    case = LayerCase(model=model, num_tokens=16, dtype=torch.float32)
    rows = measure_layers([case], ["sequential", "fused"], groups=groups, **ONE_SAMPLE)
    destroy(groups)
    return rows


def test_symmetric_memory_of_each_strategy_by_hand(run_ranks: RunRanks) -> None:
    """Send and combine buffers: 2 x 16 rows of 32 floats each; weights 2 x 16 x 2; 560 words."""
    symm_mib = round((4 * 16 * 32 * 4 + 2 * 16 * 2 * 4 + 560 * 4) / 2**20, 3)
    for rows in run_ranks(_measure_memory, 2):
        assert [row["symm_mib"] for row in rows] == [None, symm_mib] * 2
        assert all(to_float(row["max_rel_err"]) < 1e-6 for row in rows)
        assert all(row["hidden"] is None for row in rows)  # without a GPU
        tells = {row["strategy"] for row in rows if row["exposed_comm_us"] is not None}
        assert tells == {"sequential"}


def test_error_is_the_share_of_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = torch.tensor([[3.0, 4.0], [0.0, 12.0]])  # norm 13
    value = reference + torch.tensor([[0.0, 3.0], [-4.0, 0.0]])  # difference 5
    assert relative_error(reference, reference) == 0.0
    assert relative_error(torch.tensor([0.0, 1e-30]), torch.zeros(2)) == math.inf
    for size in (3, 2**26):  # the norm is summed slice by slice
        monkeypatch.setattr(layer_case, "_SLICE_SIZE", size)
        assert relative_error(value, reference) == pytest.approx(5 / 13, rel=1e-15)


@pytest.mark.parametrize(
    ("value", "reference", "error"),
    [
        # Values that are not finite never pass.
        *(([1.0, bad], [1.0, other], math.inf) for bad in BAD for other in (2.0, bad)),
        *(([1.0, 2.0], [1.0, bad], math.inf) for bad in BAD),
        ([300.0, 0.0], [0.0, 400.0], 1.25),  # in float16 the squares would overflow
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([], [], 0.0),
        ([0.0, 1.0], [0.0, 0.0], math.inf),
    ],
)
@pytest.mark.parametrize("dtype", RELATIVE_TOLERANCE)
def test_error_by_hand(
    value: list[float], reference: list[float], error: float, dtype: torch.dtype
) -> None:
    assert relative_error(torch.tensor(value, dtype=dtype), torch.tensor(reference)) == error


def test_tolerance_is_a_few_roundings_of_each_dtype() -> None:
    assert set(RELATIVE_TOLERANCE) == {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    for dtype, allowed in RELATIVE_TOLERANCE.items():
        # Rounding alone must pass, one wrong row of a thousand must not.
        x = torch.randn(1000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        assert relative_error(x.to(dtype), x) < allowed
        wrong = x.to(dtype).clone()
        wrong[17] = 0.0
        assert relative_error(wrong, x) > allowed
