"""Read JSON and text files from untrusted sources, with limits on size and nesting.

Errors are ValueErrors of one line. It names the purpose of the file, its path and the broken rule.
"""

import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Never, cast

from halley.core.field_types import show


MAX_DEPTH = 32  # nesting of lists and objects; Halley's own files have at most 5 levels


def read_text(path: Path, *, what: str, max_bytes: int) -> str:
    """Read a UTF-8 text file that is not larger than a limit.

    The null device (``os.devnull``) reads as an empty file. Other devices, pipes and sockets are
    an error, because reading them can block.

    Args:
        what: purpose of the file, the first word of each message, such as "placement".
        max_bytes: the size limit.

    Raises:
        ValueError: the file is missing, is not a regular file, cannot be read, is larger than the
            limit or is not UTF-8.
    """
    try:
        content = _read_bytes(path, what=what, max_bytes=max_bytes)
    except OSError as error:
        raise ValueError(f"{what} ({path}) must be a readable file: {error.strerror}") from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what} ({path}) must be UTF-8 text: the byte at offset {error.start} is not"
        ) from error


def read_json(path: Path, *, what: str, max_bytes: int) -> object:
    """Read a file of one JSON value; see ``read_text`` and ``parse_json``."""
    return parse_json(read_text(path, what=what, max_bytes=max_bytes), where=f"{what} ({path})")


def read_json_lines(path: Path, *, what: str, max_bytes: int) -> Iterator[tuple[str, object]]:
    """Read a file with one JSON value per line; a missing file has no lines.

    Args:
        what: purpose of the file, such as "profiles".
        max_bytes: the size limit.

    Yields:
        For each line: the start of messages about it, such as "/a/b.jsonl:3 must be a line of
        profiles:", and its value.
    """
    try:
        os.stat(path)
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        pass  # read_text meets the same error and raises it with a clear message
    lines = read_text(path, what=what, max_bytes=max_bytes).split("\n")
    if not lines[-1]:
        del lines[-1]  # the last line ends with a newline
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number} must be a line of {what}:"
        yield where, parse_json(line, where=f"{where} it")


def parse_json(text: str, *, where: str) -> object:
    """Parse one JSON value, more strictly than ``json.loads``.

    Args:
        where: the start of each message, such as "placement (/a/b.json)".

    Raises:
        ValueError: the text is not JSON, an object has a key twice, a number is not finite (NaN,
            Infinity, 1e400), or lists and objects are nested deeper than ``MAX_DEPTH``.
    """
    try:
        value: object = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except RecursionError:
        value = None
        is_deep = True
    except ValueError as error:
        raise ValueError(f"{where} must be JSON: {error}") from error
    else:
        is_deep = _is_deeper(value, max_depth=MAX_DEPTH)
    if is_deep:
        raise ValueError(f"{where} must nest lists and objects at most {MAX_DEPTH} deep")
    return value


def check_version(value: object, *, version: int, where: str) -> dict[str, object]:
    """Return a JSON object after checking that its "version" is the expected number.

    Args:
        where: the start of each message, such as "placement (/a/b.json)".

    Raises:
        ValueError: it is not an object, or has another version.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a table with a version")
    table = cast(dict[str, object], value)
    found = table.get("version")
    if type(found) is not int or found != version:
        raise ValueError(f"{where} must be of version {version} and is of {show(found)}")
    return table


def _read_bytes(path: Path, *, what: str, max_bytes: int) -> bytes:
    try:
        # Without O_NONBLOCK, opening a pipe blocks until another process opens it for writing.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a null character
        raise ValueError(f"{what} ({str(path)!r}) must be a readable file: {error}") from error
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if os.path.samestat(info, os.stat(os.devnull)):
            return b""
        if not stat.S_ISREG(info.st_mode):
            kind = "Is a directory" if stat.S_ISDIR(info.st_mode) else "Not a regular file"
            raise ValueError(f"{what} ({path}) must be a readable file: {kind}")
        content = file.read(max_bytes + 1)  # files of /proc have a size of 0 but content
    if len(content) > max_bytes:
        raise ValueError(
            f"{what} ({path}) must have at most {max_bytes} bytes and has "
            f"{max(info.st_size, len(content))}"
        )
    return content


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table: dict[str, object] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"an object has the key {show(key)} twice")
        table[key] = value
    return table


def _refuse_constant(text: str) -> Never:
    raise ValueError(f"{text} is not a finite number")


def _finite_float(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{show(text)} is not a finite number")
    return number


def _is_deeper(value: object, *, max_depth: int) -> bool:
    """Return whether lists and objects are nested deeper than ``max_depth``."""
    if isinstance(value, dict):
        value = list(cast(dict[str, object], value).values())
    if not isinstance(value, list):
        return False
    children = cast(list[object], value)
    return max_depth == 0 or any(_is_deeper(each, max_depth=max_depth - 1) for each in children)
