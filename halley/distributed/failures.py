"""Report the failure of a rank to the user, and report it once if several ranks fail alike.

The launcher passes a file name to its ranks. Each rank appends its failure to the file as one JSON
line, and the launcher prints each different failure once. Without that file, a rank writes to
standard error itself.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from torch.distributed.elastic.multiprocessing.errors import get_error_handler


FAILURES_VARIABLE = "HALLEY_FAILURES"

_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun, which prints the file
_MAX_SHOWN = 4  # different causes; a hundred ranks may fail in a hundred ways
_MAX_DETAILS = 20_000  # characters of a traceback


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure that one rank reports before it ends.

    Attributes:
        text: the message, one line.
        rank: None for a process without a launcher.
        is_mistake: the user can fix it with another command line, configuration or file.
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
        """A key that is equal for ranks that fail alike; their own number is left out."""
        return self.is_mistake, self.text.removeprefix(f"rank {self.rank} ")


def tell_failure_from_thread(text: str) -> None:
    """Report a failure while the main thread hangs and may hold locks.

    Args:
        text: the message, one line.
    """
    failure = Failure(text=text, rank=_own_rank())
    if path := os.environ.get(FAILURES_VARIABLE):
        with suppress(OSError):
            _append(path, json.dumps(asdict(failure)) + "\n")
            return
    # Write to the descriptor, because the hanging thread may hold the lock of sys.stderr.
    os.write(2, failure.format().encode())


def tell_failure(
    text: str,
    *,
    is_mistake: bool = False,
    error: BaseException | None = None,
    details: str = "",
) -> None:
    """Report how this process failed, to the launcher or to the user.

    If ``halley`` started this rank, the launcher prints the report. Under another launcher, all
    ranks of a host see the same mistake, so only local rank 0 prints it. A failure of another local
    rank goes to torchrun's error file, or to standard error if there is none.

    Args:
        text: any text; line ends become spaces.
        is_mistake, details: see ``Failure``.
        error: the exception, for torchrun.
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
    if os.environ.get("LOCAL_RANK", "0" if failure.rank is None else str(failure.rank)) == "0":
        sys.stderr.write(failure.format())
        return
    if is_mistake:
        return
    if error is not None and os.environ.get(_ERROR_FILE_VARIABLE):
        get_error_handler().record_exception(error)
        return
    sys.stderr.write(failure.format())


@final
class FailureReader:
    """Prints the failures that ranks append to a file, each cause once.

    Attributes:
        path: the file; the launcher passes it to its ranks in ``FAILURES_VARIABLE``.
        ranks: ranks that have reported a failure.
    """

    def __init__(self, path: Path, *, write: Callable[[str], object] | None = None) -> None:
        """Create the empty file.

        Args:
            path: the file, in a folder that exists.
            write: function that prints text for the user; standard error if None.

        Raises:
            OSError: the file cannot be created.
        """
        path.touch()
        self.path = path
        self.ranks: set[int] = set()
        self._write = write or sys.stderr.write
        self._causes: set[tuple[bool, str]] = set()
        self._position = 0

    def show_new(self) -> None:
        """Print the failures reported since the last call, at most four causes in all."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):  # a full disk cut the line
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
            self._write(failure.format())
        else:
            self._write("halley: more ranks failed, each in a way of its own: not shown\n")


def _own_rank() -> int | None:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def _append(path: str, line: str) -> None:
    # One write, so that lines of two ranks do not mix. No O_CREAT: the launcher deletes the file.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
