"""Report the failure of a rank to the user, only once if several ranks fail for the same cause.

The launcher passes the name of a file to its ranks. Each rank appends its failure to the file as
one JSON line, and the launcher prints each different failure once. Without the file, the rank
prints the failure on standard error.

``OperationReport`` describes the operation that a rank runs, for messages of the watchdog.
"""

import json
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, final

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from halley.core.current_operation import CURRENT_OPERATION
from halley.distributed.peers import name_ranks


FAILURES_VARIABLE = "HALLEY_FAILURES"

_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun, which prints the file
_MAX_SHOWN = 4  # different causes, since a hundred ranks may report a hundred of them
_MAX_DETAILS = 20_000  # characters of a traceback
# Module of the functions of torch.distributed that block with gloo.
_COLLECTIVES = "torch.distributed.distributed_c10d"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure that one rank reports before it ends.

    Attributes:
        text: the message, one line.
        rank: None for a process without a launcher.
        is_mistake: the user can avoid it by another command line, configuration or file.
        details: a traceback to show above the line, or "".
    """

    text: str
    rank: int | None
    is_mistake: bool = False
    details: str = ""

    def format(self) -> str:
        """Return the text for the user, with a newline at the end."""
        if self.is_mistake:
            start = "halley: error"
        elif self.rank is None:
            start = "halley: failed"
        else:
            start = f"halley: failed on rank {self.rank}"
        details = f"{self.details.rstrip()}\n" if self.details else ""
        return f"{details}{start}: {self.text}\n"

    @property
    def cause(self) -> tuple[bool, str]:
        """A key that is equal for ranks with the same cause: the text without the own rank."""
        return self.is_mistake, self.text.removeprefix(f"rank {self.rank} ")


def tell_failure_from_thread(text: str) -> None:
    """Report a failure, given as one line, while the main thread hangs and may hold locks."""
    failure = Failure(text=text, rank=_own_rank())
    if path := os.environ.get(FAILURES_VARIABLE):
        with suppress(OSError):
            _append(path, json.dumps(asdict(failure)) + "\n")
            return
    # Write to the descriptor, because the main thread may hold the lock of sys.stderr.
    os.write(2, failure.format().encode())


def tell_failure(
    text: str,
    *,
    is_mistake: bool = False,
    error: BaseException | None = None,
    details: str = "",
) -> None:
    """Report the failure of this process, to the launcher or to the user.

    If ``halley`` started this rank, its launcher prints the report. Under another launcher, all
    ranks of a host make the same mistake, so only local rank 0 prints it. Failures of other local
    ranks go to torchrun's error file, or to standard error if there is no such file.

    Args:
        text: any text; line ends become spaces.
        is_mistake, details: see ``Failure``.
        error: the exception, for torchrun's error file.
    """
    failure = Failure(
        text=" ".join(text.split()),
        rank=_own_rank(),
        is_mistake=is_mistake,
        details=details[-_MAX_DETAILS:],
    )
    if path := os.environ.get(FAILURES_VARIABLE):
        try:
            _append(path, json.dumps(asdict(failure)) + "\n")
        except OSError:  # the disk is full, or the launcher has ended
            sys.stderr.write(failure.format())
        return
    if os.environ.get("LOCAL_RANK", str(failure.rank or 0)) == "0":
        sys.stderr.write(failure.format())
    elif is_mistake:
        return
    elif error is not None and os.environ.get(_ERROR_FILE_VARIABLE):
        get_error_handler().record_exception(error)
    else:
        sys.stderr.write(failure.format())


@final
class FailureReader:
    """Prints the failures that ranks append to a file, each cause once.

    Attributes:
        path: the file; the launcher passes it to its ranks in ``FAILURES_VARIABLE``.
        ranks: ranks that have reported a failure.
    """

    def __init__(self, path: Path) -> None:
        """Create the empty file, in a folder that exists."""
        path.touch()
        self.path = path
        self.ranks: set[int] = set()
        self._causes: set[tuple[bool, str]] = set()
        self._position = 0

    def show_new(self) -> None:
        """Print the failures that ranks have reported since the last call.

        All calls together print at most four causes.
        """
        with self.path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):  # incomplete, because the disk is full
                    break
                self._position += len(line)
                self._show(Failure(**json.loads(line)))

    def _show(self, failure: Failure) -> None:
        if failure.rank is not None:
            self.ranks.add(failure.rank)
        if failure.cause in self._causes or len(self._causes) > _MAX_SHOWN:
            return
        self._causes.add(failure.cause)
        if len(self._causes) <= _MAX_SHOWN:
            sys.stderr.write(failure.format())
        else:
            sys.stderr.write("halley: more ranks failed for other causes, which are not shown\n")


def _own_rank() -> int | None:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def _append(path: str, line: str) -> None:
    # One write for the line, so that lines of two ranks do not mix. O_CREAT would create the file
    # again after the launcher has deleted it.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class OperationReport:
    """The operation that a rank runs.

    Attributes:
        step: training step, 0 if steps are not counted.
        num_operations, name: see ``CurrentOperation``.
        is_waiting: the rank waits in the operation for other ranks and computes nothing.
        is_busy: its GPU is known to have unfinished work.
    """

    step: int
    num_operations: int
    name: str
    is_waiting: bool
    is_busy: bool = False

    def to_json(self) -> str:
        """Return the report as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Return the report that ``to_json`` wrote."""
        return cls(**json.loads(text))

    def describe(self, ranks: list[int]) -> str:
        """Return the report of these ranks as a clause: "rank 3 waits in dispatch (...)"."""
        verb = ("waits in" if len(ranks) == 1 else "wait in") if self.is_waiting else "last began"
        step = f"step {self.step}, " if self.step else ""
        place = f"({step}operation {self.num_operations})"
        return f"{name_ranks(ranks)} {verb} {self.name or 'no operation'} {place}"


def report_operation(step: int, *, busy_device: int | None = None) -> OperationReport:
    """Return the report of this process.

    If the main thread is inside a function of ``torch.distributed``, the report names it as an
    operation that waits, because such functions block with gloo.

    Args:
        step: training step, 0 if steps are not counted.
        busy_device: index of the GPU that is asked for unfinished work; None asks no GPU.
    """
    name, is_waiting = CURRENT_OPERATION.name, CURRENT_OPERATION.is_waiting
    if not is_waiting:
        main = threading.main_thread().ident
        frame = sys._current_frames().get(main) if main is not None else None
        if frame is not None and frame.f_globals.get("__name__") == _COLLECTIVES:
            name, is_waiting = f"{frame.f_code.co_name} of torch.distributed", True
    return OperationReport(
        step=step,
        num_operations=CURRENT_OPERATION.num_operations,
        name=name,
        is_waiting=is_waiting,
        is_busy=busy_device is not None and not torch.cuda.default_stream(busy_device).query(),
    )


def differ(reports: Iterable[OperationReport]) -> bool:
    """Return whether ranks run different operations; ``is_waiting`` is not compared."""
    return len({(report.step, report.num_operations, report.name) for report in reports}) > 1


def describe_reports(reports: Mapping[int, OperationReport]) -> str:
    """Return the reports of ranks in words; ranks with equal reports share one clause."""
    ranks_of: dict[OperationReport, list[int]] = {}
    for rank, report in sorted(reports.items()):
        ranks_of.setdefault(report, []).append(rank)
    return ", ".join(report.describe(ranks) for report, ranks in ranks_of.items())
