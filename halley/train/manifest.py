"""The manifest of a checkpoint: its step, notes, and the size and checksum of each file."""

import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import xxhash

from halley.core.validation import read_json


MANIFEST_FILE = "manifest.json"
_MAX_MANIFEST_BYTES = 64 << 20
_SEGMENT_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_NUM_THREADS = 8
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,200}")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and checksum of a checkpoint file; the checksum is None if Halley 0.1 wrote the file."""

    num_bytes: int
    checksum: str | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of a checkpoint's manifest: steps done, notes of the run, file records by name."""

    step: int
    notes: dict[str, Any]
    files: dict[str, FileRecord]


def write_manifest(
    folder: Path, *, step: int, notes: Mapping[str, object], checksums: Mapping[str, str]
) -> None:
    """Write a checkpoint's manifest, with size and checksum of each file; flush it to the disk."""
    files = {
        name: {"num_bytes": (folder / name).stat().st_size, "xxh3_128": checksum}
        for name, checksum in sorted(checksums.items())
    }
    content = {"step": step, "torch": torch.__version__, "notes": dict(notes), "files": files}
    content["xxh3_128"] = _checksum_of_json(content)
    with (folder / MANIFEST_FILE).open("w", encoding="ascii") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest; ``ValueError`` if missing, damaged or of a wrong step."""
    path = folder / MANIFEST_FILE
    if not os.path.lexists(path):
        raise ValueError(f"{MANIFEST_FILE} is missing")
    if path.is_symlink():
        raise ValueError(f"{MANIFEST_FILE} is a link")
    try:
        table = read_json(path, what="the manifest", max_bytes=_MAX_MANIFEST_BYTES)
        manifest = _parse(table)
    except ValueError as error:
        raise ValueError(f"{MANIFEST_FILE} is damaged: {error}") from error
    if manifest.step != int(folder.name.removeprefix("step-")):
        raise ValueError(f"its manifest is of step {manifest.step}")
    return manifest


def find_defect(
    folder: Path, name: str, record: FileRecord, *, by_size: bool = False
) -> str | None:
    """Return in words how a checkpoint file differs from its record, or None if it does not."""
    path = folder / name
    if path.is_symlink() or not path.is_file():
        return f"{name} is missing"
    num_bytes = path.stat().st_size
    if num_bytes != record.num_bytes:
        return f"{name} has {num_bytes} bytes instead of {record.num_bytes}"
    try:
        if not by_size and record.checksum not in (None, compute_checksum(path)):
            return f"{name} is damaged: its checksum is not that of {MANIFEST_FILE}"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None


def compute_checksum(path: Path) -> str:
    """Return a file's XXH3-128 in hex; above 64 MiB, the XXH3-128 of its 64 MiB segments' digests.

    XXH3 detects accidental damage at memory speed; it does not protect from forgery.
    """
    starts = range(0, max(1, path.stat().st_size), _SEGMENT_BYTES)
    if len(starts) == 1:
        return _digest_segment(path, 0).hex()
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        digests = threads.map(partial(_digest_segment, path), starts)
        return xxhash.xxh3_128_hexdigest(b"".join(digests))


def _digest_segment(path: Path, start: int) -> bytes:
    # Read by ``readinto``: a memory map raises SIGBUS if the file is truncated meanwhile.
    block = memoryview(bytearray(_BLOCK_BYTES))
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        for _ in range(_SEGMENT_BYTES // _BLOCK_BYTES):
            num_bytes = file.readinto(block)
            digest.update(block[:num_bytes])
    return digest.digest()


def _parse(value: object) -> Manifest:
    if not isinstance(value, dict):
        raise ValueError("it must be an object")
    table = cast(dict[str, Any], value)
    checksum = table.pop("xxh3_128", None)
    # Manifests of Halley 0.1 have no checksum of their own content.
    if checksum is not None and checksum != _checksum_of_json(table):
        raise ValueError("its content does not have its checksum")
    step, notes, files = table.get("step"), table.get("notes", {}), table.get("files")
    if type(step) is not int or step < 0:
        raise ValueError(f"step ({step!r}) must be an integer of at least 0")
    if not isinstance(notes, dict):
        raise ValueError("notes must be an object")
    if not isinstance(files, dict) or not files:
        raise ValueError("files must be an object with at least one file")
    records = {
        name: _parse_record(name, entry) for name, entry in cast(dict[str, object], files).items()
    }
    return Manifest(step=step, notes=cast(dict[str, Any], notes), files=records)


def _parse_record(name: str, entry: object) -> FileRecord:
    if not _PLAIN_NAME.fullmatch(name) or name in (".", "..", MANIFEST_FILE):
        raise ValueError(f"the file name {name!r} must be a plain name inside the folder")
    num_bytes, checksum = entry, None
    if isinstance(entry, dict):
        fields = cast(dict[str, object], entry)
        num_bytes, checksum = fields.get("num_bytes"), fields.get("xxh3_128")
        if not isinstance(checksum, str):
            raise ValueError(f"the checksum of {name} must be a string")
    if type(num_bytes) is not int or num_bytes < 0:
        raise ValueError(f"the size of {name} ({num_bytes!r}) must be an integer of at least 0")
    return FileRecord(num_bytes=num_bytes, checksum=checksum)


def _checksum_of_json(table: Mapping[str, object]) -> str:
    text = json.dumps(table, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode("ascii"))
