"""How many tokens each expert got, as training runs write it and placements are planned from."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast


_VERSION = 1


def write_counts(
    path: Path, counts_ME: Sequence[Sequence[int]], *, first_step: int, last_step: int
) -> None:
    """Write routed slots of each expert of each MoE layer, ``(M, E)``, as JSON.

    Args:
        first_step, last_step: of training, over which they were counted, from 1.
    """
    table = {
        "version": _VERSION,
        "first_step": first_step,
        "last_step": last_step,
        "counts": [list(counts_E) for counts_E in counts_ME],
    }
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(json.dumps(table) + "\n", encoding="ascii")
    draft.replace(path)  # a crash leaves the old counts or the new ones


def read_counts(path: Path) -> list[list[float]]:
    """Return the counts of each expert of each layer.

    Args:
        path: what ``write_counts`` wrote, or JSON of a list of numbers (one layer) or of lists of
            numbers (a list a layer).

    Raises:
        ValueError: the file is missing or of another form, a number is negative or none at all, a
            layer has other experts than the first, or nobody picked any of its experts.
    """
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"counts ({path}) must be a readable file: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"counts ({path}) must be JSON: {error}") from error
    if isinstance(found, dict):
        table = cast(dict[str, object], found)
        if table.get("version") != _VERSION:
            raise ValueError(
                f"counts ({path}) must be of version {_VERSION} and is of {table.get('version')}"
            )
        found = table.get("counts")
    layers = cast(list[object], found) if isinstance(found, list) else []
    if layers and not any(isinstance(layer, list) for layer in layers):
        layers = [layers]
    if not all(isinstance(layer, list) for layer in layers):
        layers = []
    if not layers or [] in layers:
        raise ValueError(f"counts ({path}) must be numbers of each expert, or lists of them")
    counts_ME = [
        [_read_number(value, path=path) for value in layer]
        for layer in cast(list[list[object]], layers)
    ]
    for index, counts_E in enumerate(counts_ME):
        if len(counts_E) != len(counts_ME[0]):
            raise ValueError(
                f"counts ({path}) of layer {index} must have {len(counts_ME[0])} experts, as layer "
                f"0, and have {len(counts_E)}"
            )
        if not sum(counts_E):
            raise ValueError(f"counts ({path}) of layer {index} must not all be 0")
    return counts_ME


def _read_number(value: object, *, path: Path) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return value
    raise ValueError(f"counts ({path}) must be numbers of at least 0, and {value!r} is none")
