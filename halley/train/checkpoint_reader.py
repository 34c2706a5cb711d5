"""Read checkpoints of torch.distributed.checkpoint (DCP) without running code from them.

DCP stores its metadata in the file ``.metadata`` as a pickle, and a pickle can call any function.
This reader unpickles it into inert records, accepts only the class names that DCP writes, checks
every field, and then builds DCP's own objects. DCP reads tensors with ``weights_only=True``.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, final

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo as StorageInfo,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)


METADATA_FILE = ".metadata"
_MAX_METADATA_BYTES = 1 << 30

_RECORDS = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    # The folder of the checkpoint; the module of its class differs between Python versions.
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


def read_metadata(folder: Path, *, file_sizes: Mapping[str, int]) -> Metadata:
    """Read the metadata of a checkpoint whose entries are all tensors.

    Args:
        folder: the checkpoint.
        file_sizes: bytes of each file of the checkpoint; entries must lie inside these files.

    Raises:
        ValueError: the file is missing or is not what DCP writes, names a class that DCP does not
            write, or has an entry that is not a tensor or lies outside the files.
    """
    path = folder / METADATA_FILE
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size > _MAX_METADATA_BYTES:
                raise ValueError(f"it has {size} bytes, more than {_MAX_METADATA_BYTES}")
            root = _RecordUnpickler(file).load()
        return _build_metadata(root, file_sizes)
    except _ForbiddenClassError:
        raise
    except OSError as error:
        raise ValueError(f"{METADATA_FILE} cannot be read: {error.strerror}") from error
    # A damaged pickle can raise any error.
    except Exception as error:
        raise ValueError(f"{METADATA_FILE} is damaged: {error}") from error


@final
class SafeReader(FileSystemReader):
    """Reads the tensors of a checkpoint with metadata that ``read_metadata`` has checked."""

    def __init__(self, folder: Path, *, file_sizes: Mapping[str, int]) -> None:
        super().__init__(folder)
        self._metadata = read_metadata(folder, file_sizes=file_sizes)

    # DCP looks for per-rank metadata only if this method has the base class's keyword arguments.
    def read_metadata(self) -> Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._metadata


class _ForbiddenClassError(ValueError):
    """A pickle names a class or function that DCP does not write."""


class _Record:
    """The inert content of one pickled object."""

    def __init__(self, *arguments: object) -> None:
        self.state: object = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state

    def fields(self) -> dict[str, Any]:
        if not isinstance(self.state, dict):
            raise ValueError(f"{type(self).__name__} has no fields")
        return cast(dict[str, Any], self.state)


class _RecordUnpickler(pickle.Unpickler):
    """Unpickles DCP's classes as records, keeps torch's dtypes and sizes, and refuses other names.

    Each unpickler creates its own record classes. A pickle can set attributes of classes that it
    names, and these classes are dropped with the unpickler.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._classes: dict[tuple[str, str], type[_Record]] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        key = (module_name, global_name)
        if key == ("torch", "Size"):
            return _make_size
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if key not in _RECORDS:
            raise _ForbiddenClassError(
                f"{METADATA_FILE} names {module_name}.{global_name}, which no checkpoint holds: "
                "the file does not come from Halley and was not read"
            )
        return self._classes.setdefault(key, type(global_name, (_Record,), {}))


def _make_size(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple | list):
        raise ValueError("a size is not a list of integers")
    sizes = cast(list[object], list(values))
    if not all(type(value) is int and 0 <= value < 1 << 62 for value in sizes):
        raise ValueError("a size is not a list of integers")
    return tuple(cast(list[int], sizes))


def _build_metadata(root: object, file_sizes: Mapping[str, int]) -> Metadata:
    fields = _fields(root, "Metadata")
    tensors = {
        _string(name): _build_tensor(name, entry)
        for name, entry in _table(fields.get("state_dict_metadata")).items()
    }
    storage: dict[MetadataIndex, StorageInfo] = {}
    for index, info in _table(fields.get("storage_data")).items():
        storage[_build_index(index)] = _build_storage(info, file_sizes)
    return Metadata(
        state_dict_metadata=dict(tensors),
        storage_data=storage,
        storage_meta=StorageMeta(),
        version=fields.get("version") and _string(fields["version"]),
    )


def _build_tensor(name: object, entry: object) -> TensorStorageMetadata:
    fields = _fields(entry, "TensorStorageMetadata", what=f"entry {name}")
    properties = fields["properties"]
    state = properties.state if type(properties).__name__ == "TensorProperties" else None
    if not (isinstance(state, tuple) and state and isinstance(state[0], torch.dtype)):
        raise ValueError(f"entry {name} has no dtype")
    chunks: list[ChunkStorageMetadata] = []
    for chunk in fields["chunks"]:
        parts = _fields(chunk, "ChunkStorageMetadata")
        chunks.append(
            ChunkStorageMetadata(offsets=_size(parts["offsets"]), sizes=_size(parts["sizes"]))
        )
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=state[0]), size=_size(fields["size"]), chunks=chunks
    )


def _build_index(index: object) -> MetadataIndex:
    fields = _fields(index, "MetadataIndex")
    offset, number = fields.get("offset"), fields.get("index")
    if number is not None and type(number) is not int:
        raise ValueError(f"the index ({number!r}) of an entry is no integer")
    return MetadataIndex(
        _string(fields["fqn"]), None if offset is None else _size(offset), index=number
    )


def _build_storage(info: object, file_sizes: Mapping[str, int]) -> StorageInfo:
    fields = _fields(info, "_StorageInfo")
    name, offset, length = (fields.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or name not in file_sizes:
        raise ValueError(f"an entry is in the file {name!r}, which the manifest does not list")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise ValueError(f"an entry of {name} has no valid offset")
    if offset + length > file_sizes[name]:
        raise ValueError(f"an entry lies beyond the end of {name}")
    if fields.get("transform_descriptors"):
        raise ValueError(f"an entry of {name} needs a transformation, which is not supported")
    return StorageInfo(name, offset, length)


def _fields(record: object, kind: str, *, what: str = "an entry") -> dict[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise ValueError(f"{what} is not of the type {kind}")
    return record.fields()


def _table(value: object) -> dict[object, object]:
    if not isinstance(value, dict):
        raise ValueError("a table of entries is missing")
    return cast(dict[object, object], value)


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a name ({value!r}) is no string")
    return value


def _size(value: object) -> torch.Size:
    return torch.Size(_make_size(value))
