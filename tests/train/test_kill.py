"""After a rank is killed in mid-step, the others name it, and a new start gives the same losses."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from halley.core.config import RunConfig
from tests.hostile.rank_processes import is_running
from tests.rank_pool import RunRanks
from tests.train.run_case import (
    checkpoint_of,
    command_line,
    read_metrics,
    read_settings,
    train_on_ranks,
)


NUM_STEPS = 25
START_LIMIT_S = 90.0
END_LIMIT_S = 60.0


@contextlib.contextmanager
def _started(config: RunConfig) -> Iterator[subprocess.Popen[str]]:
    """Yield the process of ``halley train`` with two ranks; kill it after the block if it runs."""
    command = [sys.executable, "-m", "halley.cli", *command_line(config), "--nproc=2"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def _wait_for_step(output: Path, step: int) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    path = output / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < step:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def _find_ranks(launcher: int, output: Path) -> tuple[int, int]:
    """Return the process ids of rank 0 and rank 1 that a launcher started."""
    first: int = json.loads((output / "run.lock").read_text())["pid"]
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    (second,) = {int(pid) for pid in children} - {first}
    return first, second


def _assert_same_run(config: RunConfig, whole: RunConfig) -> None:
    """Compare all losses and the last checkpoint bit for bit."""
    curves, states = [], []
    for run in (config, whole):
        names = ("step", "loss", "router_loss", "grad_norm")
        curves.append([[row[name] for name in names] for row in read_metrics(run)])
        path = Path(run.output, "last.pt")
        dcp_to_torch_save(checkpoint_of(run, NUM_STEPS), path)
        states.append(torch.load(path, weights_only=True))
    curve, want = curves
    assert [step for step, *_ in curve] == list(range(1, NUM_STEPS + 1))
    assert curve == want
    assert curve[-1][1] < curve[0][1] - 0.5
    assert set(states[1]) == {"parameters", "exp_avg", "exp_avg_sq"}
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_rank_zero_killed_under_the_launcher(run_ranks: RunRanks, tmp_path: Path):
    num_steps = f"train.num_steps={NUM_STEPS}"
    config = read_settings(tmp_path, num_steps, name="killed")
    only_last = f"checkpoint.every_steps={NUM_STEPS}"
    whole = read_settings(tmp_path, num_steps, only_last, name="whole")
    output = Path(config.output)
    with _started(config) as launcher:
        _wait_for_step(output, 5)
        first, second = _find_ranks(launcher.pid, output)
        os.kill(first, signal.SIGKILL)
        _, errors = launcher.communicate(timeout=END_LIMIT_S)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert not is_running(second)
    assert "\nhalley: failed on rank 1: rank 1 lost rank 0" in errors
    assert "\nhalley: rank 0 was killed by SIGKILL\n" in errors
    folders = output.glob("checkpoints/step-????????")
    step = max(int(path.name.removeprefix("step-")) for path in folders)
    assert 3 <= step < NUM_STEPS

    assert run_ranks(train_on_ranks, 2, config) == [list(range(step + 1, NUM_STEPS + 1))] * 2
    run_ranks(train_on_ranks, 2, whole)
    _assert_same_run(config, whole)
