"""Checkpoints: saved on some ranks and loaded on others, torn ones told from whole ones."""

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
    read_checkpoint_manifest,
    save_checkpoint,
)
from halley.train.manifest import compute_checksum
from tests.damage import flip_bytes
from tests.rank_pool import RunRanks
from tests.train.checkpoint_case import change_manifest, make_state


NUM_EXPERTS = 8


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_process_loads_what_it_saved(tmp_path: Path):
    path = save_checkpoint(tmp_path / "runs", make_state(7), step=100, keep=1)
    assert path == tmp_path / "runs" / "step-00000100"
    state = make_state(0)
    weight = state["model"]["weight"]
    assert load_checkpoint(path, state) == 100
    torch.testing.assert_close(state, make_state(7), rtol=0, atol=0)
    assert weight.tolist() == [[7.0] * 3] * 2  # in place


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
    manifest = read_checkpoint_manifest(path)
    assert (manifest.step, manifest.notes) == (3, notes)


def test_checksum_of_a_file_of_several_segments(tmp_path: Path):
    segment = 64 << 20
    content = torch.arange(2 * segment + 5, dtype=torch.int64).to(torch.uint8).numpy().tobytes()
    (tmp_path / "file").write_bytes(content)
    parts = [content[:segment], content[segment : 2 * segment], content[2 * segment :]]
    want = xxhash.xxh3_128_hexdigest(b"".join(map(xxhash.xxh3_128_digest, parts)))
    assert compute_checksum(tmp_path / "file") == want
    (tmp_path / "file").write_bytes(content[:segment])
    assert compute_checksum(tmp_path / "file") == xxhash.xxh3_128_hexdigest(content[:segment])
    (tmp_path / "file").write_bytes(b"")
    assert compute_checksum(tmp_path / "file") == xxhash.xxh3_128_hexdigest(b"")


def test_files_have_ordinary_permissions(tmp_path: Path):
    before = os.umask(0o022)
    try:
        path = save_checkpoint(tmp_path, make_state(1), step=3, keep=1)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o644}
    assert path.stat().st_mode & 0o777 == 0o755


def test_old_checkpoints_and_remains_are_deleted(tmp_path: Path):
    (tmp_path / "step-00000005.tmp").mkdir()
    (tmp_path / "step-00000005.tmp" / "part").touch()
    (tmp_path / "notes.txt").touch()
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, make_state(step), step=step, keep=2)
    assert _names(tmp_path) == ["notes.txt", "step-00000020", "step-00000030"]


def test_torn_checkpoints_do_not_count_as_kept(tmp_path: Path):
    for step in (10, 20):
        save_checkpoint(tmp_path, make_state(step), step=step, keep=2)
    (tmp_path / "step-00000020" / "manifest.json").unlink()
    save_checkpoint(tmp_path, make_state(30), step=30, keep=2)
    assert _names(tmp_path) == ["step-00000010", "step-00000020", "step-00000030"]
    # A damaged one is not deleted either: a person may still want something from it.
    save_checkpoint(tmp_path, make_state(40), step=40, keep=1)
    assert _names(tmp_path) == ["step-00000020", "step-00000040"]


def test_saving_a_step_again_keeps_the_earlier_one_under_another_name(tmp_path: Path):
    for value in (1, 2, 3):
        path = save_checkpoint(tmp_path, make_state(value), step=10, keep=1)
    assert _names(tmp_path) == [path.name, f"{path.name}.replaced-1", f"{path.name}.replaced-2"]
    state = make_state(0)
    load_checkpoint(path, state)
    torch.testing.assert_close(state, make_state(3), rtol=0, atol=0)


def test_newer_checkpoints_of_another_run_stay(tmp_path: Path):
    for step in (30, 10):
        save_checkpoint(tmp_path, make_state(step), step=step, keep=1)
    assert _names(tmp_path) == ["step-00000010", "step-00000030"]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_an_error(tmp_path: Path, keep: int):
    with pytest.raises(ValueError, match=rf"keep \({keep}\) must be at least 1"):
        save_checkpoint(tmp_path, make_state(1), step=1, keep=keep)


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
    del table["xxh3_128"]  # version 0.1 wrote sizes alone
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


def test_entry_that_was_not_saved_is_an_error(tmp_path: Path):
    path = save_checkpoint(tmp_path, make_state(1), step=1, keep=1)
    with pytest.raises(ValueError, match=r"must fit the model .* rank 0: .*router"):
        load_checkpoint(path, {"model": {"router": torch.zeros(2)}})


