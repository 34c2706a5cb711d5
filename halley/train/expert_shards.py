"""Experts of a placement as checkpoints keep them: by expert, each of them once."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@final
class ExpertShards(torch.Tensor):
    """A tensor of all experts, ``(E, ...)``, of which this rank has those that it holds.

    For torch.distributed.checkpoint alone, by the protocol that it has for tensor subclasses
    (``torch.distributed._checkpointable``), as a DTensor's shard is one range of rows. Each expert
    is a chunk of its own: it writes those that several ranks have once, and reads them on each.
    """

    _chunks: list[ChunkStorageMetadata]
    _own_LX: torch.Tensor

    @staticmethod
    def __new__(
        cls, own_LX: torch.Tensor, expert_ids: Sequence[int], num_experts: int
    ) -> "ExpertShards":
        """Lay the experts of this rank out.

        Args:
            own_LX: ``(L, ...)``; reading a checkpoint writes into it.
            expert_ids: of its rows.
            num_experts: of all ranks, E.
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
        raise NotImplementedError(f"{func} is not for {cls.__name__}, which only checkpoints read")

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
