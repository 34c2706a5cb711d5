"""The launcher runs small scripts as ranks: environment, exit codes, signals, failures."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from halley.cli.ranks import count_ranks
from halley.distributed import launcher as launch_module
from halley.distributed.launcher import FAILURES_VARIABLE, FailureReader, launch, tell_failure
from tests.hostile.rank_processes import is_running


LIMIT_S = 30.0

Command = Callable[[str], list[str]]
Start = Callable[..., subprocess.Popen[str]]
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

# The first lines of each rank's script. A rank reports its state in a file with its number.
_HEAD = """
import os, signal, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
def say(text):
    draft = folder / f"{rank}.draft"
    draft.write_text(text)
    draft.rename(folder / f"{rank}.txt")
"""
_RECORD_SIGNALS = """
got = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: (got.append(number), say(str(got))))
say("ready %d" % os.getpid())
while True:
    time.sleep(0.05)
    if rank == 0:
        (folder / "ticks").write_text(str(time.monotonic_ns()))
    if got:
        time.sleep(0.3)
        sys.exit(0)
"""
_LAUNCHER = """
import sys
from halley.distributed import launcher
launcher._HINT_AFTER_S = float(sys.argv[1])
sys.exit(launcher.launch(sys.argv[2:], num_processes=2))
"""


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Return the function that writes a rank's script and returns the command to run it."""

    def make(source: str) -> list[str]:
        script = tmp_path / "rank.py"
        script.write_text(_HEAD + source)
        return [sys.executable, str(script), str(tmp_path)]

    return make


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.fixture
def start_launcher(tmp_path: Path) -> Iterator[Start]:
    """Return the function that starts a launcher of two ranks in a process of its own."""
    launchers: list[subprocess.Popen[str]] = []

    def start(command: list[str], *, hint_after_s: float = LIMIT_S) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _LAUNCHER, str(hint_after_s), *command]
        launchers.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        _wait_until(lambda: all((tmp_path / f"{rank}.txt").exists() for rank in range(2)))
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.communicate()