def test_other_shape_is_an_error(tmp_path: Path):
    path = save_checkpoint(tmp_path, make_state(1), step=1, keep=1)
    with pytest.raises(ValueError, match=r"must fit the model .*model\.weight"):
        load_checkpoint(path, {"model": {"weight": torch.zeros(5, 3)}})


def test_only_tensors_are_saved(tmp_path: Path):
    with pytest.raises(ValueError, match=r"^state\.optimizer\.step \(int\) must be a tensor$"):
        save_checkpoint(tmp_path, {"optimizer": {"step": 3}}, step=1, keep=1)
    assert _names(tmp_path) == []


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "runs"
    message = rf"folder \({folder}\) must be writable: Not a directory"
    with pytest.raises(ValueError, match=message):
        check_writable(folder)
    with pytest.raises(ValueError, match=message):
        save_checkpoint(folder, make_state(1), step=1, keep=1)


def test_writable_folder_is_left_empty(tmp_path: Path):
    check_writable(tmp_path / "a" / "b")
    assert _names(tmp_path / "a" / "b") == []


def _sharded_state(num_ranks: int, ep_size: int, *, scale: float) -> dict[str, Any]:
    """Return a state whose experts are sharded over ``ep_size`` ranks and copied over the rest."""
    mesh = init_device_mesh("cpu", (num_ranks // ep_size, ep_size), mesh_dim_names=("dp", "ep"))
    num_local = NUM_EXPERTS // ep_size
    first = mesh.get_local_rank("ep") * num_local
    rows = torch.arange(first, first + num_local, dtype=torch.float32)[:, None] * 10
    local = (rows + torch.arange(3)) * scale
    return {
        "model": {
            "experts": DTensor.from_local(local, mesh["ep"], [Shard(0)]),
            "router": torch.arange(4.0) * scale,
        },
    }


def _save_sharded(rank: int, num_ranks: int, folder: Path, ep_size: int) -> Path:
    path = save_checkpoint(folder, _sharded_state(num_ranks, ep_size, scale=1.0), step=5, keep=1)
    assert find_newest_checkpoint(folder) == path  # renamed before any rank goes on
    return path


def _load_sharded(rank: int, num_ranks: int, folder: Path, ep_size: int) -> Path | None:
    path = find_newest_checkpoint(folder)
    assert path is not None
    state = _sharded_state(num_ranks, ep_size, scale=0.0)
    expected = _sharded_state(num_ranks, ep_size, scale=1.0)
    assert load_checkpoint(path, state) == 5
    assert torch.equal(state["model"]["router"], expected["model"]["router"])
    local = state["model"]["experts"].to_local()
    assert torch.equal(local, expected["model"]["experts"].to_local())
    return path


@pytest.mark.parametrize(("num_ranks", "ep_size"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_experts_move_between_numbers_of_ranks(
    run_ranks: RunRanks, tmp_path: Path, num_ranks: int, ep_size: int
):
    paths = run_ranks(_save_sharded, 2, tmp_path, 2)
    assert paths == [tmp_path / "step-00000005"] * 2
    assert run_ranks(_load_sharded, num_ranks, tmp_path, ep_size) == paths[:1] * num_ranks


def test_experts_of_many_ranks_load_in_one_process(run_ranks: RunRanks, tmp_path: Path):
    (path, _) = run_ranks(_save_sharded, 2, tmp_path, 2)
    state: dict[str, Any] = {"model": {"experts": torch.zeros(NUM_EXPERTS, 3)}}
    assert load_checkpoint(path, state) == 5
    rows = torch.arange(float(NUM_EXPERTS))[:, None] * 10 + torch.arange(3)
    assert torch.equal(state["model"]["experts"], rows)


def _find_damaged(rank: int, num_ranks: int, folder: Path) -> tuple[Path | None, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return find_newest_checkpoint(folder), len(caught)


def test_ranks_agree_and_rank_0_warns(run_ranks: RunRanks, tmp_path: Path):
    run_ranks(_save_sharded, 2, tmp_path, 2)
    newer = tmp_path / "step-00000006"
    shutil.copytree(tmp_path / "step-00000005", newer)
    change_manifest(step=6)(newer)
    assert run_ranks(_find_damaged, 2, tmp_path) == [(newer, 0)] * 2
    for name in ("__0_0.distcp", "__1_0.distcp"):  # each read by another rank
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
    messages = run_ranks(_unwritable, 2, tmp_path / "file")
    assert messages[0] == messages[1]
