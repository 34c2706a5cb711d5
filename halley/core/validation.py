"""Check values from outside: arguments, fields of dataclasses, tables, and JSON files.

Files are read with limits on size and nesting. Errors are ValueErrors of one line, and name the
purpose and path of a file.
"""

import dataclasses
import difflib
import json
import math
import os
import stat
import sys
import types
import typing
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Never, cast

import torch


MAX_FLOAT = sys.float_info.max
MAX_DEPTH = 32  # deepest nesting of lists and objects; Halley's own files have at most 6 levels

Table = dict[str, object]
Record = typing.TypeVar("Record")

_MAX_SHOWN = 80  # largest number of characters of a wrong value in a message
_NEAR = 2 / 3  # from this difflib ratio, an unknown name counts as a misspelling


def show(value: object) -> str:
    """Return the ``repr`` of a wrong value for a message, cut to 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a deep list
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def show_name(value: object) -> str:
    """Return a short printable string as it is, and any other wrong value as ``show`` does."""
    if isinstance(value, str) and value.isprintable() and len(value) <= _MAX_SHOWN:
        return value
    return show(value)


def check_choice(value: object, choices: typing.Iterable[object], *, name: str) -> None:
    """Raise a ``ValueError`` unless a value equals one of the choices and has the same type."""
    allowed = tuple(choices)
    if not any(type(value) is type(each) and value == each for each in allowed):
        listed = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} ({show(value)}) must be one of {listed}")


def check_fields(record: object, *, prefix: str = "") -> None:
    """Raise a ``ValueError`` unless each field of a dataclass instance has its annotated type.

    An int is accepted for a float. A bool for a number and a float that is not finite are errors.
    ``prefix``, such as "train.", precedes the field names in messages.
    """
    for name, kind in _hints(type(record)).items():
        check_type(getattr(record, name), kind, name=prefix + name)


def check_type(value: typing.Any, kind: typing.Any, *, name: str) -> None:
    """Raise a ``ValueError`` unless a value has the type ``kind``, such as ``list[int]``."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        check_choice(value, arguments, name=name)
    elif origin is types.UnionType or origin is typing.Union:  # such as ``str | None``
        if not isinstance(value, arguments[1:]):
            check_type(value, arguments[0], name=name)
    elif origin is tuple:
        check_type(value, tuple, name=name)
        items = cast(tuple[object, ...], value)
        for each, each_kind, each_name in _items(items, arguments, name=name):
            check_type(each, each_kind, name=each_name)
    elif origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{name} ({show(value)}) must be a table")
        for key, each in cast(Table, value).items():
            check_type(each, arguments[1], name=f"{name}.{show_name(key)}")
    elif kind is not object:  # ``object`` allows any value
        accepted = (int, float) if kind is float else kind
        is_bool = isinstance(value, bool) and kind in (int, float)
        if not isinstance(value, accepted) or is_bool:
            raise ValueError(f"{name} ({show(value)}) must be of type {kind.__name__}")
        # ``math.isfinite`` would raise an error for an integer beyond the range of floats.
        if kind is float and not abs(value) <= MAX_FLOAT:
            raise ValueError(f"{name} ({show(value)}) must be finite")


def build(cls: type[Record], table: object, *, prefix: str = "") -> Record:
    """Build a dataclass, and the dataclasses inside it, from a table parsed from TOML or JSON.

    Lists become tuples, ints become floats, and tables become dataclasses, if annotated so. An
    unknown or missing key, a value of a wrong type, and a value that the class refuses are a
    ``ValueError``. ``prefix``, such as "model.moe.", precedes the field names in messages.
    """
    if not isinstance(table, dict):
        name = prefix.removesuffix(".") or "value"
        raise ValueError(f"{name} ({show(table)}) must be a table")
    table = cast(Table, table)
    fields = {field.name: field for field in dataclasses.fields(cast(typing.Any, cls))}
    for key in table:
        if key not in fields:
            raise ValueError(unknown_name(key, fields, prefix=prefix))
    values: Table = {}
    for name, field in fields.items():
        if name in table:
            values[name] = _convert(table[name], _hints(cls)[name], name=prefix + name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{prefix}{name} is required")
    return cls(**values)


def build_record(cls: type[Record], table: object, *, where: str) -> Record:
    """Call ``build``; an error message starts with ``where``, such as a file and a line."""
    try:
        return build(cls, table)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from error


def unknown_name(
    name: str, known: typing.Iterable[str], *, prefix: str = "", what: str = "key"
) -> str:
    """Return the error message for an unknown name: all known names, and a similar one if any."""
    known = list(known)
    is_short = len(name) <= _MAX_SHOWN  # difflib takes quadratic time
    near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR) if is_short else []
    hint = f", did you mean {prefix}{near[0]}" if near else ""
    names = ", ".join(prefix + each for each in known)
    return f"{what} ({show_name(prefix + name)}) must be one of {names}{hint}"


def _convert(value: typing.Any, kind: typing.Any, *, name: str) -> object:
    if dataclasses.is_dataclass(kind):
        return build(cast(type[object], kind), value, prefix=f"{name}.")
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name} ({show(value)}) must be a list")
        items = _items(cast(list[object], value), typing.get_args(kind), name=name)
        return tuple(_convert(each, each_kind, name=where) for each, each_kind, where in items)
    check_type(value, kind, name=name)
    return float(value) if kind is float else value


