"""Every kind of damage to a checkpoint is named, and the checkpoint before it is found."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from halley.train.checkpoint import find_newest_checkpoint, save_checkpoint
from tests.damage import flip_bytes
from tests.train.checkpoint_case import change_manifest, make_state


def _replace(name: str, content: bytes) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        (path / name).write_bytes(content)

    return replace


def _link(name: str) -> Callable[[Path], None]:
    def link(path: Path) -> None:
        (path / name).rename(path.parent / "elsewhere")
        (path / name).symlink_to(path.parent / "elsewhere")

    return link


def _flip_step(path: Path) -> None:
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"step": 2', '"step": 1'))


DAMAGED = "manifest.json is damaged: "
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "cut manifest": (
        _replace("manifest.json", b'{"step": 2'),
        f"{DAMAGED}the manifest ({{path}}/manifest.json) must be JSON: Expecting ',' delimiter: "
        "line 1 column 11 (char 10)",
    ),
    "manifest of another kind": (
        _replace("manifest.json", b'["step"]'),
        f"{DAMAGED}it must be an object",
    ),
    "no text": (
        _replace("manifest.json", b"\x80\x04"),
        f"{DAMAGED}the manifest ({{path}}/manifest.json) must be UTF-8 text: the byte at offset 0 "
        "is not",
    ),
    "flipped step": (_flip_step, f"{DAMAGED}its content does not have its checksum"),
    "another step": (change_manifest(step=1), "its manifest is of step 1"),
    "step of another type": (
        change_manifest(step="2"),
        f"{DAMAGED}step ('2') must be an integer of at least 0",
    ),
    "negative step": (
        change_manifest(step=-2),
        f"{DAMAGED}step (-2) must be an integer of at least 0",
    ),
    "notes of another type": (change_manifest(notes=3), f"{DAMAGED}notes must be an object"),
    "no files": (
        change_manifest(files={}),
        f"{DAMAGED}files must be an object with at least one file",
    ),
    "file above the folder": (
        change_manifest(files={"../step-00000001/__0_0.distcp": 3}),
        f"{DAMAGED}the file name '../step-00000001/__0_0.distcp' must be a plain name inside the "
        "folder",
    ),
    "absolute file": (
        change_manifest(files={"/etc/passwd": 3}),
        f"{DAMAGED}the file name '/etc/passwd' must be a plain name inside the folder",
    ),
    "folder itself": (
        change_manifest(files={"..": 3}),
        f"{DAMAGED}the file name '..' must be a plain name inside the folder",
    ),
    "size of another type": (
        change_manifest(files={"__0_0.distcp": True}),
        f"{DAMAGED}the size of __0_0.distcp (True) must be an integer of at least 0",
    ),
    "no checksum": (
        change_manifest(files={"__0_0.distcp": {"num_bytes": 3}}),
        f"{DAMAGED}the checksum of __0_0.distcp must be a string",
    ),
    "no tensors": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "cut tensors": (
        _replace("__0_0.distcp", b"123"),
        "__0_0.distcp has 3 bytes instead of {num_bytes}",
    ),
    "flipped tensors": (
        lambda path: flip_bytes(path / "__0_0.distcp", num_bytes=1),
        "__0_0.distcp is damaged: its checksum is not that of manifest.json",
    ),
    "tensors behind a link": (_link("__0_0.distcp"), "__0_0.distcp is missing"),
    "manifest behind a link": (_link("manifest.json"), "manifest.json is a link"),
    "no metadata": (lambda path: (path / ".metadata").unlink(), ".metadata is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, name: str):
    paths = [save_checkpoint(tmp_path, make_state(step), step=step, keep=2) for step in (1, 2)]
    assert find_newest_checkpoint(tmp_path) == paths[1]
    num_bytes = (paths[1] / "__0_0.distcp").stat().st_size
    damage, defect = DAMAGE[name]
    damage(paths[1])
    told = f"checkpoint {paths[1]} is damaged: {defect.format(path=paths[1], num_bytes=num_bytes)}"
    with pytest.warns(UserWarning, match="is damaged") as caught:
        assert find_newest_checkpoint(tmp_path) == paths[0]
    assert [str(warning.message) for warning in caught] == [
        f"{told}: the run goes on from {paths[0]}, the newest complete checkpoint"
    ]
    assert caught[0].filename == __file__
    shutil.rmtree(paths[0])
    with pytest.raises(ValueError, match="is damaged") as error:
        find_newest_checkpoint(tmp_path)
    assert str(error.value) == (
        f"{told}; {tmp_path} must hold a complete checkpoint: put back an intact copy, or start at "
        "step 0 with halley train --restart, which keeps these files"
    )
