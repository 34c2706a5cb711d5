"""Lay out tensors for checkpoints, and read checkpoints without running code from them.

Torch.distributed.checkpoint (DCP) stores its metadata in the file ``.metadata`` as a pickle, which
can call any function. This reader unpickles it into inert records, accepts only class names that
DCP writes, checks every field, and builds DCP's objects. DCP reads tensors with ``weights_only``.
"""

import pickle
from collections.abc import Mapping, Sequence
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
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from halley.distributed.mesh import ParallelGroups
from halley.moe.layer import GroupedExperts
from halley.train.manifest import FileRecord


def checkpoint_tensors(
    tensors: Mapping[str, torch.Tensor],
    experts: Mapping[str, GroupedExperts],
    *,
    groups: ParallelGroups,
) -> dict[str, object]:
    """Return views of parameters, or of same-shaped tensors, in checkpoint layout, by name.

    The layout does not depend on the number of ranks. Stacked expert weights become DTensors
    sharded over the expert-parallel group, or ``ExpertShards`` where experts have a placement.
    """
    stored: dict[str, object] = {}
    for name, tensor in tensors.items():
        module, own_name = experts.get(name), name.rpartition(".")[2]
        if module is None:
            stored[name] = tensor.detach()
            continue
        view = module.checkpoint_view(own_name, tensor.detach())
        if groups.expert_mesh is None:
            stored[name] = view
        elif module.is_plain:
            layout: list[Placement] = [Replicate(), Shard(0)]
            if groups.tp_size > 1:
                layout.append(Shard(view.ndim + module.sharded_dims[own_name].dim))
            stored[name] = DTensor.from_local(view, groups.expert_mesh, layout)
        else:
            stored[name] = ExpertShards(view, module.expert_ids, module.placement.num_experts)
    return stored


@final
class ExpertShards(torch.Tensor):
    """A tensor of all experts, ``(E, ...)``, with memory only for the experts that this rank holds.

    It has the methods that DCP asks of a tensor subclass (``torch.distributed._checkpointable``).
    Each expert is a chunk of its own, unlike the contiguous rows of a DTensor shard. DCP writes an
    expert with several replicas once, and reads it on each rank that holds a replica.
    """

    _chunks: list[ChunkStorageMetadata]
    _own_LX: torch.Tensor

    @staticmethod
    def __new__(
        cls, own_LX: torch.Tensor, expert_ids: Sequence[int], num_experts: int
    ) -> "ExpertShards":
        """Make the ``(E, ...)`` tensor; checkpoints save ``own_LX`` and load into its memory."""
        inner = own_LX.shape[1:]
        shards: Any = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, torch.Size([num_experts, *inner]), dtype=own_LX.dtype, device=own_LX.device
        )
        shards._own_LX = own_LX
        shards._chunks = [
            ChunkStorageMetadata(
                offsets=torch.Size([expert, *(0 for _ in inner)]), sizes=torch.Size([1, *inner])
            )
            for expert in expert_ids
        ]
        return shards

    @classmethod
    def __torch_dispatch__(cls, func: Any, *arguments: Any) -> Any:
        raise NotImplementedError(f"{cls.__name__} has no {func}: only checkpoints use it")

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._own_LX)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self._chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        offsets = [chunk.offsets for chunk in self._chunks]
        place = offsets.index(index.offset)  # pyright: ignore[reportArgumentType]
        return self._own_LX[place : place + 1]


METADATA_FILE = ".metadata"
_MAX_METADATA_BYTES = 1 << 30

# Names of the classes and functions that DCP's metadata may contain, by module, for unpickling.
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    # Python 3.11.2 pickles a member of an enumeration as getattr(class, name); 3.11.7 does not.
    "builtins": {"getattr"},
    # The pickle has the checkpoint's path, whose class is in another module in newer Pythons.
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}


def read_metadata(folder: Path, files: Mapping[str, FileRecord]) -> Metadata:
    """Read DCP's metadata; ``ValueError`` if it is damaged or names a file that ``files`` lacks.

    The pickle ``.metadata`` may name only classes that DCP writes. It may not exceed 1 GiB.
    """
    path = folder / METADATA_FILE
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size > _MAX_METADATA_BYTES:
                raise ValueError(f"it has {size} bytes, more than {_MAX_METADATA_BYTES}")
            root = _RecordUnpickler(file).load()
        return _build_metadata(root, files)
    except _ForbiddenClassError:
        raise
    except OSError as error:
        raise ValueError(f"{METADATA_FILE} cannot be read: {error.strerror}") from error
    # Unpickling a damaged file can raise any error.
    except Exception as error:
        raise ValueError(f"{METADATA_FILE} is damaged: {error}") from error


