"""The graph benchmark on two ranks: result lines, and failures on all ranks or on one rank."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.graph_bench import __main__ as command_line
from benchmarks.graph_bench import measure
from benchmarks.graph_bench.__main__ import main
from benchmarks.graph_bench.case import VARIANTS
from benchmarks.graph_bench.gpt2_moe import find_shape
from benchmarks.graph_bench.measure import _compared, _predict, measure_graph_cases
from benchmarks.graph_bench.variants import _alike_on_all, _describe
from halley.distributed.mesh import build_groups
from halley.tools.results import Row
from tests.cli.pool_command import run_command
from tests.rank_pool import RunRanks


NUM_PARTS = 2
COMMAND = (
    f"--nproc 2 --inner eager --samples 1 --num-parts {NUM_PARTS} --batch {2 * NUM_PARTS} "
    "--memory-margin 4 --device cpu --commit abc --output "
)


def _measure(rank: int, num_ranks: int, folder: Path) -> tuple[list[Row], str]:
    """Return the result lines and the output of the command, which measures all variants."""
    rows: list[Row] = []

    def measure_and_record(*cases: Any, **options: Any) -> list[Row]:
        rows.extend(measure_graph_cases(*cases, **options))
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_TRACES", 1)  # the profiler needs a second for each trace
        patch.setattr(measure, "measure_graph_cases", measure_and_record)
        module = "benchmarks.graph_bench.__main__"
        output = run_command(rank, num_ranks, main, module, f"{COMMAND}{folder}")
    return rows, output


def test_every_variant_gets_a_correct_result_line(run_ranks: RunRanks, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (first, output), (second, _) = run_ranks(_measure, 2, tmp_path, timeout_s=240.0)
    for name in ("variant", "median_us", "exposed_comm_us", "max_rel_err", "bit_equal", "error"):
        assert [row[name] for row in first] == [row[name] for row in second]
    assert "Forward and backward on 2 x cpu" in output
    printed = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    (path,) = tmp_path.glob("*/graph.jsonl")
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert printed == written == json.loads(json.dumps(first))
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for row in first:
        assert (row["case"], row["model"], row["gate"]) == ("graph", "gpt2-tiny-moe", "switch")
        assert (row["num_tokens"], row["ep_size"], row["num_experts"]) == (8 * 2 * NUM_PARTS, 2, 4)
        assert row["commit"] == "abc"
        assert float(str(row["link_gb_per_s"])) > 0.0
    rows: dict[str, Any] = {str(row["variant"]): row for row in first}
    assert tuple(rows) == VARIANTS
    overlap = rows.pop("inductor-overlap")  # Inductor's scheduler may need a GPU
    assert bool(overlap["error"]) != bool(overlap["median_us"])
    baseline = min(("none", "sequential"), key=lambda name: rows[name]["median_us"])
    for name, row in rows.items():
        assert (row["error"], row["samples"], row["peak_mib"]) == (None, 1, None)
        assert row["bit_equal"] == (name not in ("sequential", "chunked"))
        assert row["max_rel_err"] < 1e-6
        assert row["baseline"] == baseline
        ratio = rows[baseline]["median_us"] / row["median_us"]
        assert row["speedup"] == pytest.approx(ratio, abs=1e-4)
        assert row["exposed_comm_us"] > 0.0
    assert rows["chunked"]["setting"] == "n=2"
    passes = {name: rows[name] for name in ("both", "wgrad", "partition")}
    for name, row in passes.items():
        assert row["parts"] == ([] if name == "wgrad" else [NUM_PARTS])
        assert row["optimise_s"] > 0.0
        assert row["plan_s"] > 0.0
        predicted = row["predicted_over_measured"] * row["median_us"]
        assert predicted == pytest.approx(row["predicted_us"], rel=1e-2)
    assert rows["none"]["predicted_us"] > rows["none"]["predicted_exposed_us"] > 0.0
    assert rows["none"]["optimise_s"] is None


def _fail(rank: int, num_ranks: int, failing: tuple[int, ...], alike: bool) -> object:
    groups = build_groups(0, device_type="cpu")

    def make() -> int:
        if rank in failing:
            raise (ValueError if alike or rank == 0 else KeyError)(f"of  rank {rank}")
        return rank

    try:
        return _alike_on_all(make, "both", groups=groups)
    except RuntimeError as error:
        return f"raised: {error}"


def test_only_a_failure_that_all_ranks_share_is_returned_as_text(run_ranks: RunRanks) -> None:
    assert run_ranks(_fail, 2, (), True) == [0, 1]
    assert run_ranks(_fail, 2, (0, 1), True) == [f"ValueError: of rank {r}" for r in (0, 1)]
    told = "raised: both failed on ranks {} alone or not alike: "
    assert run_ranks(_fail, 2, (1,), True) == [
        told.format([1]),
        told.format([1]) + "ValueError: of rank 1",
    ]
    first, second = run_ranks(_fail, 2, (0, 1), False)
    assert first == told.format([0, 1]) + "ValueError: of rank 0"
    assert str(second).startswith(told.format([0, 1]) + "KeyError")


def _raised(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def _without_plan() -> None:
    try:
        find_shape("none")
    except ValueError as error:
        raise RuntimeError("x" * 500) from error


def test_error_text_names_the_line_of_halley() -> None:
    place = f" (benchmarks/graph_bench/gpt2_moe.py:{find_shape.__code__.co_firstlineno + 7})"
    assert _describe(_raised(_without_plan)) == f"RuntimeError: {'x' * 386}{place}"
    compiled = torch.compile(torch.neg, backend=lambda *_: find_shape("none"))
    wrapped = _describe(_raised(lambda: compiled(torch.ones(2))))
    assert "ValueError: model (none) must be one of" in wrapped
    assert wrapped.endswith(place)
    assert _describe(_raised(lambda: int("x  y"))) == (
        "ValueError: invalid literal for int() with base 10: 'x y'"
    )


def _times(before: float, after: float, exposed: float) -> Any:
    return SimpleNamespace(
        time_before=SimpleNamespace(makespan_us=before, exposed_us=10.0),
        time_after=SimpleNamespace(makespan_us=after, exposed_us=exposed),
    )


def test_predictions_of_unchanged_graphs_come_from_other_variants() -> None:
    forward, backward = _times(100.0, 90.0, 4.0), _times(200.0, 170.0, 3.0)
    ready: Any = {
        ("none", ""): SimpleNamespace(reports=()),
        ("both", ""): SimpleNamespace(reports=(forward, backward)),
        ("partition", ""): SimpleNamespace(reports=(forward,)),
    }
    assert _predict(ready) == {
        "none": (300.0, 20.0),
        "both": (260.0, 7.0),
        "partition": (290.0, 14.0),
    }
    del ready["both", ""]
    assert _predict(ready) == {}  # no report has the backward graph


def test_ratios_use_the_faster_baseline() -> None:
    def row(name: str, median: float | None, exposed: float, peak: float) -> Row:
        return {"variant": name, "median_us": median, "exposed_comm_us": exposed, "peak_mib": peak}

    rows = [
        row("none", 120.0, 30.0, 50.0),
        row("sequential", 100.0, 40.0, 60.0),
        row("both", 80.0, 10.0, 51.0),
        row("inductor-overlap", None, 0.0, 0.0),
    ]
    none, sequential, both, failed = _compared(rows)
    assert {each["baseline"] for each in (none, sequential, both, failed)} == {"sequential"}
    assert (both["speedup"], both["exposed_over_baseline"]) == (1.25, 0.25)
    assert both["peak_over_none"] == 1.02
    assert none["speedup"] == pytest.approx(100 / 120, abs=1e-4)
    assert "speedup" not in failed


def test_slow_links_set_variables_of_nccl_that_the_user_has_not_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {"RANK": "3", "NCCL_SOCKET_IFNAME": "eth0"}
    monkeypatch.setattr(command_line.os, "environ", environment)
    command_line._slow_down("none")
    assert environment == {"RANK": "3", "NCCL_SOCKET_IFNAME": "eth0"}
    command_line._slow_down("sockets")
    assert environment["NCCL_SOCKET_IFNAME"] == "eth0"
    assert environment["NCCL_HOSTID"] == "halley-3"
    command_line._slow_down("channels")
    assert environment["NCCL_MAX_NCHANNELS"] == "1"
