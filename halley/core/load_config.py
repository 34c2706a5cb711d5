"""From a TOML file and ``key=value`` overrides to a checked RunConfig."""

import dataclasses
import difflib
import tomllib
import types
import typing
from pathlib import Path

from halley.core.config import RunConfig
from halley.core.models import find_model


Table = dict[str, object]
Config = typing.TypeVar("Config")


def load_config(path: Path | None, *, overrides: list[str]) -> RunConfig:
    """Read a run's configuration.

    ``model`` is a table with ``name``, one of ``NAMED_MODELS``, and any of its fields to change;
    a bare name is short for such a table.

    Args:
        path: a TOML file; None for defaults and the tiny model.
        overrides: ``"train.num_steps=100"``; the value is read as TOML, else as a string.

    Raises:
        ValueError: the file is missing or no TOML, a key is unknown (the nearest is named), a
            value has the wrong type or breaks a rule.
    """
    table: Table = {} if path is None else _read_toml(path)
    for text in overrides:
        _apply_override(table, text)
    model = table.setdefault("model", "tiny")
    if isinstance(model, str):
        model = {"name": model}
    if not isinstance(model, dict):
        raise ValueError(f"model ({model!r}) must be a name or a table")
    model = typing.cast(Table, model)
    name = model.get("name", "tiny")
    if not isinstance(name, str):
        raise ValueError(f"model.name ({name!r}) must be a string")
    base = _to_table(find_model(name))
    _merge(base, model, prefix="model.")
    table["model"] = base
    return build(RunConfig, table)


def build(cls: type[Config], table: Table, *, prefix: str = "") -> Config:
    """Make a config dataclass from a table of its fields.

    Raises:
        ValueError: unknown or missing key, wrong type, broken rule.
    """
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(typing.cast(type, cls))}
    for key in table:
        if key not in fields:
            raise ValueError(_unknown_key(prefix + key, [prefix + name for name in fields]))
    values: Table = {}
    for name, field in fields.items():
        if name in table:
            values[name] = _convert(table[name], hints[name], key=prefix + name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{prefix}{name} is required")
    return cls(**values)


def _convert(value: object, kind: object, *, key: str) -> object:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{key} ({value!r}) must be a table")
        return build(kind, typing.cast(Table, value), prefix=f"{key}.")
    if typing.get_origin(kind) is typing.Literal:
        allowed = typing.get_args(kind)
        if value not in allowed:
            choices = ", ".join(repr(choice) for choice in allowed)
            raise ValueError(f"{key} ({value!r}) must be one of {choices}")
        return value
    if isinstance(kind, types.UnionType):  # str | None
        return None if value is None else _convert(value, typing.get_args(kind)[0], key=key)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(kind, type):
        raise TypeError(f"{key} has a type that configurations do not know: {kind}")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{key} ({value!r}) must be of type {kind.__name__}")
    return value


def _read_toml(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config ({path}) must be a readable file: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config ({path}) must be TOML: {error}") from error


def _apply_override(table: Table, text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"--set ({text}) must be KEY=VALUE")
    try:
        parsed: object = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    *parents, last = key.split(".")
    for parent in parents:
        child = table.setdefault(parent, {})
        if isinstance(child, str) and parent == "model":
            child = table[parent] = {"name": child}
        if not isinstance(child, dict):
            raise ValueError(f"--set ({text}) must name a key below a table, {parent} is none")
        table = typing.cast(Table, child)
    if last == "model" and isinstance(table.get(last), dict) and isinstance(parsed, str):
        parsed = {**typing.cast(Table, table[last]), "name": parsed}
    table[last] = parsed


def _to_table(config: object) -> Table:
    return dataclasses.asdict(config)  # type: ignore[call-overload]


def _merge(base: Table, changes: Table, *, prefix: str) -> None:
    for key, value in changes.items():
        if key not in base:
            raise ValueError(_unknown_key(prefix + key, [prefix + name for name in base]))
        old = base[key]
        if isinstance(old, dict) and isinstance(value, dict):
            _merge(typing.cast(Table, old), typing.cast(Table, value), prefix=f"{prefix}{key}.")
        else:
            base[key] = value


def _unknown_key(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.3)
    hint = f", did you mean {near[0]}" if near else ""
    return f"key ({key}) must be one of {', '.join(known)}{hint}"