@final
class SafeReader(FileSystemReader):
    """DCP's file reader, with metadata checked by this module's function ``read_metadata``."""

    def __init__(self, folder: Path, files: Mapping[str, FileRecord]) -> None:
        super().__init__(folder)
        self._metadata = read_metadata(folder, files)

    # DCP looks for per-rank metadata only if this method takes keyword arguments.
    def read_metadata(self) -> Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._metadata


class _ForbiddenClassError(ValueError):
    """Raised if a pickle names a class or function that DCP does not write."""


class _Record:
    """The arguments or state of a pickled object, as data; the object's class is never called."""

    def __init__(self, *arguments: object) -> None:
        self.state: object = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


class _RecordUnpickler(pickle.Unpickler):
    """Unpickles DCP's objects as ``_Record``s, torch dtypes and sizes as usual; refuses all others.

    Each unpickler has its own record classes, because a pickle can set attributes of classes.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._classes: dict[tuple[str, str], type[_Record]] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("torch", "Size"):
            return _size
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if global_name not in _RECORDS.get(module_name, ()):
            raise _ForbiddenClassError(
                f"{METADATA_FILE} names {module_name}.{global_name}, which no checkpoint holds: "
                "the file does not come from Halley and was not read"
            )
        record = type(global_name, (_Record,), {})
        return self._classes.setdefault((module_name, global_name), record)


def _build_metadata(root: object, files: Mapping[str, FileRecord]) -> Metadata:
    fields = _fields(root, "Metadata")
    tensors = _table(fields.get("state_dict_metadata"))
    storage = _table(fields.get("storage_data"))
    return Metadata(
        state_dict_metadata={_string(name): _build_tensor(name, tensors[name]) for name in tensors},
        storage_data={_build_index(each): _build_storage(storage[each], files) for each in storage},
        storage_meta=StorageMeta(),
        version=fields.get("version") and _string(fields["version"]),
    )


def _build_tensor(name: object, entry: object) -> TensorStorageMetadata:
    fields = _fields(entry, "TensorStorageMetadata", what=f"entry {name}")
    properties = fields["properties"]
    state = properties.state if type(properties).__name__ == "TensorProperties" else None
    if not (isinstance(state, tuple) and state and isinstance(state[0], torch.dtype)):
        raise ValueError(f"entry {name} has no dtype")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    boxes = [ChunkStorageMetadata(_size(each["offsets"]), _size(each["sizes"])) for each in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=state[0]), _size(fields["size"]), boxes)


def _build_index(index: object) -> MetadataIndex:
    fields = _fields(index, "MetadataIndex")
    offset, number = fields.get("offset"), fields.get("index")
    if number is not None and type(number) is not int:
        raise ValueError(f"the index ({number!r}) of an entry is no integer")
    return MetadataIndex(
        _string(fields["fqn"]), None if offset is None else _size(offset), index=number
    )


def _build_storage(info: object, files: Mapping[str, FileRecord]) -> StorageInfo:
    fields = _fields(info, "_StorageInfo")
    name, offset, length = (fields.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or name not in files:
        raise ValueError(f"an entry is in the file {name!r}, which the manifest does not list")
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise ValueError(f"an entry of {name} has no valid offset")
    if offset + length > files[name].num_bytes:
        raise ValueError(f"an entry lies beyond the end of {name}")
    if fields.get("transform_descriptors"):
        raise ValueError(f"an entry of {name} needs a transformation, which is not supported")
    return StorageInfo(name, offset, length)


def _fields(record: object, kind: str, *, what: str = "an entry") -> dict[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != kind:
        raise ValueError(f"{what} is not of the type {kind}")
    if not isinstance(record.state, dict):
        raise ValueError(f"{kind} has no fields")
    return cast(dict[str, Any], record.state)


def _table(value: object) -> dict[Any, object]:
    if not isinstance(value, dict):
        raise ValueError("a table of entries is missing")
    return cast(dict[Any, object], value)


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a name ({value!r}) is no string")
    return value


def _size(values: object) -> torch.Size:
    if isinstance(values, tuple | list):
        numbers = cast(list[object], list(values))
        if all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
            return torch.Size(cast(list[int], numbers))
    raise ValueError("a size is not a list of integers")
