"""``halley bench model``: on two ranks from the command line, and refused before they start."""

import json
import sys
from pathlib import Path

import pytest

from halley.cli import ranks
from halley.cli.main import main


WRONG = {
    "unknown model": ("--models tinny", "model (tinny) must be one of tiny"),
    "no layers": ("--layers 0", "layers (0) must be positive integers"),
    "only dense layers": (
        "--models deepseek-v3 --layers 3",
        "layers (3) must be above 3, the dense layers that model deepseek-v3 begins with",
    ),
    "no tokens": ("--tokens 1,x", "tokens (1,x) must be positive integers"),
    "sequences of another length": (
        "--tokens 100 --seq-len 64",
        "seq_len (64) must divide tokens (100)",
    ),
    "default sequences": ("--tokens 6000", "seq_len (4096) must divide tokens (6000)"),
    "negative sequences": ("--seq-len -1", "seq_len (-1) must be at least 1, or 0 for all"),
    "unknown strategy": ("--strategies magic", "strategy (magic) must be one of sequential"),
    "no strategy": ("--strategies ,", "strategies (,) must name at least one"),
    "no samples": ("--samples 0", "samples (0) must be at least 1"),
    "negative seed": ("--seed -1", "seed (-1) must be at least 0"),
    "dtype without training": (
        "--dtype float16",
        "dtype (torch.float16) must be float32 or bfloat16 in training",
    ),
    "experts over ranks": ("--nproc 3", "num_experts (8) must be divisible by ep_size (3)"),
    "more than a rank's memory": (
        "--models mixtral-8x7b --layers 2000 --nproc 2",
        "layers (2000) of model mixtral-8x7b must fit the memory of a rank",
    ),
    "output below a file": (
        "--output {folder}/file/results",
        "({folder}/file/results) must be writable: Not a directory",
    ),
}


def test_lines_of_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = (
        f"bench model --nproc 2 --layers 1 --tokens 32 --seq-len 16 --samples 1 --output {tmp_path}"
    )
    argv = [*command.split(), "--device", "cpu", "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", ["halley", *argv])  # what the ranks are started with
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


@pytest.mark.parametrize("name", WRONG)
def test_one_line_names_value_and_rule(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "launch", lambda argv, num_processes: pytest.fail("ranks start"))
    (tmp_path / "file").write_text("abc")
    options, wanted = (text.replace("{folder}", str(tmp_path)) for text in WRONG[name])
    assert main(["bench", "model", "--device", "cpu", *options.split()]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("halley: error: ")
    assert wanted in line
    assert out == ""
