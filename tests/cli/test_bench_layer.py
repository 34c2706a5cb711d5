"""``halley bench layer``: its cases, its result lines before an interrupt, its progress lines."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from halley.cli import bench
from halley.cli.bench import layer_cases, saved_rows
from halley.cli.main import main
from halley.cli.ranks import line_progress
from halley.core.models import find_model
from halley.distributed.mesh import World
from halley.tools.layer_case import LayerCase
from halley.tools.timer import Row
from tests.cli.pool_command import run_command
from tests.rank_pool import RunRanks


MACHINE: Row = {"gpu": "cpu x", "num_gpus": 1, "case": "layer"}
ROWS: list[Row] = [MACHINE | {"median_us": us} for us in (1.0, 2.0)]
FIRST = World(rank=0, num_ranks=1, device=torch.device("cpu"))


def test_each_tensor_parallel_size_gets_result_lines(run_ranks: RunRanks, tmp_path: Path) -> None:
    command = (
        "bench layer --nproc 2 --models tiny --tokens 8 --strategies sequential --samples 1 "
        f"--skew cv:0.2 --tp-size 1,2 --output {tmp_path} --device cpu --commit abc"
    )
    out, other = run_ranks(run_command, 2, main, "halley.cli.bench", command)
    assert other == ""
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    settings = [(row["tp_size"], row["skew"]) for row in rows[::2]]  # of forward
    assert settings == [(1, "cv:0.2"), (2, "cv:0.2")]
    assert all((row["case"], row["commit"]) == ("layer-skew-tp", "abc") for row in rows)
    (path,) = tmp_path.glob("*/*")  # no chart for such a case
    assert path.name == "layer-skew-tp.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    assert "cv:0.2 /2" in out


def test_every_combination_of_lists_is_a_case() -> None:
    cases = layer_cases("tiny,olmoe", "8,16", skew="balanced,cv:0.2", dtype="default", device="cpu")
    assert {case.dtype for case in cases} == {torch.float32}
    assert [(case.model.name, case.num_tokens, case.skew) for case in cases] == [
        (name, num_tokens, skew)
        for name in ("tiny", "olmoe")
        for num_tokens in (8, 16)
        for skew in ("balanced", "cv:0.2")
    ]


def test_name_of_the_result_file_lists_the_options_that_differ() -> None:
    assert bench._case_name([], ["fused", "auto"], [1], 0.0) == "layer"
    assert bench._case_name([], ["fused"], [2], 1.5) == "layer-tp-graph"
    assert bench._case_name([], ["hierarchical:2"], [1], 0.0) == "layer-nodes"
    placed = LayerCase(model=find_model("tiny"), num_tokens=8, spare=1)
    assert bench._case_name([placed], [], [1], 0.0) == "layer-placed"


def test_new_text_is_printed_at_once_and_a_repeated_one_every_ten_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter([0.0, 1.0, 2.0, 3.0, 11.9, 13.0, 13.0, 14.0])
    update = line_progress(now_s=lambda: next(times))
    for text, done in (("a", 0), ("b", 1), ("a", 2), ("b", 3), ("b", 4), ("a", 5)):
        update(text, done, 6)
    assert capsys.readouterr().err.splitlines() == [
        "halley: a (0 of 6)",
        "halley: b (1 of 6)",
        "halley: b (4 of 6)",
    ]


def test_rows_are_in_the_file_before_the_next_case_runs(tmp_path: Path) -> None:
    path = tmp_path / "cpu-xx1" / "layer.jsonl"
    with suppress(KeyboardInterrupt), saved_rows(FIRST, tmp_path) as keep:
        keep(ROWS[:1])
        assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS[:1]
        keep(ROWS)
        raise KeyboardInterrupt
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS
    os.umask(mask := os.umask(0))
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask  # as for any new file
    assert [each.name for each in path.parent.iterdir()] == ["layer.jsonl"]


def test_rows_without_a_file_are_printed_after_an_interrupt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with suppress(KeyboardInterrupt), saved_rows(FIRST, None) as keep:
        keep(ROWS)
        raise KeyboardInterrupt
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == ROWS
    with saved_rows(FIRST, None) as keep:
        keep(ROWS)  # without an interrupt, the command prints them
    assert capsys.readouterr().out == ""
