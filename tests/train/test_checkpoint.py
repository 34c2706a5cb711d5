"""Ranks save checkpoints and find the newest complete one; errors name every kind of damage."""

import json
import os
import resource
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from halley.train import checkpoint
from halley.train.checkpoint import (
    check_writable,
    find_newest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from halley.train.manifest import compute_checksum, read_manifest
from tests.damage import flip_bytes
from tests.hostile.cases import fill, read_cases
from tests.rank_pool import RunRanks
from tests.train.run_case import change_manifest, make_state


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_manifest_lists_all_files(tmp_path: Path):
    notes: dict[str, object] = {"model": {"num_layers": 2, "name": None}}
    path = save_checkpoint(tmp_path, make_state(1), step=3, keep=1, notes=notes)
    table = json.loads((path / "manifest.json").read_text())
    files = {
        file.name: {
            "num_bytes": file.stat().st_size,
            "xxh3_128": xxhash.xxh3_128_hexdigest(file.read_bytes()),
        }
        for file in path.iterdir()
        if file.name != "manifest.json"
    }
    del table["xxh3_128"]
    assert table == {"step": 3, "torch": torch.__version__, "notes": notes, "files": files}
    assert sorted(files) == [".metadata", "__0_0.distcp"]
    manifest = read_manifest(path)
    assert (manifest.step, manifest.notes) == (3, notes)


def test_checksum_of_a_file_of_several_segments(tmp_path: Path):
    segment = 64 << 20
    content = torch.arange(2 * segment + 5, dtype=torch.int64).to(torch.uint8).numpy().tobytes()
    parts = [content[:segment], content[segment : 2 * segment], content[2 * segment :]]
    digests = b"".join(map(xxhash.xxh3_128_digest, parts))
    for text, hashed in ((content, digests), (parts[0], parts[0]), (b"", b"")):
        (tmp_path / "file").write_bytes(text)
        assert compute_checksum(tmp_path / "file") == xxhash.xxh3_128_hexdigest(hashed)


def test_files_have_ordinary_permissions(tmp_path: Path):
    before = os.umask(0o022)
    path = save_checkpoint(tmp_path, make_state(1), step=3, keep=1)
    os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o644}
    assert path.stat().st_mode & 0o777 == 0o755


def test_complete_checkpoints_that_are_too_old_are_deleted(tmp_path: Path):
    (tmp_path / "step-00000005.tmp").mkdir()
    (tmp_path / "step-00000005.tmp" / "part").touch()
    (tmp_path / "notes.txt").touch()
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, make_state(step), step=step, keep=2)
    assert _names(tmp_path) == ["notes.txt", "step-00000020", "step-00000030"]
    # A damaged checkpoint neither counts nor is deleted: a person may still want its tensors.
    (tmp_path / "step-00000030" / "manifest.json").unlink()
    save_checkpoint(tmp_path, make_state(40), step=40, keep=2)
    assert _names(tmp_path)[1:] == ["step-00000020", "step-00000030", "step-00000040"]
    save_checkpoint(tmp_path, make_state(50), step=50, keep=1)
    assert _names(tmp_path)[1:] == ["step-00000030", "step-00000050"]
    # Checkpoints of later steps, from another run, stay.
    save_checkpoint(tmp_path, make_state(45), step=45, keep=1)
    assert _names(tmp_path)[1:] == ["step-00000030", "step-00000045", "step-00000050"]


def test_saving_a_step_again_keeps_the_earlier_one_under_another_name(tmp_path: Path):
    for value in (1, 2, 3):
        path = save_checkpoint(tmp_path, make_state(value), step=10, keep=1)
    assert _names(tmp_path) == [path.name, f"{path.name}.replaced-1", f"{path.name}.replaced-2"]
    state = make_state(0)
    weight = state["model"]["weight"]
    assert load_checkpoint(path, state) == 10
    torch.testing.assert_close(state, make_state(3), rtol=0, atol=0)
    assert weight.tolist() == [[3.0] * 3] * 2  # in place


