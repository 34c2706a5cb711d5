"""Start the ranks of one host, forward signals to them, and report the ranks that fail.

The launcher passes the name of a file to its ranks. Each rank appends its failure to the file as
one JSON line, and the launcher prints each different failure once.
"""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import final

from torch.distributed.elastic.multiprocessing.errors import get_error_handler


USER_ERROR = 2  # exit code for a mistake of the user; the message about it is already printed
READER_GONE = 141  # 128 + SIGPIPE: exit code if stdout is closed, as by `halley ... | head -1`
FAILURES_VARIABLE = "HALLEY_FAILURES"

_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # torchrun sets this and prints the file
_MAX_SHOWN = 4  # largest number of causes of failures to print; each rank may have its own
_MAX_DETAILS = 20_000  # largest number of traceback characters in a report
_POLL_S = 0.1
_KILL_AFTER_S = 5.0  # time from SIGTERM to SIGKILL
_SIGNAL_PATIENCE_S = 600.0  # time for ranks to save a checkpoint after the first signal
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)  # signals that ask to end or pause
_HINT_AFTER_S = 3.0  # time after a signal until the launcher prints that it waits

# This script sets PR_SET_PDEATHSIG and then executes a rank, so that Linux kills the rank when
# the launcher dies. The argument preexec_fn of Popen could do this too, but it is not safe with
# threads. The launcher may die before the call of prctl, so the script checks its parent's id.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure that a process reports to its launcher or its user before the process ends."""

    text: str  # a message of one line
    rank: int | None  # None for a process without a launcher
    is_mistake: bool = False  # True if another command, configuration or file avoids the failure
    details: str = ""  # a traceback to print above ``text``

    def format(self) -> str:
        """Return the failure as the text that the user sees, with a newline at the end."""
        place = "" if self.rank is None else f" on rank {self.rank}"
        kind = "error" if self.is_mistake else f"failed{place}"
        details = f"{self.details.rstrip()}\n" if self.details else ""
        return f"{details}halley: {kind}: {self.text}\n"


def tell_failure_from_thread(text: str) -> None:
    """Report a one-line failure to the launcher, else on stderr, even if the main thread hangs."""
    failure = Failure(text=text, rank=_own_rank())
    if FAILURES_VARIABLE in os.environ and _tell_launcher(failure):
        return
    # Write to the descriptor, because the main thread may hold the lock of sys.stderr.
    os.write(2, failure.format().encode())


def tell_failure(
    text: str, *, is_mistake: bool = False, error: BaseException | None = None, details: str = ""
) -> None:
    """Report this process's failure to Halley's launcher, or to the user if there is none.

    Under another launcher, local rank 0 alone prints a user's mistake, which all ranks of a host
    share. Any other failure of another local rank goes to torchrun's error file, or to stderr if
    there is none. ``error`` is the exception for this file; for other arguments see ``Failure``.
    """
    text, details = " ".join(text.split()), details[-_MAX_DETAILS:]
    failure = Failure(text=text, rank=_own_rank(), is_mistake=is_mistake, details=details)
    is_told = False
    if os.environ.get(FAILURES_VARIABLE):
        is_told = _tell_launcher(failure)
    elif os.environ.get("LOCAL_RANK", str(failure.rank or 0)) != "0":
        is_told = is_mistake
        if not is_mistake and error is not None and os.environ.get(_ERROR_FILE_VARIABLE):
            get_error_handler().record_exception(error)
            is_told = True
    if not is_told:
        sys.stderr.write(failure.format())


@final
class FailureReader:
    """Prints the failures that ranks append to a file: each cause once, at most four causes."""

    def __init__(self, path: Path) -> None:
        """Create the file ``path``; ``launch`` gives ranks this path in an environment variable."""
        path.touch()
        self.path = path
        self.ranks: set[int] = set()  # ranks that have reported a failure
        self._causes: set[tuple[bool, str]] = set()
        self._position = 0

    def show_new(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):  # incomplete, because the disk is full
                    break
                self._position += len(line)
                failure = Failure(**json.loads(line))
                if failure.rank is not None:
                    self.ranks.add(failure.rank)
                # Failures of one cause have equal texts, except for a leading "rank N " in some.
                cause = failure.is_mistake, failure.text.removeprefix(f"rank {failure.rank} ")
                if cause in self._causes or len(self._causes) > _MAX_SHOWN:
                    continue
                self._causes.add(cause)
                more = "halley: more ranks failed for other causes, which are not shown\n"
                sys.stderr.write(failure.format() if len(self._causes) <= _MAX_SHOWN else more)


def _own_rank() -> int | None:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def _tell_launcher(failure: Failure) -> bool:
    """Append a failure to the launcher's file; return whether that worked."""
    try:
        # O_CREAT is left out: it would create the file again after the launcher has deleted it.
        descriptor = os.open(os.environ[FAILURES_VARIABLE], os.O_WRONLY | os.O_APPEND)
        with open(descriptor, "wb", buffering=0) as file:  # one write, so that lines do not mix
            file.write(f"{json.dumps(asdict(failure))}\n".encode())
    except OSError:  # the disk is full, or the launcher has ended
        return False
    return True


