"""A rank killed in mid-step: the others end and name it, and the run goes on as if it had not."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from halley.cli.train import read_config
from halley.core.config import RunConfig
from tests.rank_pool import RunRanks
from tests.train.run_case import SETTINGS, command_line, train_on_ranks, write_text


NUM_STEPS = 40
START_LIMIT_S = 90.0
END_LIMIT_S = 60.0

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return the function that starts ``halley`` in a process; kill what is left at the end."""
    processes: list[subprocess.Popen[str]] = []

    def start(argv: list[str], **environment: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "halley.cli", *argv],
            env={**os.environ, **{name: str(value) for name, value in environment.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def _wait_for_step(output: Path, step: int) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    path = output / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < step:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def _find_ranks(launcher: int) -> dict[int, int]:
    """Return the process of each rank that a launcher started."""
    pids: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            parent = folder.joinpath("stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == launcher:
                variables = folder.joinpath("environ").read_bytes().decode().split("\0")
                rank = next(v for v in variables if v.startswith("RANK="))
                pids[int(rank.removeprefix("RANK="))] = int(folder.name)
    return pids


def _is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def _curve(config: RunConfig) -> list[tuple[int, float, float, float]]:
    lines = Path(config.output, "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["step"], row["loss"], row["router_loss"], row["grad_norm"]) for row in rows]


def _last_checkpoint(config: RunConfig) -> dict[str, dict[str, torch.Tensor]]:
    output = Path(config.output)
    dcp_to_torch_save(output / "checkpoints" / f"step-{NUM_STEPS:08d}", output / "last.pt")
    return torch.load(output / "last.pt", weights_only=True)


def _newest_step(output: Path) -> int:
    folders = output.glob("checkpoints/step-????????")
    return max(int(path.name.removeprefix("step-")) for path in folders)


def _assert_same_run(config: RunConfig, whole: RunConfig) -> None:
    """Compare all losses and the last checkpoint bit for bit."""
    curve = _curve(config)
    assert [step for step, *_ in curve] == list(range(1, NUM_STEPS + 1))
    assert curve == _curve(whole)
    assert curve[-1][1] < curve[0][1] - 0.5
    got, want = _last_checkpoint(config), _last_checkpoint(whole)
    assert set(want) == {"parameters", "exp_avg", "exp_avg_sq"}
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def _make_configs(folder: Path) -> tuple[RunConfig, RunConfig]:
    """Return a run to be killed and the same run elsewhere, not to be."""
    text, settings = str(write_text(folder)), [*SETTINGS, f"train.num_steps={NUM_STEPS}"]
    killed, whole = (
        read_config(None, settings, data=text, output=str(folder / name))
        for name in ("killed", "whole")
    )
    return killed, whole


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_rank_zero_killed_under_the_launcher(start: Start, run_ranks: RunRanks, tmp_path: Path):
    config, whole = _make_configs(tmp_path)
    output = Path(config.output)
    launcher = start([*command_line(config), "--nproc=2"])
    _wait_for_step(output, 5)
    ranks = _find_ranks(launcher.pid)
    assert set(ranks) == {0, 1}
    os.kill(ranks[0], signal.SIGKILL)
    _, errors = launcher.communicate(timeout=END_LIMIT_S)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert not _is_running(ranks[1])
    assert "\nhalley: failed on rank 1: rank 1 lost rank 0" in errors
    assert "\nhalley: rank 0 was killed by SIGKILL\n" in errors
    step = _newest_step(output)
    assert 3 <= step < NUM_STEPS

    again = start([*command_line(config), "--nproc=2"])
    run_ranks(train_on_ranks, 2, whole)
    _, errors = again.communicate(timeout=START_LIMIT_S)
    assert again.returncode == 0, errors
    assert f", resumed after step {step}\n" in errors
    _assert_same_run(config, whole)