@pytest.mark.parametrize(
    ("state", "keep", "message"),
    [
        (make_state(1), 0, r"keep \(0\) must be at least 1"),
        (make_state(1), -1, r"keep \(-1\) must be at least 1"),
        ({"optimizer": {"step": 3}}, 1, r"^state\.optimizer\.step \(int\) must be a tensor$"),
    ],
)
def test_wrong_argument_is_an_error(tmp_path: Path, state: dict[str, Any], keep: int, message: str):
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path, state, step=1, keep=keep)
    assert _names(tmp_path) == []


def test_crash_before_the_rename_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = save_checkpoint(tmp_path, make_state(1), step=1, keep=1)

    def crash(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_sync", crash)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, make_state(2), step=2, keep=1)
    assert _names(tmp_path) == ["step-00000001", "step-00000002.tmp"]
    assert find_newest_checkpoint(tmp_path) == path


def test_a_checkpoint_without_checksums_is_still_read(tmp_path: Path):
    path = save_checkpoint(tmp_path, make_state(7), step=2, keep=1)
    table = json.loads((path / "manifest.json").read_text())
    del table["xxh3_128"]  # Halley 0.1 wrote sizes alone
    table["files"] = {name: entry["num_bytes"] for name, entry in table["files"].items()}
    (path / "manifest.json").write_text(json.dumps(table))
    assert find_newest_checkpoint(tmp_path) == path
    state = make_state(0)
    assert load_checkpoint(path, state) == 2
    torch.testing.assert_close(state, make_state(7), rtol=0, atol=0)


def test_no_checkpoint_is_none(tmp_path: Path):
    (tmp_path / "step-00000005.tmp").mkdir()
    assert find_newest_checkpoint(tmp_path) is None
    assert find_newest_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [("router", (2,), "rank 0: .*router"), ("weight", (5, 3), r"\.weight")],
)
def test_checkpoint_of_another_model_is_an_error(
    tmp_path: Path, name: str, size: tuple[int, ...], message: str
):
    path = save_checkpoint(tmp_path, make_state(1), step=1, keep=1)
    with pytest.raises(ValueError, match=rf"must fit the model .*{message}"):
        load_checkpoint(path, {"model": {name: torch.zeros(size)}})


def test_writable_folder_is_left_empty(tmp_path: Path):
    check_writable(tmp_path / "a" / "b")
    assert _names(tmp_path / "a" / "b") == []


def _save_sharded(rank: int, num_ranks: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (num_ranks,))
    experts = DTensor.from_local(torch.full((4, 3), float(rank)), mesh, [Shard(0)])
    path = save_checkpoint(folder, {"experts": experts}, step=5, keep=1)
    assert find_newest_checkpoint(folder) == path  # rank 0 renames before any rank goes on


