"""Checkpoints that are whole or not there: written aside, listed in a manifest, then renamed.

A checkpoint is a folder ``step-00000100`` of torch.distributed.checkpoint files. Its
``manifest.json`` lists every file with its size, so that a copy cut short is told from a whole one,
and has notes of the run.
"""

import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


_MANIFEST = "manifest.json"
_WHOLE_NAME = re.compile(r"step-(\d{8,})")
_TORN_NAME = re.compile(r"step-\d{8,}\.tmp")

T = TypeVar("T")


def check_writable(folder: Path) -> None:
    """Make the folder and write to it, so that a run fails at its start and not at its first save.

    Raises:
        ValueError: the folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"halley")
            file.flush()
    except OSError as error:
        raise ValueError(
            f"folder ({folder}) must be writable: {error.strerror or error}"
        ) from error


def save_checkpoint(
    folder: Path,
    state: dict[str, object],
    *,
    step: int,
    keep: int,
    notes: dict[str, object] | None = None,
) -> Path:
    """Write a checkpoint, then delete those that are too old. Collective.

    A crash at any moment leaves the checkpoints before this one as they are.

    Args:
        folder: holds the checkpoints of one run; all ranks see the same folder.
        state: nested dict of tensors, DTensors and plain numbers; what is not a DTensor is the
            same on every rank.
        step: training steps done.
        keep: whole checkpoints to keep, this one counted, at least 1.
        notes: for the manifest, what JSON can hold.

    Returns:
        The folder of this checkpoint.

    Raises:
        ValueError: ``keep`` is too small, or the folder cannot be written to.
        RuntimeError: writing failed on some rank, as when the disk is full.
    """
    if keep < 1:
        raise ValueError(f"keep ({keep}) must be at least 1")
    path = folder / f"step-{step:08d}"
    torn = folder / f"{path.name}.tmp"

    def prepare() -> None:
        check_writable(folder)
        for other in folder.iterdir():
            if _TORN_NAME.fullmatch(other.name):
                shutil.rmtree(other)
        torn.mkdir()

    def publish() -> None:
        _write_manifest(torn, step=step, notes=notes or {})
        if path.exists():
            shutil.rmtree(path)
        torn.rename(path)
        _sync(folder)
        _delete_old(folder, step=step, keep=keep)

    _on_rank_zero(prepare)
    with _quiet_without_group():
        try:
            save(state, storage_writer=FileSystemWriter(torn))
        except CheckpointException as error:
            raise RuntimeError(f"checkpoint {path} was not written: {_cause(error)}") from error
    _on_rank_zero(publish)
    return path


def find_newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint, the same on every rank, or None. Collective.

    Checkpoints that are torn are passed over with a warning that says what is wrong with them.
    """
    return _on_rank_zero(lambda: _find_newest(folder))


def read_manifest(path: Path) -> dict:
    """Return the manifest of a checkpoint, the same on every rank. Collective.

    Raises:
        ValueError: the checkpoint is torn.
    """

    def read() -> dict:
        if defect := _defect(path):
            raise ValueError(f"checkpoint ({path}) must be whole: {defect}")
        return _read_manifest(path)

    return _on_rank_zero(read)


def load_checkpoint(path: Path, state: dict[str, object]) -> int:
    """Read a checkpoint into ``state``, in place, and return its step. Collective.

    Args:
        path: as ``find_newest_checkpoint`` returned it.
        state: laid out as when it was saved, though DTensors may be sharded over other meshes;
            tensors are copied into, numbers replaced.

    Raises:
        ValueError: the checkpoint is torn, or lacks entries or shapes of the state.
        RuntimeError: reading failed on some rank.
    """
    step = read_manifest(path)["step"]
    with _quiet_without_group():
        try:
            load(state, storage_reader=FileSystemReader(path))
        except CheckpointException as error:
            if _is_misfit(error):
                raise ValueError(
                    f"checkpoint ({path}) must fit the model and its optimizer: {_cause(error)}"
                ) from error
            raise RuntimeError(f"checkpoint {path} cannot be read: {_cause(error)}") from error
    return step


def _on_rank_zero(action: Callable[[], T]) -> T:
    """Do something on rank 0 alone; its result, or its error, becomes that of every rank."""
    outcome: list[object] = [None, None]
    distributed = dist.is_initialized()
    if not distributed or dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    if distributed:
        dist.broadcast_object_list(outcome, src=0)
    result, error = outcome
    if isinstance(error, OSError):
        raise RuntimeError(f"the checkpoint folder failed: {error}") from error
    if isinstance(error, Exception):
        raise error
    return cast(T, result)


def _find_newest(folder: Path) -> Path | None:
    for path in reversed(_checkpoints(folder)):
        defect = _defect(path)
        if defect is None:
            return path
        warnings.warn(f"checkpoint {path} is passed over: {defect}", stacklevel=5)
    return None


def _checkpoints(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _WHOLE_NAME.fullmatch(path.name)]
    return sorted(paths, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _defect(path: Path) -> str | None:
    try:
        sizes = dict(_read_manifest(path)["files"])
    except ValueError as error:
        return str(error)
    for name, num_bytes in sizes.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != num_bytes:
            return f"{name} has {file.stat().st_size} bytes and not {num_bytes}"
    return None


def _read_manifest(path: Path) -> dict:
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
    except FileNotFoundError:
        raise ValueError(f"it has no {_MANIFEST}") from None
    except ValueError as error:
        raise ValueError(f"its {_MANIFEST} is damaged: {error}") from error
    if not (isinstance(manifest, dict) and {"step", "files"} <= manifest.keys()):
        raise ValueError(f"its {_MANIFEST} is damaged: it names no step and files")
    return {"notes": {}, **manifest}  # older ones have none


def _write_manifest(path: Path, *, step: int, notes: dict[str, object]) -> None:
    files = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
    manifest = {"step": step, "torch": torch.__version__, "notes": notes, "files": files}
    with (path / _MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _sync(path)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete_old(folder: Path, *, step: int, keep: int) -> None:
    older = [path for path in _checkpoints(folder) if _step_of(path) <= step]
    whole = [path for path in older if _defect(path) is None]
    for path in older[: older.index(whole[-keep:][0])]:
        shutil.rmtree(path)


def _is_misfit(error: CheckpointException) -> bool:
    # The planner raises these for entries that differ; metadata that is damaged raises others.
    causes = [cause for cause, _ in error.failures.values()]
    return error.args[0] == "plan" and all(isinstance(c, RuntimeError | ValueError) for c in causes)


def _cause(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"rank {rank}: {type(cause).__name__}: {cause}"


@contextmanager
def _quiet_without_group() -> Iterator[None]:
    """Hide that torch.distributed.checkpoint takes one process without a group for a mistake."""
    with warnings.catch_warnings():
        if not dist.is_initialized():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
        yield
