"""The benchmark of the timeline inside kernels: its verdicts by hand, and one layer on a CPU."""

import pytest
import torch

from benchmarks.kernel_timeline import judge, measure, summarise_kernel
from halley.core.models import find_model
from halley.distributed.mesh import ParallelGroups
from halley.tools.layer_case import LayerCase
from halley.tools.timer import Row


def _row(*, share: float, outside: float, num_programs: int = 4) -> Row:
    shares = {"wait": share, "launch and exit": outside}
    names = {"kernel": "fetch_kernel", "direction": "forward", "num_programs": num_programs}
    return {**names, "median_us": 100.0, "shares": shares}


def test_sums_are_over_all_launches_of_a_kernel() -> None:
    recorded = [_row(share=0.9, outside=0.1), _row(share=1.01, outside=0.04)]
    row = summarise_kernel(recorded[0], [*recorded, _row(share=5, outside=0, num_programs=8)])
    assert (row["sum_min"], row["sum_max"], row["launch_and_exit_us"]) == (1.0, 1.05, 7.0)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, ("pass", "pass", "pass")),
        ({"sum_max": 1.021}, ("fail", "pass", "pass")),
        ({"sum_min": 0.979}, ("fail", "pass", "pass")),
        ({"cost": 0.021}, ("pass", "fail", "pass")),
        ({"bit_equal": False}, ("pass", "pass", "fail")),
    ],
)
def test_verdict_is_of_the_worst_row(change: Row, verdict: tuple[str, ...]) -> None:
    good: Row = {"sum_min": 0.99, "sum_max": 1.0, "cost": 0.001, "bit_equal": True}
    good["launch_and_exit_us"] = 3.0
    found = judge([good | change, good])["verdict"]
    assert isinstance(found, dict)
    assert tuple(found.values()) == verdict


def test_layer_on_one_rank_has_all_kernels_and_equal_bits() -> None:
    case = LayerCase(model=find_model("E=2,K=1,D=16,F=16"), num_tokens=4, dtype=torch.float32)
    rows = measure(
        case, groups=ParallelGroups(), device=torch.device("cpu"), num_samples=1, num_recordings=2
    )
    assert len({(row["kernel"], row["direction"]) for row in rows}) == len(rows) == 10
    assert all(row["bit_equal"] and row["launches"] == 2 for row in rows)
    assert all(row["sum_min"] == row["sum_max"] == 1.0 for row in rows)  # not rounded means
