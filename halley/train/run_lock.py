"""Lock the output folder of a run, so that two runs do not write to it at the same time.

The lock is ``flock`` on ``run.lock``; the kernel releases it when the process ends in any way. The
file names the owner, for the error message. Some shared file systems keep ``flock`` local to a
host. There, an owner on another host is recognized by the file's modification time, which the
owner renews.
"""

import fcntl
import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from halley.core.validation import parse_json


LOCK_FILE = "run.lock"
RENEW_S = 5.0
_WATCH_S = 3 * RENEW_S  # a run on another host that does not renew the file for so long has ended
_PATIENCE_S = 3.0  # time for a killed rank to release its lock
_MAX_BYTES = 4096


@contextmanager
def run_lock(folder: Path, *, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Hold the lock of a run's output folder in the block; ``ValueError`` if another run has it."""
    path = folder / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise ValueError(f"{path} must be a file to write: {error.strerror}") from error
    try:
        _lock(descriptor, path, patience_s=patience_s)
        _wait_for_other_host(descriptor, path)
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        _write(descriptor, {"host": socket.gethostname(), "pid": os.getpid(), "started": started})
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(RENEW_S):
                with suppress(OSError):  # a file system that is away for a while: try again
                    os.utime(descriptor)

        thread = threading.Thread(target=renew, name="halley-lock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            # Do not delete the lock file: a process that has opened it would lock a deleted file.
            _write(descriptor, {})
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, *, patience_s: float) -> None:
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise _in_use(path, _read(descriptor)) from None
        except OSError as error:
            warnings.warn(
                f"{path} cannot be locked ({error.strerror}): only runs on other hosts are "
                "recognised",
                stacklevel=4,
            )
            return
        time.sleep(0.1)


def _wait_for_other_host(descriptor: int, path: Path) -> None:
    """If the lock file names another host, wait; ``ValueError`` if that host renews the file."""
    owner = _read(descriptor)
    if not owner or owner.get("host") == socket.gethostname():
        return
    renewed_ns = os.fstat(descriptor).st_mtime_ns
    deadline_s = time.monotonic() + _WATCH_S
    while time.monotonic() < deadline_s:
        time.sleep(RENEW_S / 5)
        if os.fstat(descriptor).st_mtime_ns != renewed_ns:
            raise _in_use(path, _read(descriptor))


def _in_use(path: Path, owner: dict[str, Any]) -> ValueError:
    name = "another process"
    if owner:
        pid, host, started = (owner.get(key, "?") for key in ("pid", "host", "started"))
        name = f"process {pid} on host {host}, started {started},"
    return ValueError(
        f"output ({path.parent}) must not be in use by another run: {name} is training in it"
    )


def _read(descriptor: int) -> dict[str, Any]:
    content = os.pread(descriptor, _MAX_BYTES, 0).decode("ascii", errors="replace")
    try:
        owner = parse_json(content, where=LOCK_FILE)
    except ValueError:  # the file is empty, or its owner was killed while writing it
        return {}
    return cast(dict[str, Any], owner) if isinstance(owner, dict) else {}


def _write(descriptor: int, owner: dict[str, object]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(owner).encode("ascii"), 0)
