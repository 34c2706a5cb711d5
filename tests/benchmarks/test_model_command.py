"""The command ``python -m benchmarks.model_bench`` on two ranks."""

import json
from pathlib import Path

import pytest

from benchmarks.model_bench.__main__ import main


def test_lines_of_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = f"--nproc 2 --layers 1 --tokens 32 --seq-len 16 --samples 1 --output {tmp_path}"
    argv = [*command.split(), "--device", "cpu", "--commit", "abc"]
    code = main(argv)
    out, err = capfd.readouterr()
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()[-2:]]
    for row, strategy in zip(rows, ("sequential", "chunked"), strict=True):
        assert (row["case"], row["model"], row["strategy"]) == ("model", "tiny", strategy)
        assert (row["num_layers"], row["num_tokens"], row["batch_size"]) == (1, 32, 2)
        assert (row["ep_size"], row["num_gpus"], row["dtype"]) == (2, 2, "float32")
        assert (row["samples"], row["commit"]) == (1, "abc")
        assert row["max_rel_err"] <= 1e-6
        assert row["tokens_per_s"] == pytest.approx(2 * 32 / (row["median_us"] * 1e-6), rel=1e-3)
        assert row["floor_us"] >= max(row["gemm_us"], row["wire_us"]) - 0.2
    assert "Training step on 2 x cpu" in out
    (path,) = tmp_path.glob("*/model.jsonl")
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
