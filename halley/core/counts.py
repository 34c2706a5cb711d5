"""Files of expert counts: how many tokens each expert received during training."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from halley.core.field_types import build_record, check_type, show
from halley.core.json_file import check_version, read_json


_VERSION = 1
_MAX_BYTES = 16 * 2**20  # room for 2**20 counts of 15 digits


@dataclass(frozen=True, kw_only=True)
class _CountsFile:
    """The content of a file of ``write_counts``."""

    version: int
    first_step: int
    last_step: int
    counts: object


def write_counts(
    path: Path, counts_ME: Sequence[Sequence[int]], *, first_step: int, last_step: int
) -> None:
    """Write the number of routed slots of each expert of each MoE layer, ``(M, E)``, as JSON.

    Args:
        first_step, last_step: the training steps that were counted, from 1.
    """
    table = {
        "version": _VERSION,
        "first_step": first_step,
        "last_step": last_step,
        "counts": [list(counts_E) for counts_E in counts_ME],
    }
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(json.dumps(table) + "\n", encoding="ascii")
    draft.replace(path)  # atomic: a crash leaves the old file or the new one


def read_counts(path: Path) -> list[list[float]]:
    """Return the counts of each expert of each layer.

    Args:
        path: a file of ``write_counts``, or a JSON list of numbers (one layer) or of lists of
            numbers (one list per layer).

    Raises:
        ValueError: the file is missing or has another form, a count is negative, the layers have
            different numbers of experts, or all counts of a layer are 0.
    """
    where = f"counts ({path})"
    found = read_json(path, what="counts", max_bytes=_MAX_BYTES)
    if isinstance(found, dict):
        table = check_version(cast(object, found), version=_VERSION, where=where)
        rule = f"{where} must be as halley train writes it:"
        found = build_record(_CountsFile, table, where=rule).counts
    layers = cast(list[object], found) if isinstance(found, list) else []
    if layers and not any(isinstance(layer, list) for layer in layers):
        layers = [layers]
    if [] in layers or not all(isinstance(layer, list) for layer in layers):
        layers = []
    if not layers:
        raise ValueError(f"{where} must be numbers of each expert, or lists of them")
    counts_ME = [
        [_check_number(value, where=where) for value in layer]
        for layer in cast(list[list[object]], layers)
    ]
    for index, counts_E in enumerate(counts_ME):
        if len(counts_E) != len(counts_ME[0]):
            raise ValueError(
                f"{where} of layer {index} must have {len(counts_ME[0])} experts, as layer "
                f"0, and have {len(counts_E)}"
            )
        if not sum(counts_E):
            raise ValueError(f"{where} of layer {index} must not all be 0")
    return counts_ME


def _check_number(value: object, *, where: str) -> float:
    try:
        check_type(value, float, name="count")
    except ValueError:
        is_number = False
    else:
        is_number = cast(float, value) >= 0
    if not is_number:
        raise ValueError(f"{where} must be numbers of at least 0, and {show(value)} is none")
    return cast(float, value)
