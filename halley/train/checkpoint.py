"""Save and load checkpoints of training; a crash during a save damages no earlier checkpoint.

A checkpoint is a folder ``step-00000100`` with files of torch.distributed.checkpoint (DCP) and a
manifest with size and checksum of each file. It is written to ``step-00000100.tmp``, flushed to the
disk and then renamed.
"""

import itertools
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from halley.distributed.peers import on_all_ranks, on_rank_zero, rank_and_size
from halley.train.checkpoint_reader import SafeReader, read_metadata
from halley.train.manifest import (
    Manifest,
    compute_checksum,
    find_defect,
    read_manifest,
    write_manifest,
)


_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED_NAME = re.compile(r"step-\d{8,}\.tmp")
_SHARD_NAME = re.compile(r"__(\d+)_\d+\.distcp")  # a file of DCP: rank that wrote it, then a number

_PROBE = bytes(1 << 20)


def check_writable(folder: Path) -> None:
    """Create a folder if it is missing; ``ValueError`` if files cannot be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"halley")
            file.flush()
    except (OSError, ValueError) as error:  # ValueError if the path has a null character
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"folder ({folder}) must be writable: {reason}") from error


def save_checkpoint(
    folder: Path,
    state: dict[str, object],
    *,
    step: int,
    keep: int,
    notes: Mapping[str, object] | None = None,
) -> Path:
    """Write a checkpoint, return its folder; delete complete ones except the ``keep`` newest.

    If a file or folder with the name of the checkpoint exists, such as a damaged checkpoint, it is
    renamed to ``<name>.replaced-1``.

    Args:
        folder: the folder of one run's checkpoints; all ranks see the same folder.
        state: nested dicts of tensors and DTensors; plain tensors are the same on every rank.
        notes: values for the manifest, of types that JSON has.

    Raises:
        ValueError: an argument is wrong, or the folder cannot be written.
        RuntimeError: writing failed on some rank, as when the disk is full. The unfinished folder
            is removed; earlier checkpoints stay.
    """
    if keep < 1:
        raise ValueError(f"keep ({keep}) must be at least 1")
    _check_tensors(state, prefix="state")
    path = folder / f"step-{step:08d}"
    draft = folder / f"{path.name}.tmp"

    on_rank_zero(lambda: _begin_draft(draft))
    try:
        with _quiet():
            save(state, storage_writer=FileSystemWriter(draft))
        sums_W = on_all_ranks(lambda rank: _checksum_own_files(draft, rank))
        sums = {name: value for share in sums_W for name, value in share.items()}
        on_rank_zero(lambda: write_manifest(draft, step=step, notes=notes or {}, checksums=sums))
    except (CheckpointException, RuntimeError) as error:
        cause = _find_write_error(draft)
        on_rank_zero(lambda: shutil.rmtree(draft, ignore_errors=True))
        cause = cause or (_cause(error) if isinstance(error, CheckpointException) else error)
        raise RuntimeError(f"checkpoint {path} was not written: {cause}") from error
    on_rank_zero(lambda: _publish(draft, path, keep=keep))
    return path


def _begin_draft(draft: Path) -> None:
    folder = draft.parent
    check_writable(folder)
    for other in folder.iterdir():
        if _UNFINISHED_NAME.fullmatch(other.name):
            shutil.rmtree(other)
    draft.mkdir()


def _publish(draft: Path, path: Path, *, keep: int) -> None:
    """Rename folder ``draft`` to ``path``; delete all complete checkpoints but the ``keep`` newest.

    Damaged checkpoints, and checkpoints of later steps, are neither counted nor deleted.
    """
    folder = path.parent
    _sync(draft)
    if os.path.lexists(path):
        path.rename(find_free_name(folder, f"{path.name}.replaced"))
    draft.rename(path)
    _sync(folder)
    older = [each for each in _list_checkpoints(folder) if _step_of(each) <= _step_of(path)]
    for each in [each for each in older if _is_complete(each)][:-keep]:
        shutil.rmtree(each)


def find_newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint's folder; None if no checkpoint is there. Collective.

    Every file is read and compared with its checksum; the ranks divide the files. For newer,
    damaged checkpoints, rank 0 gives one warning. If all are damaged, a ValueError names the
    defect of each.
    """
    defects: list[str] = []
    for path in reversed(on_rank_zero(lambda: _list_checkpoints(folder))):
        defect = _find_defect(path)
        if defect is None:
            if defects and rank_and_size(dist.group.WORLD)[0] == 0:
                warnings.warn(
                    f"{'; '.join(defects)}: the run goes on from {path}, the newest complete "
                    "checkpoint",
                    stacklevel=2,
                )
            return path
        defects.append(f"checkpoint {path} is damaged: {defect}")
    if defects:
        raise ValueError(
            f"{'; '.join(defects)}; {folder} must hold a complete checkpoint: put back an intact "
            "copy, or start at step 0 with halley train --restart, which keeps these files"
        )
    return None


