"""Reading the metadata of a checkpoint runs no code, and damaged metadata is a one-line error."""

import json
import pickle
import random
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,  # noqa: F401 - data/metadata.jsonl uses it
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from halley.cli.main import main
from halley.train.checkpoint import find_newest_checkpoint, load_checkpoint, save_checkpoint
from halley.train.checkpoint_reader import read_metadata
from halley.train.manifest import read_manifest
from tests.damage import pickle_bomb
from tests.hostile.cases import read_cases
from tests.train.run_case import change_manifest, checkpoint_of, command_line, read_settings


def _save(folder: Path) -> Path:
    state: dict[str, Any] = {
        "parameters": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(3).bfloat16()},
        "empty": torch.zeros(0, 2),
    }
    return save_checkpoint(folder, state, step=4, keep=1)


def _read(path: Path) -> Metadata:
    return read_metadata(path, read_manifest(path).files)


def _replace_metadata(path: Path, content: bytes) -> None:
    """Replace a checkpoint's metadata and its checksum in the manifest, as a forger would."""
    (path / ".metadata").write_bytes(content)
    files = json.loads((path / "manifest.json").read_text())["files"]
    files[".metadata"] = {"num_bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    change_manifest(path, files=files)


@pytest.mark.parametrize("by_getattr", [False, True], ids=["", "as Python 3.11.2"])
def test_the_reader_returns_what_torch_reads(tmp_path: Path, monkeypatch, by_getattr: bool):
    if by_getattr:
        reduce = property(lambda self: lambda protocol: (getattr, (type(self), self.name)))
        monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduce)
    path = _save(tmp_path)
    assert (b"getattr" in (path / ".metadata").read_bytes()) >= by_getattr
    got = _read(path)
    want: Metadata = pickle.loads((path / ".metadata").read_bytes())  # written by this test
    for entry in want.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            # torch 2.15 stores strides, which nothing needs that loads a checkpoint.
            entry.properties.strides = None  # pyright: ignore[reportAttributeAccessIssue]
    for field in ("state_dict_metadata", "storage_data", "version"):
        assert getattr(got, field) == getattr(want, field)


def test_a_bomb_in_the_metadata_does_nothing_on_resume_and_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = read_settings(tmp_path, "train.num_steps=3")
    argv, checkpoint = [*command_line(config), "--nproc=1"], checkpoint_of(config, 3)
    assert main(argv) == 0
    marker = tmp_path / "marker"
    _replace_metadata(checkpoint, pickle_bomb(marker))
    told = (
        f"halley: error: checkpoint {checkpoint} is damaged: .metadata names posix.mkdir, which no "
        "checkpoint holds: the file does not come from Halley and was not read; "
    )
    for words in (argv, ["export", config.output, f"--output={tmp_path}/hf"]):
        capsys.readouterr()
        assert main(words) == 2
        assert capsys.readouterr().err.startswith(told)
        assert not marker.exists()
    pickle.loads(pickle_bomb(marker))
    assert marker.exists()  # the bomb works where it is unpickled


def test_a_bomb_among_the_tensors_does_nothing(tmp_path: Path):
    path, marker = _save(tmp_path), tmp_path / "marker"
    shard, bomb = path / "__0_0.distcp", pickle_bomb(marker)
    shard.write_bytes(bomb + bytes(shard.stat().st_size - len(bomb)))
    state: dict[str, object] = {"parameters": {"weight": torch.zeros(2, 3)}}
    with pytest.raises(RuntimeError, match=r"cannot be read: rank 0: "):
        load_checkpoint(path, state)  # without the checksums that find_newest_checkpoint compares
    assert not marker.exists()


_TORCH = "torch.distributed.checkpoint.metadata"


def _reduce(module: str, name: str, *arguments: object) -> bytes:
    """Return a pickle that calls a function of a module."""
    packed = pickle.dumps(arguments, protocol=2)[2:-1]
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + packed + b"R."


@pytest.mark.parametrize(("module", "name"), read_cases("pickled_names"))
def test_names_that_torch_does_not_write_are_refused(tmp_path: Path, module: str, name: str):
    (tmp_path / ".metadata").write_bytes(_reduce(module, name, "touch marker"))
    message = rf"^\.metadata names {re.escape(module)}\.{re.escape(name)}, which no checkpoint"
    with pytest.raises(ValueError, match=message):
        read_metadata(tmp_path, {})


def test_a_pickle_cannot_change_classes_of_torch(tmp_path: Path):
    # The opcode BUILD on a class, for which the default unpickler sets attributes of the class.
    state = pickle.dumps((None, {"__setstate__": None}), protocol=2)[2:-1]
    content = b"\x80\x02c" + f"{_TORCH}\nMetadataIndex\n".encode() + state + b"b."
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"^\.metadata is damaged: "):
        read_metadata(tmp_path, {})
    assert "__setstate__" not in vars(MetadataIndex)


def change(path: Path, name: str, value: object) -> bytes:
    """Return the pickled metadata of a checkpoint with another value of a field."""
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    setattr(metadata, name, value)
    return pickle.dumps(metadata)


def change_entry(path: Path, **fields: object) -> bytes:
    """Return the pickled metadata of a checkpoint with another place of its first tensor."""
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).__dict__.update(fields)
    return pickle.dumps(metadata)


def change_size(path: Path, size: object) -> bytes:
    """Return the pickled metadata of a checkpoint with another size of its empty tensor."""
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    setattr(metadata.state_dict_metadata["empty"], "size", size)  # noqa: B010
    return pickle.dumps(metadata)


@pytest.mark.parametrize(("content", "defect"), read_cases("metadata"))
def test_wrong_metadata_is_named(tmp_path: Path, content: str, defect: str):
    """The content is a Python expression, which may use the names of this module."""
    path = _save(tmp_path)
    _replace_metadata(path, eval(content, globals(), {"path": path}))
    with pytest.raises(ValueError, match="is damaged") as caught:
        find_newest_checkpoint(tmp_path)
    assert str(caught.value).startswith(f"checkpoint {path} is damaged: {defect}; ")


def test_random_damage_is_a_value_error_or_harmless(tmp_path: Path):
    path = _save(tmp_path)
    original = (path / ".metadata").read_bytes()
    draw = random.Random(7)
    for _ in range(500):
        content = bytearray(original)
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        if draw.random() < 0.3:
            del content[draw.randrange(len(content)) :]
        (path / ".metadata").write_bytes(content)
        # Other errors than ValueError fail the test. Damage inside of a name reads as another name.
        with warnings.catch_warnings(), suppress(ValueError):
            warnings.simplefilter("ignore")
            _read(path)
