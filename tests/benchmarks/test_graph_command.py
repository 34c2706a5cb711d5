"""The command ``python -m benchmarks.graph_bench`` on two ranks."""

import json
from pathlib import Path

import pytest

from benchmarks.graph_bench import __main__ as command_line
from benchmarks.graph_bench.__main__ import main


def test_lines_of_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    command = "--nproc 2 --inner eager --variants wgrad --samples 1 --gate dropless"
    command += f" --memory-margin 4 --output {tmp_path} --device cpu --commit abc"
    argv = command.split()
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
    assert "Forward and backward on 2 x cpu" in out
    (path,) = tmp_path.glob("*/graph.jsonl")
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_slow_links_are_told_to_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": "3", "NCCL_SOCKET_IFNAME": "eth0"}
    monkeypatch.setattr(command_line.os, "environ", environment)
    command_line._slow_down("none")
    assert environment == {"RANK": "3", "NCCL_SOCKET_IFNAME": "eth0"}
    command_line._slow_down("sockets")
    assert environment["NCCL_SOCKET_IFNAME"] == "eth0"  # what the user chose stays
    assert environment["NCCL_HOSTID"] == "halley-3"
    command_line._slow_down("channels")
    assert environment["NCCL_MAX_NCHANNELS"] == "1"