def _find_damaged(rank: int, num_ranks: int, folder: Path) -> tuple[Path | None, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return find_newest_checkpoint(folder), len(caught)


def test_ranks_agree_and_rank_0_warns(run_ranks: RunRanks, tmp_path: Path):
    run_ranks(_save_sharded, 2, tmp_path)
    newer = tmp_path / "step-00000006"
    shutil.copytree(tmp_path / "step-00000005", newer)
    change_manifest(newer, step=6)
    assert run_ranks(_find_damaged, 2, tmp_path) == [(newer, 0)] * 2
    for name in ("__0_0.distcp", "__1_0.distcp"):  # each file is read by another rank
        flip_bytes(newer / name, num_bytes=4)
        found = [(tmp_path / "step-00000005", 1), (tmp_path / "step-00000005", 0)]
        assert run_ranks(_find_damaged, 2, tmp_path) == found
        flip_bytes(newer / name, num_bytes=4)


def _fail_on_rank_1(rank: int, num_ranks: int, folder: Path) -> str:
    # Rank 1 may write no more than 64 KiB to a file, as on a full disk.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    mesh = init_device_mesh("cpu", (num_ranks,))
    experts = DTensor.from_local(torch.zeros(1, 1 << 16), mesh, [Shard(0)])
    try:
        with pytest.raises(RuntimeError, match="was not written") as caught:
            save_checkpoint(folder, {"experts": experts}, step=2, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(caught.value)


def test_failure_of_one_rank_is_that_of_all_and_keeps_the_checkpoint_before(
    run_ranks: RunRanks, tmp_path: Path
):
    path = save_checkpoint(tmp_path, make_state(1), step=1, keep=1)
    messages = run_ranks(_fail_on_rank_1, 2, tmp_path)
    assert messages[0] == messages[1]
    assert messages[0] == (
        f"checkpoint {tmp_path}/step-00000002 was not written: rank 1: File too large"
    )
    assert _names(tmp_path) == [path.name]
    assert find_newest_checkpoint(tmp_path) == path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_full_disk_is_named_and_leaves_no_half_folder(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        path = save_checkpoint(disk, make_state(1), step=1, keep=1)
        state: dict[str, object] = {"weight": torch.zeros(1 << 19)}
        with pytest.raises(RuntimeError, match="was not written") as caught:
            save_checkpoint(disk, state, step=2, keep=1)
        assert str(caught.value) == (
            f"checkpoint {disk}/step-00000002 was not written: rank 0: No space left on device"
        )
        assert _names(disk) == [path.name]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _unwritable(rank: int, num_ranks: int, folder: Path) -> str:
    with pytest.raises(ValueError, match="must be writable") as caught:
        save_checkpoint(folder, make_state(1), step=1, keep=1)
    return str(caught.value)


def test_unwritable_folder_fails_on_all_ranks(run_ranks: RunRanks, tmp_path: Path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "runs"
    message = f"folder ({folder}) must be writable: Not a directory"
    assert run_ranks(_unwritable, 2, folder) == [message] * 2


def _damage(file: Path, kind: str, value: Any) -> None:
    """Damage a file of a checkpoint as a disk, a stranger or another program would."""
    match kind:
        case "remove":
            file.unlink()
        case "write":
            file.write_bytes(value.encode("latin-1"))
        case "edit":
            file.write_text(file.read_text().replace(*value))
        case "flip":
            flip_bytes(file, num_bytes=value)
        case "link":
            file.rename(file.parents[1] / "elsewhere")
            file.symlink_to(file.parents[1] / "elsewhere")
        case "change":  # with a right checksum
            change_manifest(file.parent, **value)


@pytest.mark.parametrize(("kind", "name", "value", "defect"), read_cases("checkpoints"))
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, kind: str, name: str, value: Any, defect: str
):
    paths = [save_checkpoint(tmp_path, make_state(step), step=step, keep=2) for step in (1, 2)]
    assert find_newest_checkpoint(tmp_path) == paths[1]
    num_bytes = (paths[1] / "__0_0.distcp").stat().st_size
    _damage(paths[1] / name, kind, value)
    words = {"path": str(paths[1]), "num_bytes": str(num_bytes)}
    report = f"checkpoint {paths[1]} is damaged: {fill(defect, words)}"
    with pytest.warns(UserWarning, match="is damaged") as caught:
        assert find_newest_checkpoint(tmp_path) == paths[0]
    assert [str(warning.message) for warning in caught] == [
        f"{report}: the run goes on from {paths[0]}, the newest complete checkpoint"
    ]
    assert caught[0].filename == __file__
    shutil.rmtree(paths[0])
    with pytest.raises(ValueError, match="is damaged") as error:
        find_newest_checkpoint(tmp_path)
    assert str(error.value) == (
        f"{report}; {tmp_path} must hold a complete checkpoint: put back an intact copy, or start "
        "at step 0 with halley train --restart, which keeps these files"
    )
