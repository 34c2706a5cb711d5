"""Damage files as a disk or an attacker would, and detect changes of a folder."""

import hashlib
import os
import pickle
from collections.abc import Collection
from pathlib import Path


class MakesFile:
    """Creates a folder when it is unpickled, as a harmless substitute of a harmful pickle."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.marker),)


def pickle_bomb(marker: Path, *, protocol: int | None = None) -> bytes:
    """Return a pickle that creates the folder ``marker`` in a process that unpickles it."""
    return pickle.dumps(MakesFile(marker), protocol=protocol)


def flip_bytes(path: Path, *, num_bytes: int) -> None:
    """Invert all bits of some bytes in the middle of a file."""
    content = bytearray(path.read_bytes())
    start = max(0, (len(content) - num_bytes) // 2)
    for place in range(start, min(len(content), start + num_bytes)):
        content[place] ^= 0xFF
    path.write_bytes(content)


def hash_tree(folder: Path, *, leave_out: Collection[str] = ()) -> dict[str, str]:
    """Return a hash of each file below a folder by its relative path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in leave_out
    }
