"""``halley bench graph``: on two ranks from the command line, and refused before they start."""

import json
import sys
from pathlib import Path

import pytest

from halley.cli import bench_graph, ranks
from halley.cli.main import main


WRONG = {
    "unknown model": ("--models gpt2", "model (gpt2) must be one of gpt2-s-moe, gpt2-l-moe"),
    "no model": ("--models ,", "models (,) must name at least one"),
    "unknown variant": ("--variants none,magic", "variants (magic) must be of none, sequential"),
    "unknown compiler": ("--inner magic", "inner (magic) must be one of inductor, eager"),
    "unknown gate": ("--gate magic", "gate (magic) must be one of switch, top2"),
    "negative batch": ("--batch -1", "batch (-1) must be at least 1, or 0 for the model's"),
    "parts of no batch": ("--num-parts 4", "num_parts (4) must divide batch (6)"),
    "negative margin": ("--memory-margin -1", "memory_margin (-1.0) must not be negative"),
    "unknown link": ("--slow-link pigeons", "slow_link (pigeons) must be one of none, channels"),
    "NCCL's link": ("--slow-link sockets", "slow_link (sockets) must be none without a GPU"),
    "unknown dtype": ("--dtype float12", "dtype (float12) must be one of"),
    "no samples": ("--samples 0", "samples (0) must be at least 1"),
    "negative seed": ("--seed -1", "seed (-1) must be at least 0"),
    "one rank": ("--nproc 1", "nproc (1) must be at least 2: one rank has no all-to-alls"),
    "output below a file": (
        "--output {folder}/file/results",
        "({folder}/file/results) must be writable: Not a directory",
    ),
}


def test_lines_of_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    command = "bench graph --nproc 2 --inner eager --variants wgrad --samples 1 --gate dropless"
    command += f" --memory-margin 4 --output {tmp_path} --device cpu --commit abc"
    argv = command.split()
    monkeypatch.setattr(sys, "argv", ["halley", *argv])  # what the ranks are started with
    code = main(argv)
    out, err = capfd.readouterr()
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()[-2:]]
    for row, variant in zip(rows, ("none", "wgrad"), strict=True):
        assert (row["case"], row["model"], row["variant"]) == ("graph", "gpt2-tiny-moe", variant)
        assert (row["gate"], row["inner"], row["passes"]) == ("dropless", "eager", variant)
        assert (row["num_tokens"], row["ep_size"], row["num_experts"]) == (48, 2, 4)
        assert (row["samples"], row["commit"], row["error"]) == (1, "abc", None)
        assert row["bit_equal"]
        assert row["median_us"] > 0.0
        assert row["link_gb_per_s"] > 0.0
    assert "Forward and backward on 2 x cpu" in err
    (path,) = tmp_path.glob("*/graph.jsonl")
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", WRONG)
def test_one_line_names_value_and_rule(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "launch", lambda argv, num_processes: pytest.fail("ranks start"))
    (tmp_path / "file").write_text("abc")
    options, wanted = (text.replace("{folder}", str(tmp_path)) for text in WRONG[name])
    assert main(["bench", "graph", "--device", "cpu", *options.split()]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("halley: error: ")
    assert wanted in line
    assert out == ""


def test_slow_links_are_told_to_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": "3", "NCCL_SOCKET_IFNAME": "eth0"}
    monkeypatch.setattr(bench_graph.os, "environ", environment)
    bench_graph._slow_down("none")
    assert environment == {"RANK": "3", "NCCL_SOCKET_IFNAME": "eth0"}
    bench_graph._slow_down("sockets")
    assert environment["NCCL_SOCKET_IFNAME"] == "eth0"  # what the user chose stays
    assert environment["NCCL_HOSTID"] == "halley-3"
    bench_graph._slow_down("channels")
    assert environment["NCCL_MAX_NCHANNELS"] == "1"
