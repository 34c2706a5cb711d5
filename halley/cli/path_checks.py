"""Check the files and folders that commands read and write, before the work that needs them."""

import tempfile
from collections.abc import Callable
from pathlib import Path


PNG = b"\x89PNG\r\n\x1a\n"

_HEAD_BYTES = 4096


def check_readable(path: Path, *, option: str) -> None:
    """Check that a file can be read.

    Raises:
        ValueError: it is missing, a folder, or not readable.
    """
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise ValueError(f"{option} ({path}) must be a readable file: {error.strerror}") from error


def check_replaceable(
    path: Path, *, option: str, is_own: Callable[[bytes], bool], what: str
) -> None:
    """Check that a file can be written; make its folder, leave the file as it is.

    Args:
        path: of a file that a command writes at its end.
        option: of the command line.
        is_own: whether a file that begins so is what the command writes, and may be replaced.
        what: what that is, for the error.

    Raises:
        ValueError: the file is a folder, cannot be written, or holds something else.
    """
    head = b""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with path.open("r+b") as file:
                if path.is_file():  # to read a pipe would wait for its writer
                    head = file.read(_HEAD_BYTES)
        else:
            with tempfile.TemporaryFile(dir=path.parent) as file:
                file.write(b"halley")
                file.flush()
    except OSError as error:
        raise ValueError(f"{option} ({path}) must be a file to write: {error.strerror}") from error
    if head and not is_own(head):
        raise ValueError(
            f"{option} ({path}) must be a new file or hold {what}: it holds something else"
        )


def check_picture(path: Path, *, option: str) -> None:
    """Check that a chart can be drawn into a file.

    Raises:
        ValueError: the file is not named ``.png``, cannot be written, or holds no chart.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"{option} ({path}) must be named .png")
    check_replaceable(path, option=option, is_own=is_chart, what="a chart of Halley's")


def is_chart(head: bytes) -> bool:
    """Return whether a file that begins so was drawn by matplotlib, as charts are."""
    return head.startswith(PNG) and b"Matplotlib" in head
