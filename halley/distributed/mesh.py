"""The device mesh of data and expert parallelism, and gradient sums over it."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from halley.core.field_types import check_choice, check_type
from halley.core.sharding import check_tp_size


BUCKET_BYTES = 64 * 2**20  # large enough for full link bandwidth, small enough to start early


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """The process groups of expert parallelism inside data parallelism.

    Every rank trains on its own sequences. The ranks form a mesh ("edp", "ep"). The ranks of one
    "ep" row together hold all experts of a layer. The ranks of one "edp" column hold the same
    experts. All other parameters are replicated on all ranks.

    Attributes:
        rank, num_ranks: in the whole mesh.
        ep_rank, ep_size: in the expert-parallel group.
        tp_size: ranks of that group that share each expert, by its intermediate size.
        world: all ranks; None for a single process.
        ep: the group whose ranks together hold all experts; None for ``ep_size`` 1.
        edp: the group whose ranks hold the same experts as this rank; None for a group of one.
        sums: a second group of all ranks, for gradient sums; None for a single process. NCCL runs
            the collectives of one group in order, so sums in their own group overlap with
            all-to-alls.
        mesh: the mesh; None for a single process.
        expert_mesh: the mesh for expert weights. With ``tp_size`` above 1 its dimension "ep" is
            split into "ep" and "etp", where "etp" holds the ranks that share experts.

    Raises:
        ValueError: a size is below 1, a rank is not below the size of its group, or ``tp_size``
            does not divide ``ep_size``.
    """

    rank: int = 0
    num_ranks: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    tp_size: int = 1
    world: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    edp: dist.ProcessGroup | None = None
    sums: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        for name in ("rank", "num_ranks", "ep_rank", "ep_size", "tp_size"):
            check_type(getattr(self, name), int, name=name)
        for name in ("num_ranks", "ep_size", "tp_size"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        for name, size in (("rank", self.num_ranks), ("ep_rank", self.ep_size)):
            if not 0 <= (value := getattr(self, name)) < size:
                raise ValueError(f"{name} ({value}) must be between 0 and {size - 1}")
        check_tp_size(self.tp_size, num_ranks=self.ep_size)

    @property
    def tp_rank(self) -> int:
        """The index of this rank's shard of its experts."""
        return self.ep_rank % self.tp_size

    @staticmethod
    def from_mesh(mesh: DeviceMesh, *, tp_size: int = 1) -> "ParallelGroups":
        """Create the groups from a two-dimensional mesh named ("edp", "ep") over all ranks.

        Args:
            tp_size: ranks of "ep" that share each expert.

        Raises:
            ValueError: the mesh has other dimensions, or ``tp_size`` does not divide "ep".
        """
        if mesh.mesh_dim_names != ("edp", "ep"):
            raise ValueError(f"mesh_dim_names ({mesh.mesh_dim_names}) must be ('edp', 'ep')")
        ep_size, edp_size = mesh.size(1), mesh.size(0)
        check_tp_size(tp_size, num_ranks=ep_size)
        expert_mesh = mesh
        if tp_size > 1:
            ranks = mesh.mesh.view(edp_size, ep_size // tp_size, tp_size)
            expert_mesh = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("edp", "ep", "etp"))
        sums = dist.new_group() if mesh.size() > 1 else None
        assert sums is None or isinstance(sums, dist.ProcessGroup)
        return ParallelGroups(
            rank=dist.get_rank(),
            num_ranks=mesh.size(),
            ep_rank=mesh.get_local_rank("ep"),
            ep_size=ep_size,
            tp_size=tp_size,
            world=dist.group.WORLD,
            ep=mesh.get_group("ep") if ep_size > 1 else None,
            edp=mesh.get_group("edp") if edp_size > 1 else None,
            sums=sums,
            mesh=mesh,
            expert_mesh=expert_mesh,
        )


