"""Metadata of a stranger's checkpoint runs no code; damaged metadata is an error of one line."""

import json
import pickle
import random
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from halley.cli.main import main
from halley.train.checkpoint import find_newest_checkpoint, load_checkpoint, save_checkpoint
from halley.train.checkpoint_reader import read_metadata
from tests.damage import pickle_bomb
from tests.train.run_case import SETTINGS, write_text


def _save(folder: Path) -> Path:
    state: dict[str, Any] = {
        "parameters": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(3).bfloat16()},
        "empty": torch.zeros(0, 2),
    }
    return save_checkpoint(folder, state, step=4, keep=1)


def _sizes(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in path.iterdir()}


def replace_metadata(path: Path, content: bytes) -> None:
    """Put other metadata into a checkpoint, with a manifest that fits it, as a forger would."""
    (path / ".metadata").write_bytes(content)
    table = json.loads((path / "manifest.json").read_text())
    del table["xxh3_128"]
    table["files"][".metadata"] = {
        "num_bytes": len(content),
        "xxh3_128": xxhash.xxh3_128_hexdigest(content),
    }
    text = json.dumps(table, sort_keys=True, separators=(",", ":"))
    table["xxh3_128"] = xxhash.xxh3_128_hexdigest(text.encode())
    (path / "manifest.json").write_text(json.dumps(table))


def test_the_reader_returns_what_torch_reads(tmp_path: Path):
    path = _save(tmp_path)
    got = read_metadata(path, file_sizes=_sizes(path))
    want: Metadata = pickle.loads((path / ".metadata").read_bytes())  # written by this test
    assert got.state_dict_metadata == want.state_dict_metadata
    assert got.storage_data == want.storage_data
    assert got.version == want.version


def test_a_bomb_in_the_metadata_does_nothing_on_resume_and_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text, run = write_text(tmp_path), tmp_path / "run"
    argv = [
        *("train", f"--data={text}", f"--output={run}", "--nproc=1"),
        *(f"--set={setting}" for setting in [*SETTINGS, "train.num_steps=3"]),
    ]
    assert main(argv) == 0
    checkpoint = run / "checkpoints" / "step-00000003"
    marker = tmp_path / "marker"
    replace_metadata(checkpoint, pickle_bomb(marker))
    told = (
        f"halley: error: checkpoint {checkpoint} is damaged: .metadata names posix.mkdir, which no "
        "checkpoint holds: the file does not come from Halley and was not read; "
    )
    for words in (argv, ["export", str(run), f"--output={tmp_path}/hf"]):
        capsys.readouterr()
        assert main(words) == 2
        assert capsys.readouterr().err.startswith(told)
        assert not marker.exists()
    pickle.loads(pickle_bomb(marker))
    assert marker.exists()  # the bomb works where it is unpickled


def test_a_bomb_among_the_tensors_does_nothing(tmp_path: Path):
    path = _save(tmp_path)
    marker = tmp_path / "marker"
    shard = path / "__0_0.distcp"
    bomb = pickle_bomb(marker)
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


