"""Check dataclass fields against their annotations, and build dataclasses from parsed tables.

The configuration classes call ``check_fields`` when they are created. ``build`` creates them, and
the records of Halley's JSON files, from a parsed TOML or JSON table.
"""

import dataclasses
import difflib
import math
import types
import typing
from functools import cache

import torch


Table = dict[str, object]
Record = typing.TypeVar("Record")

_MAX_SHOWN = 80  # characters of a wrong value in a message
_NEAR = 2 / 3  # from this difflib ratio, an unknown name counts as a misspelling


def show(value: object) -> str:
    """Return the ``repr`` of a wrong value for a message: one line of at most 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a deep list
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def show_name(value: object) -> str:
    """Return a wrong value as ``show`` does, but a short printable string without quotes."""
    if isinstance(value, str) and value.isprintable() and len(value) <= _MAX_SHOWN:
        return value
    return show(value)


def check_choice(value: object, choices: typing.Iterable[object], *, name: str) -> None:
    """Check that an argument is one of the allowed values.

    Raises:
        ValueError: it is not. An equal value of another type, such as True for 1, is refused too.
    """
    allowed = tuple(choices)
    if not any(type(value) is type(each) and value == each for each in allowed):
        listed = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} ({show(value)}) must be one of {listed}")


def check_fields(record: object, *, prefix: str = "") -> None:
    """Check that each field of a dataclass instance has the type of its annotation.

    An int is accepted for a float. A bool is not accepted for a number.

    Args:
        prefix: prefix of the field names in messages, such as "train.".

    Raises:
        ValueError: a field has another type, has a value that is not in its ``Literal``, or is a
            float that is not finite.
    """
    for name, kind in _hints(type(record)).items():
        check_type(getattr(record, name), kind, name=prefix + name)


def check_type(value: object, kind: object, *, name: str) -> None:
    """Check that a value has the type of an annotation; see ``check_fields``."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        check_choice(value, arguments, name=name)
    elif origin is types.UnionType or origin is typing.Union:  # str | None
        if value is not None:
            check_type(value, arguments[0], name=name)
    elif origin is tuple:
        if not isinstance(value, tuple):
            raise ValueError(f"{name} ({show(value)}) must be of type tuple")
        items = _items(typing.cast(tuple[object, ...], value), arguments, name=name)
        for each, each_kind, each_name in items:
            check_type(each, each_kind, name=each_name)
    elif origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{name} ({show(value)}) must be a table")
        for key, each in typing.cast(Table, value).items():
            check_type(each, arguments[1], name=f"{name}.{show_name(key)}")
    elif kind is not object:  # ``object`` allows any value
        _check_plain(value, typing.cast(type[object], kind), name=name)


def build(cls: type[Record], table: object, *, prefix: str = "") -> Record:
    """Build a dataclass, and the dataclasses inside it, from a table of its fields.

    Args:
        table: usually parsed from TOML or JSON. Lists become tuples, ints floats, and tables
            dataclasses, where the annotations say so.
        prefix: prefix of the field names in messages, such as "model.moe.".

    Raises:
        ValueError: ``table`` is no table, a key is unknown or missing, a value has the wrong type,
            or the class refuses a value.
    """
    if not isinstance(table, dict):
        name = prefix.removesuffix(".") or "value"
        raise ValueError(f"{name} ({show(table)}) must be a table")
    table = typing.cast(Table, table)
    fields = {field.name: field for field in dataclasses.fields(typing.cast(typing.Any, cls))}
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
    """Build a dataclass from a table of a file, as ``build`` does.

    Args:
        where: the start of each message, such as "/a/b.jsonl:3 must be a line of profiles:".
    """
    try:
        return build(cls, table)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from error


def unknown_name(
    name: str, known: typing.Iterable[str], *, prefix: str = "", what: str = "key"
) -> str:
    """Return the message for an unknown name; it suggests a known name with similar spelling.

    Args:
        prefix: prefix of all names in the message, such as "train.". Spelling is compared
            without it.
        what: the kind of name.
    """
    known = list(known)
    is_short = len(name) <= _MAX_SHOWN  # difflib takes quadratic time
    near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR) if is_short else []
    hint = f", did you mean {prefix}{near[0]}" if near else ""
    names = ", ".join(prefix + each for each in known)
    return f"{what} ({show_name(prefix + name)}) must be one of {names}{hint}"


def _convert(value: object, kind: object, *, name: str) -> object:
    """Return a parsed value converted to the type of a field."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return build(typing.cast(type[object], kind), value, prefix=f"{name}.")
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name} ({show(value)}) must be a list")
        items = _items(typing.cast(list[object], value), typing.get_args(kind), name=name)
        return tuple(_convert(each, each_kind, name=where) for each, each_kind, where in items)
    check_type(value, typing.cast(object, kind), name=name)
    return float(typing.cast(float, value)) if kind is float else value


def _items(
    values: typing.Sequence[object], kinds: tuple[object, ...], *, name: str
) -> typing.Iterator[tuple[object, object, str]]:
    """Yield each item with its type and name, for ``tuple[int, ...]`` and ``tuple[int, float]``."""
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(values)
    if len(values) != len(kinds):
        raise ValueError(f"{name} ({show(values)}) must have {len(kinds)} items")
    for index, (value, kind) in enumerate(zip(values, kinds, strict=True)):
        yield value, kind, f"{name}[{index}]"


def _check_plain(value: object, kind: type[object], *, name: str) -> None:
    accepted = (int, float) if kind is float else kind
    is_number = kind in (int, float)
    if not isinstance(value, accepted) or (is_number and isinstance(value, bool)):
        raise ValueError(f"{name} ({show(value)}) must be of type {kind.__name__}")
    if kind is float:
        try:
            is_finite = math.isfinite(typing.cast(float, value))
        except OverflowError:  # an integer beyond the range of floats
            is_finite = False
        if not is_finite:
            raise ValueError(f"{name} ({show(value)}) must be finite")


@cache
def _hints(cls: type[object]) -> dict[str, object]:
    """Return the annotation of each field, by field name."""
    hints = typing.get_type_hints(cls)
    return {
        field.name: hints[field.name] for field in dataclasses.fields(typing.cast(typing.Any, cls))
    }


def parse_device(
    device: object, *, types: tuple[str, ...] = ("cpu", "cuda"), name: str = "device"
) -> torch.device:
    """Return the ``torch.device`` for a device or its name, after a check of its type.

    Args:
        types: allowed device types.
        name: name of the argument in messages.

    Raises:
        ValueError: it is no device or name, torch does not know it, or its type is not allowed.
    """
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError as error:
            rule = f"a device of type {' or '.join(types)}"
            raise ValueError(f"{name} ({show(device)}) must be {rule}") from error
    if not isinstance(device, torch.device):
        raise ValueError(f"{name} ({show(device)}) must be a torch.device or its name")
    check_choice(device.type, types, name=name)
    return device
