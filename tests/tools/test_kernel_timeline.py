"""Shares of kernel times by hand, and ``halley bench kernels`` on two ranks."""

import json
from pathlib import Path

import pytest

from halley.cli.main import main
from halley.fused.kernels.marks import Launch
from halley.tools.kernel_timeline import SHARES, match_profile, mean_rows, share_row, to_spans
from halley.tools.report import read_results, read_trace
from tests.cli.pool_command import run_command
from tests.core.test_timeline import span
from tests.rank_pool import RunRanks


# The first CTA runs from 0 to 9 us, the second one from 1 to 10 us.
FIRST = (("other", 0, 1000), ("wait", 1000, 4000), ("multiply", 4000, 9000))
SECOND = (("other", 1000, 2000), ("multiply", 2000, 10_000))
LAUNCH = Launch(
    kernel="arrived_gemm_kernel", backward=False, num_programs=2, phases=(FIRST, SECOND)
)


def _launch(kernel: str, start_ns: int) -> Launch:
    phases = ((("other", start_ns, start_ns + 10),),)
    return Launch(kernel=kernel, backward=True, num_programs=1, phases=phases)


@pytest.mark.parametrize(
    ("profiled_us", "kernel_us", "outside_us"), [(None, 10, 0), (12.5, 12.5, 2.5), (8, 8, 0)]
)
def test_shares_of_two_ctas(profiled_us: float | None, kernel_us: float, outside_us: float) -> None:
    row = share_row(LAUNCH, profiled_us)
    times_us = {"other": 1, "wait": 1.5, "multiply": 6.5, "idle": 1, "launch and exit": outside_us}
    shares = dict.fromkeys(SHARES, 0.0) | {n: us / kernel_us for n, us in times_us.items()}
    assert row["shares"] == pytest.approx(shares)
    assert (row["median_us"], row["recorded_us"]) == (kernel_us, 10.0)


def test_rows_are_means_of_kernel_and_direction() -> None:
    rows = [share_row(LAUNCH, us) for us in (10.0, 12.5)] + [share_row(_launch("a", 0), None)]
    mean, other = mean_rows(rows)
    assert (mean["median_us"], mean["shares"]["launch and exit"]) == (11.25, 0.1)  # pyright: ignore
    assert (other["kernel"], other["direction"]) == ("a", "backward")


def test_profiled_times_belong_to_launches_in_order() -> None:
    kernels = ("fetch_kernel", "combine_kernel", "fetch_kernel")
    launches = [_launch(kernel, 100 * index) for index, kernel in enumerate(kernels)]
    profiled = [span("fetch_kernel", 50, 57), span("fetch_kernel", 10, 13), span("fill", 0, 5)]
    with pytest.raises(RuntimeError, match="combine_kernel: 1 recorded, 0 profiled launches"):
        match_profile(launches, profiled)
    assert match_profile(launches, [*profiled, span("combine_kernel", 20, 29)]) == [3, 9, 7]


def test_timeline_begins_at_the_first_record() -> None:
    spans = to_spans([_launch("fetch_kernel", 5000), LAUNCH], rank=3)
    assert {each.rank for each in spans} == {3}
    assert [(s.stream, s.name, s.start_us, s.duration_us) for s in spans[:3]] == [
        ("fetch_kernel 0000", "other", 5.0, 0.01),
        ("arrived_gemm_kernel 0000", "other", 0.0, 1.0),
        ("arrived_gemm_kernel 0000", "wait", 1.0, 3.0),
    ]


def test_command_writes_shares_and_a_trace(run_ranks: RunRanks, tmp_path: Path) -> None:
    command = (
        "bench kernels --nproc 2 --models E=2,K=1,D=32,F=32 --tokens 8 --device cpu --commit abc "
        f"--output {tmp_path}"
    )
    out, other = run_ranks(run_command, 2, main, "halley.cli.bench", command)
    assert other == ""
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [(row["kernel"], row["direction"]) for row in rows[:2]] == [
        ("plan_kernel", "forward"), ("fetch_kernel", "forward"),
    ]  # fmt: skip
    assert len(rows) == 10
    assert all(abs(sum(row["shares"].values()) - 1) < 1e-4 for row in rows)
    (results,) = tmp_path.glob("*/kernels.jsonl")
    assert read_results(results) == rows
    (trace,) = tmp_path.glob("*/kernels-*-8.json.gz")
    spans = read_trace(trace)
    assert {each.rank for each in spans} == {0, 1}
    assert {"fetch", "wait", "multiply", "combine send", "combine add"} < {s.name for s in spans}
    assert {each.stream for each in spans} >= {f"combine_kernel {i:04}" for i in range(8)}
