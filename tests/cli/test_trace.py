"""``halley trace``: what is told of each part, on two ranks from the command line."""

import json
from pathlib import Path

import pytest

from halley.cli.main import main


SMALL = (
    "train.batch_size=1 data.seq_len=16 device=cpu model.hidden_size=16 model.num_layers=1 "
    "model.num_heads=2 model.num_kv_heads=1 model.head_dim=8 model.moe.intermediate_size=8"
)


def test_waits_that_are_not_seen_are_not_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    command = f"trace --nproc 2 --steps 1 --output {tmp_path} --strategies sequential,functional"
    sets = [f"--set={setting}" for setting in SMALL.split()]
    code = main([*command.split(), *sets])
    out, err = capfd.readouterr()
    assert code == 0, err
    parts_us = json.loads(out.splitlines()[-1])
    sequential, functional = parts_us["sequential"], parts_us["functional"]
    waits = sum(us for name, us in sequential.items() if name.endswith(".wait"))
    assert sequential["exposed communication"] == pytest.approx(waits, rel=1e-3)
    assert functional["exposed communication"] is None
    assert functional["gradients.wait"] > 0.0  # a part of it
    (line,) = [line for line in out.splitlines() if "exposed communication " in line]
    shown = [cell.strip() for cell in line.strip("│").split("│")]
    assert shown[2] == ""
    assert float(shown[1]) == pytest.approx(waits / 1e3, abs=0.01)