def _items(
    values: typing.Sequence[object], kinds: tuple[object, ...], *, name: str
) -> typing.Iterator[tuple[object, object, str]]:
    """Yield each item of a tuple with its annotation and its name, such as "sizes[2]"."""
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(values)
    if len(values) != len(kinds):
        raise ValueError(f"{name} ({show(values)}) must have {len(kinds)} items")
    for index, (value, kind) in enumerate(zip(values, kinds, strict=True)):
        yield value, kind, f"{name}[{index}]"


@cache
def _hints(cls: type[object]) -> dict[str, object]:
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cast(typing.Any, cls))
    return {field.name: hints[field.name] for field in fields}


def check_package(name: str, *, extra: str, option: str) -> None:
    """Raise ``ValueError`` if a package is missing; the message names the pip extra to install."""
    if find_spec(name) is None:
        remedy = f"pip install '.[{extra}]' in a checkout of Halley"
        raise ValueError(f"{option} must have the package {name}: {remedy}")


def make_empty_folder(folder: Path) -> None:
    """Create an output folder; ``ValueError`` if it holds files or cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        in_use = any(folder.iterdir())
    except OSError as error:
        raise ValueError(
            f"output ({folder}) must be a folder to write to: {error.strerror}"
        ) from error
    if in_use:
        raise ValueError(f"output ({folder}) must be empty, or not there yet")


def parse_device(device: object, *, types: tuple[str, ...] = ("cpu", "cuda")) -> torch.device:
    """Return a device or a device name as a ``torch.device``; its type must be one of ``types``.

    A name that torch does not know, or a device of another type, is a ``ValueError``.
    """
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError as error:
            rule = f"a device of type {' or '.join(types)}"
            raise ValueError(f"device ({show(device)}) must be {rule}") from error
    if not isinstance(device, torch.device):
        raise ValueError(f"device ({show(device)}) must be a torch.device or its name")
    check_choice(device.type, types, name="device")
    return device


def read_text(path: Path, *, what: str, max_bytes: int) -> str:
    """Return the text of a UTF-8 file of at most ``max_bytes`` bytes.

    ``what``, such as "placement", starts each error message. The null device reads as an
    empty file. Other devices, pipes and sockets can block, and are a ``ValueError``, as is a file
    that is missing, cannot be read, is too large or is not UTF-8.
    """
    try:
        return _read_bytes(path, what=what, max_bytes=max_bytes).decode("utf-8")
    except OSError as error:
        raise ValueError(f"{what} ({path}) must be a readable file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        rule = f"UTF-8 text: the byte at offset {error.start} is not"
        raise ValueError(f"{what} ({path}) must be {rule}") from error


def read_json(path: Path, *, what: str, max_bytes: int) -> object:
    """Return the JSON value in a UTF-8 file of at most ``max_bytes`` bytes."""
    return parse_json(read_text(path, what=what, max_bytes=max_bytes), where=f"{what} ({path})")


def read_json_lines(path: Path, *, what: str, max_bytes: int) -> Iterator[tuple[str, object]]:
    """Yield, for each line of a JSON-lines file, a prefix for error messages and the parsed value.

    A prefix reads "/a/b.jsonl:3 must be a line of profiles:". A missing file has no lines.
    """
    try:
        text = read_text(path, what=what, max_bytes=max_bytes)
    except ValueError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return
        raise
    # ``splitlines`` would also split at U+2028 and others that JSON strings may contain.
    lines = text.removesuffix("\n").split("\n") if text else []
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number} must be a line of {what}:"
        yield where, parse_json(line, where=f"{where} it")


def parse_json(text: str, *, where: str) -> object:
    """Return the value of a JSON text, stricter than ``json.loads``; errors start with ``where``.

    An object with a key twice, a number that is not finite (NaN, Infinity, 1e400), and lists and
    objects nested deeper than ``MAX_DEPTH`` are a ``ValueError``.
    """
    try:
        value: object = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
        if not _is_deeper(value, max_depth=MAX_DEPTH):
            return value
    except RecursionError:
        pass  # the parser met thousands of levels
    except ValueError as error:
        raise ValueError(f"{where} must be JSON: {error}") from error
    raise ValueError(f"{where} must nest lists and objects at most {MAX_DEPTH} deep")


def _read_bytes(path: Path, *, what: str, max_bytes: int) -> bytes:
    try:
        # Without O_NONBLOCK, opening a pipe blocks until another process opens it for writing.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # for example, the path has a null character
        raise ValueError(f"{what} ({str(path)!r}) must be a readable file: {error}") from error
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if os.path.samestat(info, os.stat(os.devnull)):
            return b""
        if not stat.S_ISREG(info.st_mode):
            kind = "Is a directory" if stat.S_ISDIR(info.st_mode) else "Not a regular file"
            raise ValueError(f"{what} ({path}) must be a readable file: {kind}")
        content = file.read(max_bytes + 1)  # not ``st_size``, which is 0 for files of /proc
    if len(content) > max_bytes:
        num_bytes = max(info.st_size, len(content))
        raise ValueError(f"{what} ({path}) must have at most {max_bytes} bytes and has {num_bytes}")
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
    if isinstance(value, dict):
        value = list(cast(dict[str, object], value).values())
    if not isinstance(value, list):
        return False
    children = cast(list[object], value)
    return max_depth == 0 or any(_is_deeper(each, max_depth=max_depth - 1) for each in children)