def build_groups(ep_size: int, *, device_type: str, tp_size: int = 1) -> ParallelGroups:
    """Create the mesh over all ranks of the default process group, or for a single process.

    Args:
        ep_size: size of an expert-parallel group of consecutive ranks; 0 for all ranks.
        device_type: "cpu" or "cuda".
        tp_size: ranks of the group that share each expert.

    Raises:
        ValueError: ``ep_size`` does not divide the number of ranks, ``tp_size`` does not divide
            ``ep_size``, or the device type is unknown.
        RuntimeError: a launcher started several ranks, and the process group is not initialized.
    """
    check_choice(device_type, ("cpu", "cuda"), name="device_type")
    check_type(ep_size, int, name="ep_size")
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            "torch.distributed.init_process_group must come first: this is one of "
            f"{os.environ['WORLD_SIZE']} ranks"
        )
    if ep_size < 0:
        raise ValueError(f"ep_size ({ep_size}) must be at least 0")
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    ep_size = ep_size or num_ranks
    if num_ranks % ep_size != 0:
        raise ValueError(f"ep_size ({ep_size}) must divide the number of ranks ({num_ranks})")
    check_tp_size(tp_size, num_ranks=ep_size)
    if not dist.is_initialized():
        return ParallelGroups()
    shape = (num_ranks // ep_size, ep_size)
    return ParallelGroups.from_mesh(
        init_device_mesh(device_type, shape, mesh_dim_names=("edp", "ep")), tp_size=tp_size
    )


def sync_gradients(
    dense: Iterable[torch.Tensor], expert: Iterable[torch.Tensor], *, groups: ParallelGroups
) -> None:
    """Average gradients over all ranks, in place. Collective.

    Each rank's gradients must be those of its own mean loss. A dense gradient is summed over all
    ranks. An expert's gradient already contains the tokens of its whole expert-parallel group, so
    it is summed over the ranks that hold the same expert. Both are divided by the number of ranks.

    Args:
        dense, expert: contiguous gradients.

    Raises:
        ValueError: ``groups`` is of another type.
    """
    check_type(groups, ParallelGroups, name="groups")
    _sum_over(dense, group=groups.world if groups.num_ranks > 1 else None, scale=groups.num_ranks)
    _sum_over(expert, group=groups.edp, scale=groups.num_ranks)


def global_norm(
    dense: Iterable[torch.Tensor], expert: Iterable[torch.Tensor], *, groups: ParallelGroups
) -> torch.Tensor:
    """Return the norm of all gradients of the model as a float32 scalar. Collective.

    Args:
        dense: gradients that are the same on all ranks.
        expert: gradients of this rank's experts, each expert on one rank only: with replicas, the
            results of ``GroupedExperts.without_replicas``.
    """
    dense_sum, expert_sum = (_sum_of_squares(dense), _sum_of_squares(expert))
    if groups.ep is not None and expert_sum is not None:
        dist.all_reduce(expert_sum, group=groups.ep)
    sums = [value for value in (dense_sum, expert_sum) if value is not None]
    if not sums:
        return torch.zeros(())
    return torch.stack(sums).sum().sqrt()


def _sum_of_squares(gradients: Iterable[torch.Tensor]) -> torch.Tensor | None:
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    return torch.stack(norms).square().sum() if norms else None


def _sum_over(
    gradients: Iterable[torch.Tensor], *, group: dist.ProcessGroup | None, scale: int
) -> None:
    bucket: list[torch.Tensor] = []
    num_bytes = 0
    for gradient in gradients:
        bucket.append(gradient)
        num_bytes += gradient.nbytes
        if num_bytes >= BUCKET_BYTES:
            _sum_bucket(bucket, group=group, scale=scale)
            bucket, num_bytes = [], 0
    if bucket:
        _sum_bucket(bucket, group=group, scale=scale)


def _sum_bucket(bucket: list[torch.Tensor], *, group: dist.ProcessGroup | None, scale: int) -> None:
    if group is None:
        if scale > 1:
            torch._foreach_div_(bucket, scale)  # pyright: ignore[reportPrivateImportUsage]
        return
    flat = torch.cat([gradient.flatten() for gradient in bucket])
    dist.all_reduce(flat, group=group)
    flat /= scale
    parts = flat.split([gradient.numel() for gradient in bucket])
    for gradient, part in zip(bucket, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
