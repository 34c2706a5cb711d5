"""The launcher, with small scripts as ranks: environment, exit codes, signals, and no survivors."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from halley.distributed import launcher as launch_module
from halley.distributed.launcher import default_num_processes, launch, run_ranks


LIMIT_S = 30.0

# Every script of a rank begins so: it says where it is by a file of its rank.
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
from halley.distributed.launcher import run_ranks
sys.exit(run_ranks(sys.argv[1:], num_processes=2))
"""


@pytest.fixture
def command(tmp_path: Path) -> Callable[[str], list[str]]:
    """Return the command that runs a piece of Python as a rank, with ``say`` defined."""

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


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


@pytest.fixture
def start_launcher(tmp_path: Path) -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """Return the function that starts a launcher of two ranks in a process of its own."""
    launchers: list[subprocess.Popen[str]] = []

    def start(command: list[str]) -> subprocess.Popen[str]:
        launchers.append(
            subprocess.Popen(
                [sys.executable, "-c", _LAUNCHER, *command], stderr=subprocess.PIPE, text=True
            )
        )
        _wait_until(lambda: all((tmp_path / f"{rank}.txt").exists() for rank in range(2)))
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.communicate()


def test_ranks_get_the_environment_of_torch(
    command: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    monkeypatch.setattr(launch_module, "_num_cores", lambda: 7)
    script = "import json; say(json.dumps(dict(os.environ)))"
    assert run_ranks(command(script), num_processes=3) == 0
    environments = [json.loads((tmp_path / f"{rank}.txt").read_text()) for rank in range(3)]
    for rank, environment in enumerate(environments):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["OMP_NUM_THREADS"] == "2"  # 7 cores over 3 ranks
        assert environment["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    assert len({environment["MASTER_PORT"] for environment in environments}) == 1


def test_threads_that_the_user_chose_stay(
    command: Callable[[str], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert run_ranks(command('say(os.environ["OMP_NUM_THREADS"])'), num_processes=1) == 0
    assert (tmp_path / "0.txt").read_text() == "5"


def test_killed_rank_is_named_and_the_others_may_speak(
    command: Callable[[str], list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    script = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
sys.stderr.write("rank %d has lost it\\n" % rank)
sys.exit(75)
"""
    assert run_ranks(command(script), num_processes=2) == 128 + 9
    assert capfd.readouterr().err.splitlines() == [
        "rank 0 has lost it",
        "halley: rank 1 was killed by SIGKILL",
    ]


_TELL = "from halley.distributed.failures import tell_failure\n"


def test_the_same_failure_of_all_ranks_is_told_once(
    command: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
):
    """Each rank says what it lost, with its own number: one line, and none of the exit codes."""
    script = (
        _TELL
        + """
tell_failure("rank %d lost rank 9\\nin step 5" % rank)
sys.exit(1)
"""
    )
    assert run_ranks(command(script), num_processes=2) == 1
    assert re.fullmatch(
        r"halley: failed on rank (\d): rank \1 lost rank 9 in step 5\n", capfd.readouterr().err
    )


def test_different_failures_are_all_told_and_a_killed_rank_too(
    command: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
):
    script = (
        _TELL
        + """
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5 * rank)
tell_failure(["the disk is full", "rank 1 lost rank 2"][rank], details="Traceback %d" % rank)
sys.exit(1)
"""
    )
    assert run_ranks(command(script), num_processes=3) in (1, 128 + 9)
    err = capfd.readouterr().err
    assert err.startswith("Traceback 0\nhalley: failed on rank 0: the disk is full\nTraceback 1\n")
    assert "halley: failed on rank 1: rank 1 lost rank 2\n" in err


def test_at_most_four_failures_are_told(
    command: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
):
    script = (
        _TELL
        + """
for number in range(6):
    tell_failure("failure %d" % number)
sys.exit(1)
"""
    )
    assert run_ranks(command(script), num_processes=1) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[:-1] == [f"halley: failed on rank 0: failure {number}" for number in range(4)]
    assert lines[-1] == "halley: more ranks failed, each in a way of its own: not shown"


def test_a_mistake_that_one_rank_alone_sees_is_told(
    command: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
):
    script = (
        _TELL
        + """
if rank == 1:
    tell_failure("text (a.txt) must be a readable file", is_mistake=True)
    sys.exit(2)
"""
    )
    assert run_ranks(command(script), num_processes=2) == 2
    assert capfd.readouterr().err == "halley: error: text (a.txt) must be a readable file\n"


def test_ranks_have_long_after_the_first_signal_and_none_after_the_second(
    command: Callable[[str], list[str]],
    start_launcher: Callable[[list[str]], subprocess.Popen[str]],
    tmp_path: Path,
):
    """A rank that saves for longer than any patience of failures is left alone; then killed."""
    script = """
got = []
signal.signal(signal.SIGTERM, lambda number, frame: (got.append(number), say(str(got))))
say("ready")
while True:
    time.sleep(0.05)
"""
    launcher = start_launcher(command(script))
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


def test_ranks_that_stay_after_a_signal_are_ended_at_last(
    command: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch_module, "_SIGNAL_PATIENCE_S", 0.5)
    monkeypatch.setattr(launch_module, "_KILL_AFTER_S", 0.5)
    signals: deque[int] = deque([signal.SIGINT])
    monkeypatch.setattr(launch_module, "_signals_recorded", lambda: nullcontext(signals))
    script = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
time.sleep(60)
"""
    begin_s = time.monotonic()
    assert run_ranks(command(script), num_processes=1) == 128 + 2
    assert time.monotonic() - begin_s < LIMIT_S


def test_mistake_of_exit_code_2_gets_no_line_of_the_launcher(
    command: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
):
    script = """
time.sleep(0.3 * (rank == 0))  # even the last to end has its say
if rank == 0:
    sys.stderr.write("halley: no such file\\n")
sys.exit(2)
"""
    assert run_ranks(command(script), num_processes=2) == 2
    assert capfd.readouterr().err == "halley: no such file\n"


def test_code_is_that_of_the_first_failure(
    command: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
):
    script = "time.sleep(0.5 * (rank != 1)); sys.exit({0: 0, 1: 7, 2: 75}[rank])"
    assert run_ranks(command(script), num_processes=3) == 7
    assert capfd.readouterr().err == "halley: rank 1 ended with exit code 7\n"


def test_stuck_ranks_are_ended_after_the_patience(
    command: Callable[[str], list[str]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(launch_module, "_KILL_AFTER_S", 0.5)
    script = """
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 2:
    sys.exit(3)
time.sleep(60)
"""
    begin_s = time.monotonic()
    assert run_ranks(command(script), num_processes=3, patience_s=1.0) == 3
    assert 1.5 <= time.monotonic() - begin_s < LIMIT_S
    assert capfd.readouterr().err == "halley: rank 2 ended with exit code 3\n"


def test_ranks_pause_with_the_launcher_and_get_its_signals_once(
    command: Callable[[str], list[str]],
    start_launcher: Callable[[list[str]], subprocess.Popen[str]],
    tmp_path: Path,
):
    launcher = start_launcher(command(_RECORD_SIGNALS))
    ticks = tmp_path / "ticks"
    _wait_until(ticks.exists)
    launcher.send_signal(signal.SIGTSTP)
    _wait_until(lambda: "\nState:\tT" in Path(f"/proc/{launcher.pid}/status").read_text())
    time.sleep(0.2)
    paused_at = ticks.read_text()
    time.sleep(0.5)
    assert ticks.read_text() == paused_at
    launcher.send_signal(signal.SIGCONT)
    _wait_until(lambda: ticks.read_text() not in ("", paused_at))
    launcher.send_signal(signal.SIGTERM)
    _, stderr = launcher.communicate(timeout=LIMIT_S)
    assert (launcher.returncode, stderr) == (128 + 15, "")
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["[15]"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_no_rank_survives_the_launcher(
    command: Callable[[str], list[str]],
    start_launcher: Callable[[list[str]], subprocess.Popen[str]],
    tmp_path: Path,
):
    launcher = start_launcher(command(_RECORD_SIGNALS))
    pids = [int((tmp_path / f"{rank}.txt").read_text().split()[1]) for rank in range(2)]
    assert all(_is_alive(pid) for pid in pids)
    launcher.kill()
    _wait_until(lambda: not any(_is_alive(pid) for pid in pids))


def test_launch_runs_the_command_line(monkeypatch: pytest.MonkeyPatch):
    started = []

    def record(command: list[str], *, num_processes: int) -> int:
        started.append((command, num_processes))
        return 5

    monkeypatch.setattr(launch_module, "run_ranks", record)
    assert launch(["halley.cli", "train", "a.toml"], num_processes=4) == 5
    assert started == [([sys.executable, "-m", "halley.cli", "train", "a.toml"], 4)]


def test_no_ranks_is_an_error():
    with pytest.raises(ValueError, match=r"num_processes \(0\) must be at least 1"):
        launch([], num_processes=0)


@pytest.mark.parametrize(("num_devices", "num_processes"), [(0, 2), (1, 1), (8, 8)])
def test_one_rank_a_device(monkeypatch: pytest.MonkeyPatch, num_devices: int, num_processes: int):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    assert default_num_processes() == num_processes
