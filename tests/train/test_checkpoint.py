"""Checkpoints: saved on some ranks and loaded on others, torn ones told from whole ones."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from halley.train import checkpoint
from halley.train.checkpoint import (
    check_writable,
    find_newest_checkpoint,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
)
from tests.rank_pool import RunRanks


NUM_EXPERTS = 8


def _state(value: int) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((2, 3), float(value))},
        "optimizer": {"moments": [torch.full((3,), value + 0.5)], "num_steps": value},
        "step": value,
    }


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_process_loads_what_it_saved(tmp_path: Path):
    path = save_checkpoint(tmp_path / "runs", _state(7), step=100, keep=1)
    assert path == tmp_path / "runs" / "step-00000100"
    state = _state(0)
    weight = state["model"]["weight"]
    assert load_checkpoint(path, state) == 100
    torch.testing.assert_close(state, _state(7), rtol=0, atol=0)
    assert weight.tolist() == [[7.0] * 3] * 2  # in place


def test_manifest_lists_all_files(tmp_path: Path):
    notes: dict[str, object] = {"model": {"num_layers": 2, "name": None}}
    path = save_checkpoint(tmp_path, _state(1), step=3, keep=1, notes=notes)
    manifest = json.loads((path / "manifest.json").read_text())
    files = {file.name: file.stat().st_size for file in path.iterdir()}
    del files["manifest.json"]
    want = {"step": 3, "torch": torch.__version__, "notes": notes, "files": files}
    assert manifest == read_manifest(path) == want
    assert len(files) == 2


def test_old_checkpoints_and_remains_are_deleted(tmp_path: Path):
    (tmp_path / "step-00000005.tmp").mkdir()
    (tmp_path / "step-00000005.tmp" / "part").touch()
    (tmp_path / "notes.txt").touch()
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, _state(step), step=step, keep=2)
    assert _names(tmp_path) == ["notes.txt", "step-00000020", "step-00000030"]


def test_torn_checkpoints_do_not_count_as_kept(tmp_path: Path):
    for step in (10, 20):
        save_checkpoint(tmp_path, _state(step), step=step, keep=2)
    (tmp_path / "step-00000020" / "manifest.json").unlink()
    save_checkpoint(tmp_path, _state(30), step=30, keep=2)
    assert _names(tmp_path) == ["step-00000010", "step-00000020", "step-00000030"]


def test_saving_a_step_again_replaces_it(tmp_path: Path):
    for value in (1, 2):
        path = save_checkpoint(tmp_path, _state(value), step=10, keep=1)
    state = _state(0)
    load_checkpoint(path, state)
    torch.testing.assert_close(state, _state(2), rtol=0, atol=0)


def test_newer_checkpoints_of_another_run_stay(tmp_path: Path):
    for step in (30, 10):
        save_checkpoint(tmp_path, _state(step), step=step, keep=1)
    assert _names(tmp_path) == ["step-00000010", "step-00000030"]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_an_error(tmp_path: Path, keep: int):
    with pytest.raises(ValueError, match=rf"keep \({keep}\) must be at least 1"):
        save_checkpoint(tmp_path, _state(1), step=1, keep=keep)


def test_crash_before_the_rename_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = save_checkpoint(tmp_path, _state(1), step=1, keep=1)

    def crash(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_sync", crash)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, _state(2), step=2, keep=1)
    assert _names(tmp_path) == ["step-00000001", "step-00000002.tmp"]
    assert find_newest_checkpoint(tmp_path) == path


def _remove_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def _damage_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"step": 2')


def _misname_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('["step"]')


def _remove_file(path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def _cut_file(path: Path) -> None:
    (path / "__0_0.distcp").write_bytes(b"123")


TEARS = [
    (_remove_manifest, "it has no manifest.json"),
    (_damage_manifest, "its manifest.json is damaged: "),
    (_misname_manifest, "its manifest.json is damaged: it names no step and files"),
    (_remove_file, "__0_0.distcp is missing"),
    (_cut_file, r"__0_0.distcp has 3 bytes and not \d+"),
]


@pytest.mark.parametrize(("tear", "reason"), TEARS)
def test_torn_checkpoint_is_passed_over(tmp_path: Path, tear: Callable[[Path], None], reason: str):
    paths = [save_checkpoint(tmp_path, _state(step), step=step, keep=2) for step in (1, 2)]
    assert find_newest_checkpoint(tmp_path) == paths[1]
    tear(paths[1])
    message = rf"checkpoint .*/step-00000002 is passed over: {reason}"
    with pytest.warns(UserWarning, match=message) as caught:
        assert find_newest_checkpoint(tmp_path) == paths[0]
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(ValueError, match=rf"checkpoint \(.*\) must be whole: {reason}"):
        load_checkpoint(paths[1], _state(0))


def test_no_checkpoint_is_none(tmp_path: Path):
    (tmp_path / "step-00000005.tmp").mkdir()
    assert find_newest_checkpoint(tmp_path) is None
    assert find_newest_checkpoint(tmp_path / "nowhere") is None


def test_entry_that_was_not_saved_is_an_error(tmp_path: Path):
    path = save_checkpoint(tmp_path, _state(1), step=1, keep=1)
    with pytest.raises(ValueError, match=r"must fit the model .* rank 0: .*router"):
        load_checkpoint(path, {"model": {"router": torch.zeros(2)}})


def test_other_shape_is_an_error(tmp_path: Path):
    path = save_checkpoint(tmp_path, _state(1), step=1, keep=1)
    with pytest.raises(ValueError, match=r"must fit the model .*model\.weight"):
        load_checkpoint(path, {"model": {"weight": torch.zeros(5, 3)}})


def test_damaged_data_is_no_misfit(tmp_path: Path):
    path = save_checkpoint(tmp_path, _state(1), step=1, keep=1)
    for name in (".metadata", "__0_0.distcp"):
        copy = tmp_path / "copy" / path.name
        shutil.copytree(path, copy)
        num_bytes = (copy / name).stat().st_size
        (copy / name).write_bytes(b"x" * num_bytes)
        with pytest.raises(RuntimeError, match=r"checkpoint .* cannot be read: rank 0: "):
            load_checkpoint(copy, _state(0))
        shutil.rmtree(copy)


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "runs"
    message = rf"folder \({folder}\) must be writable: Not a directory"
    with pytest.raises(ValueError, match=message):
        check_writable(folder)
    with pytest.raises(ValueError, match=message):
        save_checkpoint(folder, _state(1), step=1, keep=1)


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
        "step": int(5 * scale),
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
    assert state["step"] == expected["step"] == 5
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


def _find_torn(rank: int, num_ranks: int, folder: Path) -> tuple[Path | None, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return find_newest_checkpoint(folder), len(caught)


def test_ranks_agree_and_rank_0_warns(run_ranks: RunRanks, tmp_path: Path):
    paths = [save_checkpoint(tmp_path, _state(step), step=step, keep=2) for step in (1, 2)]
    _cut_file(paths[1])
    assert run_ranks(_find_torn, 2, tmp_path) == [(paths[0], 1), (paths[0], 0)]


def _fail_on_rank_1(rank: int, num_ranks: int, folder: Path) -> str:
    state: dict[str, Any] = {"number": 1}
    if rank == 1:
        state["more"] = lambda: None  # does not pickle
    try:
        save_checkpoint(folder, state, step=1, keep=1)
    except RuntimeError as error:
        dist.barrier()
        return str(error)
    raise AssertionError("saving did not fail")


def test_failure_of_one_rank_is_that_of_all(run_ranks: RunRanks, tmp_path: Path):
    messages = run_ranks(_fail_on_rank_1, 2, tmp_path)
    assert messages[0] == messages[1]
    assert "step-00000001 was not written: rank 1: " in messages[0]
    assert find_newest_checkpoint(tmp_path) is None


def _unwritable(rank: int, num_ranks: int, folder: Path) -> str:
    with pytest.raises(ValueError, match="must be writable") as caught:
        save_checkpoint(folder, _state(1), step=1, keep=1)
    return str(caught.value)


def test_unwritable_folder_fails_on_all_ranks(run_ranks: RunRanks, tmp_path: Path):
    (tmp_path / "file").touch()
    messages = run_ranks(_unwritable, 2, tmp_path / "file")
    assert messages[0] == messages[1]
