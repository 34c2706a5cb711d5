"""``halley bench layer`` on two ranks, and the cases that its options name."""

import json
from pathlib import Path

import torch

from halley.cli import bench
from halley.cli.bench import layer_cases
from halley.cli.main import main
from halley.core.models import find_model
from halley.tools.layer_case import LayerCase
from tests.cli.pool_command import run_command
from tests.rank_pool import RunRanks


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
    cases = layer_cases(
        "tiny,olmoe", "8,16", skew="balanced,cv:0.2", dtype=torch.float32, on_gpu=False
    )
    assert [(case.model.name, case.num_tokens, case.skew) for case in cases] == [
        (name, num_tokens, skew)
        for name in ("tiny", "olmoe")
        for num_tokens in (8, 16)
        for skew in ("balanced", "cv:0.2")
    ]


def test_name_of_the_result_file_lists_the_options_that_differ() -> None:
    assert bench._case_name([], [1], 0.0) == "layer"
    assert bench._case_name([], [2], 1.5) == "layer-tp-graph"
    placed = LayerCase(model=find_model("tiny"), num_tokens=8, spare=1)
    assert bench._case_name([placed], [1], 0.0) == "layer-placed"