def test_ranks_get_the_environment_of_torch(command: Command, tmp_path: Path, monkeypatch: Patch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    monkeypatch.setattr(launch_module, "_num_cores", lambda: 7)
    script = "import json; say(json.dumps(dict(os.environ)))"
    assert launch(command(script), num_processes=3) == 0
    environments = [json.loads((tmp_path / f"{rank}.txt").read_text()) for rank in range(3)]
    for rank, environment in enumerate(environments):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["OMP_NUM_THREADS"] == "2"  # 7 cores for 3 ranks
        assert environment["TORCH_CPP_LOG_LEVEL"] == "INFO"  # the user's value, not ERROR
    assert len({environment["MASTER_PORT"] for environment in environments}) == 1


def test_no_other_process_gets_the_port_of_rank_0():
    with launch_module.reserve_port() as bound, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(bound.getsockname())
        TCPStore(*bound.getsockname(), is_master=True)  # listens on the port


def test_failures_of_ranks_are_printed_once_per_cause_without_their_exit_codes(command, capfd):
    """Both ranks report the same cause, each with its own number; rank 1 reports another too."""
    script = """
from halley.distributed.launcher import tell_failure
tell_failure("rank %d lost rank 9\\nin step 5" % rank, details="Traceback of rank %d" % rank)
if rank == 1:
    tell_failure("the disk is full")
sys.exit(1)
"""
    assert launch(command(script), num_processes=2) == 1
    err = capfd.readouterr().err
    disk = "halley: failed on rank 1: the disk is full\n"
    assert disk in err
    assert re.fullmatch(
        r"Traceback of rank (\d)\nhalley: failed on rank \1: rank \1 lost rank 9 in step 5\n",
        err.replace(disk, ""),
    )


def test_at_most_four_failures_are_printed_and_mistakes_of_any_rank(tmp_path, capsys, monkeypatch):
    reader = FailureReader(tmp_path / "failures.jsonl")
    monkeypatch.setenv(FAILURES_VARIABLE, str(reader.path))
    monkeypatch.setenv("RANK", "1")
    tell_failure("text (a.txt) must be a readable file", is_mistake=True)
    reader.show_new()
    assert capsys.readouterr().err == "halley: error: text (a.txt) must be a readable file\n"
    for number in range(5):
        tell_failure(f"failure {number}")
    reader.show_new()
    assert reader.ranks == {1}
    assert capsys.readouterr().err.splitlines() == [
        *(f"halley: failed on rank 1: failure {number}" for number in range(3)),
        "halley: more ranks failed for other causes, which are not shown",
    ]


@pytest.mark.parametrize(("local_rank", "is_printed"), [("0", True), ("1", False)])
def test_without_the_launcher_only_local_rank_0_prints_a_mistake(
    local_rank: str, is_printed: bool, capsys: Capture, monkeypatch: Patch
):
    monkeypatch.delenv(FAILURES_VARIABLE, raising=False)
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    tell_failure("no such file", is_mistake=True)
    assert capsys.readouterr().err == ("halley: error: no such file\n" if is_printed else "")


def test_ranks_may_save_after_the_first_signal_and_are_killed_by_the_second(
    command: Command, start_launcher: Start, tmp_path: Path
):
    script = """
got = []
signal.signal(signal.SIGTERM, lambda number, frame: (got.append(number), say(str(got))))
say("ready")
while True:
    time.sleep(0.05)
"""
    launcher = start_launcher(command(script), hint_after_s=0.5)
    launcher.send_signal(signal.SIGTERM)
    _wait_until(lambda: (tmp_path / "0.txt").read_text() == "[15]")
    assert launcher.stderr is not None
    hint = "halley: waiting up to 600 s for 2 ranks to end; another signal kills them at once\n"
    assert launcher.stderr.readline() == hint
    assert launcher.poll() is None
    begin_s = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(LIMIT_S) == 128 + 15
    assert time.monotonic() - begin_s < 3.0
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["[15]"] * 2


def test_ranks_that_ignore_a_signal_are_killed_after_a_time_limit(command, monkeypatch):
    monkeypatch.setattr(launch_module, "_SIGNAL_PATIENCE_S", 0.5)
    monkeypatch.setattr(launch_module, "_KILL_AFTER_S", 0.5)

    def interrupted(numbers: object, handler: Callable[[int, object], None]) -> Any:
        return nullcontext(handler(signal.SIGINT, None))

    monkeypatch.setattr(launch_module, "signals_handled", interrupted)
    script = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
time.sleep(60)
"""
    begin_s = time.monotonic()
    assert launch(command(script), num_processes=1) == 128 + 2
    assert time.monotonic() - begin_s < LIMIT_S


@pytest.mark.parametrize(
    ("codes", "want", "told"),
    [
        ([2, 2, 2], 2, ""),  # a mistake that a rank has reported to the user
        ([0, 7, 75], 7, "halley: rank 1 ended with exit code 7\n"),
        ([75, -signal.SIGKILL, 75], 128 + 9, "halley: rank 1 was killed by SIGKILL\n"),
    ],
)
def test_first_failure_gives_the_exit_code_and_is_named_last(
    command: Command, capfd: Capture, codes: list[int], want: int, told: str
):
    """Rank 1 ends first; a negative code is the signal that kills it."""
    script = f"""
code = {[int(code) for code in codes]}[rank]
if code < 0:
    os.kill(os.getpid(), -code)
time.sleep(0.5 * (rank != 1))
if rank == 0:
    sys.stderr.write("last words\\n")
sys.exit(code)
"""
    assert launch(command(script), num_processes=3) == want
    assert capfd.readouterr().err == f"last words\n{told}"


def test_ranks_that_hang_after_a_failure_are_killed(command, capfd, monkeypatch):
    monkeypatch.setattr(launch_module, "_KILL_AFTER_S", 0.5)
    script = """
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 2:
    sys.exit(3)
time.sleep(60)
"""
    begin_s = time.monotonic()
    assert launch(command(script), num_processes=3, patience_s=0.5) == 3
    assert 1.0 <= time.monotonic() - begin_s < LIMIT_S
    assert capfd.readouterr().err == "halley: rank 2 ended with exit code 3\n"


def test_ranks_pause_with_the_launcher_and_get_its_signals_once(command, start_launcher, tmp_path):
    launcher = start_launcher(command(_RECORD_SIGNALS))
    ticks = tmp_path / "ticks"
    _wait_until(ticks.exists)
    launcher.send_signal(signal.SIGTSTP)
    _wait_until(lambda: "\nState:\tT" in Path(f"/proc/{launcher.pid}/status").read_text())
    time.sleep(0.1)
    paused_at = ticks.read_text()
    time.sleep(0.3)
    assert ticks.read_text() == paused_at
    launcher.send_signal(signal.SIGCONT)
    _wait_until(lambda: ticks.read_text() not in ("", paused_at))
    launcher.send_signal(signal.SIGTERM)
    _, stderr = launcher.communicate(timeout=LIMIT_S)
    assert (launcher.returncode, stderr) == (128 + 15, "")
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["[15]"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has PR_SET_PDEATHSIG")
def test_ranks_die_with_the_launcher(command: Command, start_launcher: Start, tmp_path: Path):
    launcher = start_launcher(command(_RECORD_SIGNALS))
    pids = [int((tmp_path / f"{rank}.txt").read_text().split()[1]) for rank in range(2)]
    assert all(is_running(pid) for pid in pids)
    launcher.kill()
    _wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_zero_ranks_are_refused():
    with pytest.raises(ValueError, match=r"num_processes \(0\) must be at least 1"):
        launch([], num_processes=0)


def test_one_rank_per_device(monkeypatch: Patch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for num_devices, num_processes in [(0, 2), (1, 1), (8, 8)]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda number=num_devices: number)
        assert count_ranks(0, device="auto") == num_processes
