"""Progress lines without a terminal, and results that are saved before an interrupt."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from halley.cli.result_rows import line_progress, saved_rows
from halley.distributed.mesh import World
from halley.tools.results import Row


ROWS: list[Row] = [
    {"gpu": "cpu x", "num_gpus": 1, "case": "layer", "median_us": 1.0},
    {"gpu": "cpu x", "num_gpus": 1, "case": "layer", "median_us": 2.0},
]
FIRST = World(rank=0, num_ranks=1, device=torch.device("cpu"))


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
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()  # as for any new file
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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