def launch(command: list[str], *, num_processes: int, patience_s: float = 30.0) -> int:
    """Run a command as several ranks of this host; return the exit code when all have ended.

    The first SIGINT or SIGTERM is forwarded to all ranks, which then have ten minutes to end. The
    second kills them. After a rank has failed, the other ranks have ``patience_s`` to end. The
    result is the exit code of the rank that failed first, 128 + n after signal n, or 0. If the host
    allows no more processes, a RuntimeError is raised.
    """
    if num_processes < 1:
        raise ValueError(f"num_processes ({num_processes}) must be at least 1")
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
    ranks: list[subprocess.Popen[bytes]] = []
    signals: deque[int] = deque()
    with (
        tempfile.TemporaryDirectory(prefix="halley-") as folder,
        reserve_port() as bound,
        signals_handled(_SIGNALS, lambda number, frame: signals.append(number)),
    ):
        failures = FailureReader(Path(folder) / "failures.jsonl")
        environment = _environment(num_processes, bound) | {FAILURES_VARIABLE: str(failures.path)}
        try:
            for rank in range(num_processes):
                # The terminal sends Ctrl-C to the process group of the launcher. A rank in a group
                # of its own gets only the signal that the launcher forwards.
                process = subprocess.Popen(
                    command,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    process_group=0,
                )
                ranks.append(process)
            return _wait(ranks, signals=signals, failures=failures, patience_s=patience_s)
        except BlockingIOError as error:
            raise RuntimeError(
                f"rank {len(ranks)} of {num_processes} could not be started: {error.strerror}"
            ) from error
        finally:
            _send(ranks, signal.SIGKILL)


def _wait(
    ranks: list[subprocess.Popen[bytes]],
    *,
    signals: deque[int],
    failures: FailureReader,
    patience_s: float,
) -> int:
    """Wait for all ranks; forward signals, print failures, end late ranks; return an exit code."""
    failed: int | None = None
    interrupted_by: int | None = None
    deadline_s = hint_s = math.inf
    next_signal = signal.SIGTERM
    while True:
        codes = [process.poll() for process in ranks]
        failures.show_new()
        if failed is None and interrupted_by is None:
            failed = _find_failure(codes)
        if None not in codes:
            break
        now_s = time.monotonic()
        while signals:
            number = signals.popleft()
            if number == signal.SIGTSTP:
                _send(ranks, signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)  # until the shell sends SIGCONT
                _send(ranks, signal.SIGCONT)
                continue
            _send(ranks, number if interrupted_by is None else signal.SIGKILL)
            if interrupted_by is None:
                interrupted_by = number
                deadline_s, hint_s = now_s + _SIGNAL_PATIENCE_S, now_s + _HINT_AFTER_S
        if failed is not None and deadline_s == math.inf:
            deadline_s = now_s + patience_s
        if now_s > hint_s:
            num_running = codes.count(None)
            _say(
                f"waiting up to {_SIGNAL_PATIENCE_S:g} s for {num_running} "
                f"rank{'s' if num_running > 1 else ''} to end; another signal kills them at once"
            )
            hint_s = math.inf
        if now_s > deadline_s:
            _send(ranks, next_signal)
            deadline_s, next_signal = now_s + _KILL_AFTER_S, signal.SIGKILL
        time.sleep(_POLL_S)
    if failed is not None:
        return _report(failed, ranks[failed].returncode, is_reported=failed in failures.ranks)
    return 0 if interrupted_by is None else 128 + interrupted_by


def _find_failure(codes: list[int | None]) -> int | None:
    # A rank that a signal killed is the cause: the other ranks end by errors, with codes above 0.
    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    ended = [rank for rank, code in enumerate(codes) if code is not None and code > 0]
    return min(killed or ended, default=None)


def _report(rank: int, code: int, *, is_reported: bool) -> int:
    if code < 0:
        name = f"signal {-code}"
        with suppress(ValueError):  # most real-time signals have no name
            name = signal.Signals(-code).name
        _say(f"rank {rank} was killed by {name}")
        return 128 - code
    if code not in (USER_ERROR, READER_GONE) and not is_reported:
        _say(f"rank {rank} ended with exit code {code}")
    return code


def _say(text: str) -> None:
    sys.stderr.write(f"halley: {text}\n")


def _send(ranks: list[subprocess.Popen[bytes]], number: int) -> None:
    for process in ranks:
        process.send_signal(number)


def reserve_port() -> socket.socket:
    """Return a socket bound to a free port of this host, to keep open until the ranks have ended.

    Until then Linux gives the port to no other process that asks for any free port. The store of
    rank 0 can listen on it nevertheless, because it sets SO_REUSEADDR too.
    """
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", 0))
    return bound


def _environment(num_processes: int, bound: socket.socket) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(max(1, _num_cores() // num_processes)),
        # At its default log level, torch prints long C++ stack traces when the store is lost.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "KINETO_LOG_LEVEL": "99",  # else the profiler prints messages to stdout
        **os.environ,  # the user's variables override those above
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(bound.getsockname()[1]),
    }


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextmanager
def signals_handled(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """In the ``with`` block, handle signals by ``handler``; only if this is the main thread."""
    try:
        before = {number: signal.signal(number, handler) for number in numbers}
    except ValueError:  # signal handlers can be set in the main thread only
        before = {}
    try:
        yield
    finally:
        for number, old_handler in before.items():
            signal.signal(number, old_handler)
