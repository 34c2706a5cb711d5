"""``halley trace`` on two ranks from the command line: the time of each part of a step."""

import json
from pathlib import Path

import pytest

from halley.cli.main import main
from tests.cli.pool_command import run_command
from tests.rank_pool import RunRanks


SMALL = (
    "train.batch_size=1 data.seq_len=16 device=cpu model.hidden_size=16 model.num_layers=1 "
    "model.num_heads=2 model.num_kv_heads=1 model.head_dim=8 model.moe.intermediate_size=8"
)


def test_exposed_communication_is_unknown_where_waits_are_not_recorded(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    command = f"trace --nproc 2 --steps 1 --output {tmp_path} --strategies sequential,functional"
    sets = " ".join(f"--set={setting}" for setting in SMALL.split())
    out, _ = run_ranks(run_command, 2, main, "halley.cli.trace", f"{command} {sets}")
    parts_us = json.loads(out.splitlines()[-1])
    sequential, functional = parts_us["sequential"], parts_us["functional"]
    waits = sum(us for name, us in sequential.items() if name.endswith(".wait"))
    assert sequential["exposed communication"] == pytest.approx(waits, rel=1e-3)
    assert functional["exposed communication"] is None
    assert functional["gradients.wait"] > 0.0  # one of several waits, so not the sum
    (line,) = [line for line in out.splitlines() if "exposed communication " in line]
    shown = [cell.strip() for cell in line.strip("│").split("│")]
    assert shown[2] == ""
    assert float(shown[1]) == pytest.approx(waits / 1e3, abs=0.01)
