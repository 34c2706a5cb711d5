"""The tensors of a checkpoint, in a layout that does not depend on the number of ranks."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
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
