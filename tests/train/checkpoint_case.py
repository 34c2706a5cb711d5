"""A small state for checkpoints, and changes of a manifest that keep its checksum right."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash


def make_state(value: int) -> dict[str, Any]:
    """Return nested tensors that differ by ``value``."""
    return {
        "model": {"weight": torch.full((2, 3), float(value))},
        "optimizer": {"moments": {"0": torch.full((3,), value + 0.5)}},
        "step": torch.tensor(value),
    }


def change_manifest(**changes: object) -> Callable[[Path], None]:
    """Return the damage that changes fields of a manifest and gives it a right checksum again."""

    def change(path: Path) -> None:
        table = json.loads((path / "manifest.json").read_text()) | changes
        del table["xxh3_128"]
        text = json.dumps(table, sort_keys=True, separators=(",", ":"))
        table["xxh3_128"] = xxhash.xxh3_128_hexdigest(text.encode())
        (path / "manifest.json").write_text(json.dumps(table))

    return change