FORBIDDEN = [
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("builtins", "getattr"),
    ("builtins", "__import__"),
    ("subprocess", "Popen"),
    ("importlib", "import_module"),
    ("torch", "load"),
    ("torch", "save"),
    ("torch.hub", "load"),
    ("torch", "os.system"),
    ("torch.serialization", "load"),
    ("torch.storage", "_load_from_bytes"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("numpy", "load"),
    ("pathlib", "Path.unlink"),
    ("pathlib", "os"),
    (_TORCH, "os.system"),
    (_TORCH, "field"),
    (_TORCH, "Metadata.__init__"),
    ("torch.distributed.checkpoint.filesystem", "os"),
    ("copyreg", "_reconstructor"),
    ("operator", "attrgetter"),
    ("functools", "partial"),
    ("collections", "OrderedDict"),
]


@pytest.mark.parametrize(("module", "name"), FORBIDDEN)
def test_names_that_torch_does_not_write_are_refused(tmp_path: Path, module: str, name: str):
    (tmp_path / ".metadata").write_bytes(_reduce(module, name, "touch marker"))
    message = rf"^\.metadata names {re.escape(module)}\.{re.escape(name)}, which no checkpoint"
    with pytest.raises(ValueError, match=message):
        read_metadata(tmp_path, file_sizes={})


def test_a_pickle_cannot_change_classes_of_torch(tmp_path: Path):
    # BUILD on the class itself, which the default unpickler turns into setattr.
    state = pickle.dumps((None, {"__setstate__": None}), protocol=2)[2:-1]
    (tmp_path / ".metadata").write_bytes(
        b"\x80\x02c" + f"{_TORCH}\nMetadataIndex\n".encode() + state + b"b."
    )
    with pytest.raises(ValueError, match=r"^\.metadata is damaged: "):
        read_metadata(tmp_path, file_sizes={})
    assert "__setstate__" not in vars(MetadataIndex)


def _change(change: Callable[[Metadata], object]) -> Callable[[Path], bytes]:
    def read(path: Path) -> bytes:
        metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
        change(metadata)
        return pickle.dumps(metadata)

    return read


def _set_storage(**fields: object) -> Callable[[Metadata], object]:
    return lambda metadata: next(iter(metadata.storage_data.values())).__dict__.update(fields)


WRONG: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "empty": (lambda path: b"", "Ran out of input"),
    "no pickle": (lambda path: b"{}", "invalid load key, '{'."),
    "a number": (lambda path: pickle.dumps(3), "an entry is not of the type Metadata"),
    "another class": (
        lambda path: pickle.dumps(MetadataIndex("a")),
        "an entry is not of the type Metadata",
    ),
    "no tensors": (
        _change(lambda metadata: setattr(metadata, "state_dict_metadata", None)),
        "a table of entries is missing",
    ),
    "a file above the folder": (
        _change(_set_storage(relative_path="../other/__0_0.distcp")),
        "an entry is in the file '../other/__0_0.distcp', which the manifest does not list",
    ),
    "an absolute file": (
        _change(_set_storage(relative_path="/etc/passwd")),
        "an entry is in the file '/etc/passwd', which the manifest does not list",
    ),
    "an entry behind the file": (
        _change(_set_storage(length=1 << 40)),
        "an entry lies beyond the end of __0_0.distcp",
    ),
    "a negative place": (
        _change(_set_storage(offset=-1)),
        "an entry of __0_0.distcp has no valid offset",
    ),
    "a place of another type": (
        _change(_set_storage(offset="0")),
        "an entry of __0_0.distcp has no valid offset",
    ),
    "a transformation": (
        _change(_set_storage(transform_descriptors=["zstd"])),
        "an entry of __0_0.distcp needs a transformation, which is not supported",
    ),
    "an entry that is no tensor": (
        _change(lambda metadata: metadata.state_dict_metadata.update(a=BytesStorageMetadata())),
        "entry a is not of the type TensorStorageMetadata",
    ),
    "a size of another type": (
        _change(lambda metadata: setattr(metadata.state_dict_metadata["empty"], "size", "2")),
        "a size is not a list of integers",
    ),
    "a negative size": (
        _change(lambda metadata: setattr(metadata.state_dict_metadata["empty"], "size", (-1,))),
        "a size is not a list of integers",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_metadata_is_named(tmp_path: Path, name: str):
    path = _save(tmp_path)
    make, defect = WRONG[name]
    content = make(path)
    if name == "an entry that is no tensor":
        # torch pickles this class too, but Halley never saves anything but tensors.
        defect = (
            f".metadata names {_TORCH}.BytesStorageMetadata, which no checkpoint holds: the file "
            "does not come from Halley and was not read"
        )
    else:
        defect = f".metadata is damaged: {defect}"
    replace_metadata(path, content)
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
        # Any other error fails the test; damage inside of a name reads as another name.
        with warnings.catch_warnings(), suppress(ValueError):
            warnings.simplefilter("ignore")
            read_metadata(path, file_sizes=_sizes(path))
