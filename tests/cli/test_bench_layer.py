"""``halley bench layer``: on two ranks from the command line."""

import json
from pathlib import Path

import pytest

from halley.cli import bench
from halley.cli.main import main
from halley.core.models import find_model
from halley.tools.layer_case import LayerCase


def test_words_with_commas_are_measured_one_by_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = (
        "bench layer --nproc 2 --models tiny --tokens 8 --strategies sequential --samples 1 "
        f"--skew balanced,cv:0.2 --tp-size 1,2 --output {tmp_path}"
    )
    argv = [*command.split(), "--device", "cpu", "--commit", "abc"]
    code = main(argv)
    out, err = capfd.readouterr()
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    settings = [(row["tp_size"], row["skew"]) for row in rows[::2]]  # of forward
    assert settings == [(n, skew) for n in (1, 2) for skew in ("balanced", "cv:0.2")]
    assert all((row["case"], row["commit"]) == ("layer-skew-tp", "abc") for row in rows)
    (path,) = tmp_path.glob("*/*")  # with no chart
    assert path.name == "layer-skew-tp.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    assert "cv:0.2 /2" in out


def test_lines_are_named_by_what_is_not_plain() -> None:
    assert bench._case_name([], [1], 0.0) == "layer"
    assert bench._case_name([], [2], 1.5) == "layer-tp-graph"
    placed = LayerCase(model=find_model("tiny"), num_tokens=8, spare=1)
    assert bench._case_name([placed], [1], 0.0) == "layer-placed"
