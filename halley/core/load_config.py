"""Build a checked RunConfig from a TOML file and ``key=value`` overrides."""

import dataclasses
import tomllib
from pathlib import Path
from typing import cast

from halley.core.config import RunConfig
from halley.core.field_types import Table, build, show, show_name, unknown_name
from halley.core.json_file import read_text
from halley.core.models import find_model


_MAX_BYTES = 2**16  # configurations have at most some thousand bytes
_MAX_DOTS = 200  # on a line; tomllib takes quadratic time in the parts of a key


def load_config(path: Path | None, *, overrides: list[str]) -> RunConfig:
    """Read the configuration of a run.

    ``model`` is a table with ``name``, one of ``NAMED_MODELS``, and any fields to change. A string
    is short for a table with that name.

    Args:
        path: a TOML file; None for defaults and the tiny model.
        overrides: texts such as ``"train.num_steps=100"``. A value that is not TOML is a string.

    Raises:
        ValueError: the file is missing or not TOML, a key is unknown (the message suggests a
            similar one), a value has the wrong type or breaks a rule.
    """
    table: Table = {} if path is None else _read_toml(path)
    for text in overrides:
        _apply_override(table, text)
    model = table.setdefault("model", "tiny")
    if isinstance(model, str):
        model = {"name": model}
    if not isinstance(model, dict):
        raise ValueError(f"model ({show(model)}) must be a name or a table")
    model = cast(Table, model)
    name = model.get("name", "tiny")
    if not isinstance(name, str):
        raise ValueError(f"model.name ({show(name)}) must be of type str")
    base: Table = dataclasses.asdict(find_model(name))
    _merge(base, model, prefix="model.")
    table["model"] = base
    return build(RunConfig, table)


def _read_toml(path: Path) -> Table:
    text = read_text(path, what="config", max_bytes=_MAX_BYTES)
    if any(line.count(".") > _MAX_DOTS for line in text.splitlines()):
        raise ValueError(f"config ({path}) must have at most {_MAX_DOTS} dots on a line")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(f"config ({path}) must be TOML with fewer nested lists") from error
    except ValueError as error:
        raise ValueError(f"config ({path}) must be TOML: {error}") from error


def _apply_override(table: Table, text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"--set ({show_name(text)}) must be KEY=VALUE")
    parsed = _parse_value(value)
    *parents, last = key.split(".")
    for parent in parents:
        child = table.setdefault(parent, {})
        if isinstance(child, str) and parent == "model":
            child = table[parent] = {"name": child}
        if not isinstance(child, dict):
            raise ValueError(
                f"--set ({show_name(text)}) must name a key below a table, "
                f"{show_name(parent)} is none"
            )
        table = cast(Table, child)
    if last == "model" and isinstance(table.get(last), dict) and isinstance(parsed, str):
        parsed = {**cast(Table, table[last]), "name": parsed}
    table[last] = parsed


def _parse_value(text: str) -> object:
    """Return the parsed TOML value, or the text itself if it is not a TOML value."""
    if text.count(".") > _MAX_DOTS:
        return text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text  # several lines are more than a value


def _merge(base: Table, changes: Table, *, prefix: str) -> None:
    for key, value in changes.items():
        if key not in base:
            raise ValueError(unknown_name(key, base, prefix=prefix))
        old = base[key]
        if isinstance(old, dict) and isinstance(value, dict):
            _merge(cast(Table, old), cast(Table, value), prefix=f"{prefix}{key}.")
        else:
            base[key] = value