def load_checkpoint(path: Path, state: dict[str, object]) -> int:
    """Read a checkpoint into ``state``, in place, and return its step. Collective.

    ``path`` is a result of ``find_newest_checkpoint``, which has compared the checksums. ``state``
    is as in ``save_checkpoint``; DTensors may be sharded over another mesh. A damaged checkpoint or
    one that does not fit ``state`` raises ValueError; a failed read raises RuntimeError.
    """
    manifest = on_rank_zero(lambda: read_manifest(path))
    with _quiet():
        try:
            load(state, storage_reader=SafeReader(path, manifest.files))
        except CheckpointException as error:
            # DCP's planner raises RuntimeError or ValueError if entries do not match the state.
            misfits = [isinstance(e, RuntimeError | ValueError) for e, _ in error.failures.values()]
            if error.args[0] == "plan" and all(misfits):
                raise ValueError(
                    f"checkpoint ({path}) must fit the model and its optimizer: {_cause(error)}"
                ) from error
            raise RuntimeError(f"checkpoint {path} cannot be read: {_cause(error)}") from error
    return manifest.step


def find_free_name(folder: Path, stem: str) -> Path:
    """Return the path ``<stem>-N`` in ``folder``, with the least N from 1 that is not in use."""
    paths = (folder / f"{stem}-{number}" for number in itertools.count(1))
    return next(path for path in paths if not os.path.lexists(path))


def _find_write_error(folder: Path) -> str:
    """Return the error of the first rank that fails to write a test file, or "". Collective.

    DCP's own errors lack the operating system's reason. The text is "rank R: REASON".
    """

    def write_probe(rank: int) -> None:
        with (folder / f"probe-{rank}").open("wb", buffering=0) as file:
            if file.write(_PROBE) < len(_PROBE):
                file.write(_PROBE)  # after a partial write, the next write raises the error
            os.fsync(file.fileno())

    try:
        on_all_ranks(write_probe)
    except RuntimeError as error:
        return str(error)
    return ""


def _find_defect(path: Path) -> str | None:
    """Check metadata and files of a checkpoint; return one defect in words, or None. Collective."""

    def read() -> Manifest:
        manifest = _read_complete(path)
        read_metadata(path, manifest.files)
        return manifest

    try:
        manifest = on_rank_zero(read)
    except ValueError as error:
        return str(error)
    _, num_ranks = rank_and_size(dist.group.WORLD)
    largest_first = sorted(manifest.files.items(), key=lambda item: -item[1].num_bytes)

    def compare_own(rank: int) -> list[str]:
        found = (find_defect(path, *item) for item in largest_first[rank::num_ranks])
        return [defect for defect in found if defect is not None]

    return min((defect for found in on_all_ranks(compare_own) for defect in found), default=None)


def _read_complete(path: Path) -> Manifest:
    """Return a checkpoint's manifest; ``ValueError`` if a file is missing or has a wrong size."""
    manifest = read_manifest(path)
    for name, record in manifest.files.items():
        if defect := find_defect(path, name, record, by_size=True):
            raise ValueError(defect)
    return manifest


def _list_checkpoints(folder: Path) -> list[Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _checksum_own_files(folder: Path, rank: int) -> dict[str, str]:
    def is_own(path: Path) -> bool:
        shard = _SHARD_NAME.fullmatch(path.name)
        return rank == (int(shard[1]) if shard else 0)

    return {path.name: compute_checksum(path) for path in folder.iterdir() if is_own(path)}


def _is_complete(path: Path) -> bool:
    try:
        _read_complete(path)
    except ValueError:
        return False
    return not path.is_symlink()


def _check_tensors(state: Mapping[str, object], *, prefix: str) -> None:
    for name, value in state.items():
        if isinstance(value, Mapping):
            _check_tensors(cast(Mapping[str, object], value), prefix=f"{prefix}.{name}")
        elif not isinstance(value, torch.Tensor):
            raise ValueError(f"{prefix}.{name} ({type(value).__name__}) must be a tensor")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"rank {rank}: {type(cause).__name__}: {cause}"


@contextmanager
def _quiet() -> Iterator[None]:
    """In the block, silence DCP's warning that a process without a group saves and loads alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
        yield
