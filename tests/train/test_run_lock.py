"""The lock on a run's folder has one owner, whom errors name, and ends with its process."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halley.train import run_lock as module
from halley.train.run_lock import run_lock


_HOLD = """
import sys, time
from pathlib import Path
from halley.train.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_told_the_owner_until_it_is_killed(tmp_path: Path):
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "locked\n"
            owner.send_signal(signal.SIGSTOP)  # a stopped run holds its lock, too
            host = re.escape(module.socket.gethostname())
            started = r"\d{4}(-\d\d){2} \d\d(:\d\d){2} [+-]\d{4}"
            message = (
                rf"^output \({tmp_path}\) must not be in use by another run: process {owner.pid} "
                rf"on host {host}, started {started}, is training in it$"
            )
            with pytest.raises(ValueError, match=message), run_lock(tmp_path, patience_s=0.2):
                pass
        finally:
            owner.kill()
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == owner.pid
    for _ in range(2):
        with run_lock(tmp_path, patience_s=0.0):
            assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the lock file of an owner on another host, whose ``flock`` this host does not see."""
    monkeypatch.setattr(module, "RENEW_S", 0.1)
    path = tmp_path / "run.lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "started": "2026-11-25 10:00:00"}))
    return path


def test_an_owner_on_another_host_that_renews_its_lock_is_named(foreign: Path):
    renew = "import os, sys, time\nwhile True: os.utime(sys.argv[1]); time.sleep(0.1)"
    message = "process 7 on host elsewhere, started 2026-11-25 10:00:00, is training in it"
    with subprocess.Popen([sys.executable, "-c", renew, foreign]) as renewer:
        try:
            with pytest.raises(ValueError, match=message), run_lock(foreign.parent):
                pass
        finally:
            renewer.kill()


def test_an_owner_on_another_host_that_is_gone_is_replaced(
    foreign: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_WATCH_S", 0.3)
    with run_lock(foreign.parent):
        assert json.loads(foreign.read_text())["pid"] == os.getpid()
        renewed_ns = foreign.stat().st_mtime_ns
        time.sleep(0.3)
        assert foreign.stat().st_mtime_ns > renewed_ns  # the owner renews its lock, for other hosts


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff" * 5000, b'{"host": 3}'])
def test_a_damaged_lock_file_of_no_process_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
):
    monkeypatch.setattr(module, "_WATCH_S", 0.1)
    (tmp_path / "run.lock").write_bytes(content)
    with run_lock(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_a_link_is_no_lock_file(tmp_path: Path):
    (tmp_path / "other").write_text("keep")
    (tmp_path / "run.lock").symlink_to(tmp_path / "other")
    message = rf"^{tmp_path}/run\.lock must be a file to write: Too many levels of symbolic links$"
    with pytest.raises(ValueError, match=message), run_lock(tmp_path):
        pass
    assert (tmp_path / "other").read_text() == "keep"


def test_a_renewal_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without it, one error of a network file system would let a run on another host begin."""
    monkeypatch.setattr(module, "RENEW_S", 0.05)
    failures, utime = [OSError("stale file handle")] * 2, os.utime

    def fail_twice(descriptor: int) -> None:
        if failures:
            raise failures.pop()
        utime(descriptor)

    monkeypatch.setattr(module.os, "utime", fail_twice)
    with run_lock(tmp_path):
        created_ns = (tmp_path / "run.lock").stat().st_mtime_ns
        time.sleep(0.5)
        assert not failures
        assert (tmp_path / "run.lock").stat().st_mtime_ns > created_ns
