"""Read checkpoints of torch.distributed.checkpoint (DCP) without running code from them.

DCP stores its metadata in the file ``.metadata`` as a pickle, and a pickle can call any function.
This reader unpickles it into inert records, accepts only the class names that DCP writes, checks
every field, and then builds DCP's own objects. DCP reads tensors with ``weights_only=True``.
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
from halley.moe.experts import GroupedExperts


def checkpoint_tensors(
    tensors: Mapping[str, torch.Tensor],
    experts: Mapping[str, GroupedExperts],
    *,
    groups: ParallelGroups,
) -> dict[str, object]:
    """Return parameters, or tensors of their shapes, in the layout that checkpoints have.

    Dense tensors are plain tensors. Stacked expert weights are DTensors sharded over the
    expert-parallel group, or ``ExpertShards`` where experts have a placement. So a checkpoint does
    not depend on the number of ranks.

    Args:
        tensors: by parameter name.
        experts: the result of ``grouped_experts``.
    """
    views = checkpoint_views(tensors, experts)
    result: dict[str, object] = {**views}
    mesh = groups.expert_mesh
    if mesh is None:
        return result
    for name, module in experts.items():
        view = views[name]
        if not module.is_plain:
            result[name] = ExpertShards(view, module.expert_ids, module.placement.num_experts)
            continue
        layout: list[Placement] = [Replicate(), Shard(0)]
        if groups.tp_size > 1:
            inner = module.sharded_dims[name.rpartition(".")[2]]
            layout.append(Shard(view.ndim + inner.dim))
        result[name] = DTensor.from_local(view, mesh, layout)
    return result


def checkpoint_views(
    tensors: Mapping[str, torch.Tensor], experts: Mapping[str, GroupedExperts]
) -> dict[str, torch.Tensor]:
    """Return views of parameters, or of tensors of their shapes, in the shapes of checkpoints.

    Args:
        tensors: by parameter name.
        experts: the result of ``grouped_experts``.
    """
    return {
        name: experts[name].checkpoint_view(name.rpartition(".")[2], tensor.detach())
        if name in experts
        else tensor.detach()
        for name, tensor in tensors.items()
    }


@final
class ExpertShards(torch.Tensor):
    """A tensor of all experts, ``(E, ...)``, of which this rank has the experts that it holds.

    Only torch.distributed.checkpoint (DCP) uses it, by its protocol for tensor subclasses
    (``torch.distributed._checkpointable``). Each expert is a chunk of its own, unlike the
    contiguous rows of a DTensor shard. DCP writes an expert with several replicas once, and reads
    it on each rank.
    """

    _chunks: list[ChunkStorageMetadata]
    _own_LX: torch.Tensor

    @staticmethod
    def __new__(
        cls, own_LX: torch.Tensor, expert_ids: Sequence[int], num_experts: int
    ) -> "ExpertShards":
        """Wrap the expert tensors of this rank.

        Args:
            own_LX: ``(L, ...)``; loading a checkpoint writes into it.
            expert_ids: expert id of each row.
            num_experts: experts of all ranks, E.
        """
        size = torch.Size([num_experts, *own_LX.shape[1:]])
        shards: Any = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, size, dtype=own_LX.dtype, device=own_LX.device
        )
        inner = [0] * (own_LX.ndim - 1)
        shards._own_LX = own_LX
        shards._chunks = [
            ChunkStorageMetadata(
                offsets=torch.Size([expert, *inner]), sizes=torch.Size([1, *own_LX.shape[1:]])
            )
            for expert in expert_ids
        ]
        return shards

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
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
