"""Which ranks share experts and which hold copies of them; gradients summed accordingly."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from halley.core.field_types import check_choice, check_type
from halley.core.sharding import check_tp_size


BUCKET_BYTES = 64 * 2**20  # large enough for the full rate of the link, small enough to begin soon


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """Expert parallelism inside data parallelism.

    Every rank has its own sequences. The ranks form a mesh of ("edp", "ep"): those of one "ep"
    row hold the experts of a layer together, those of one "edp" column hold the same experts.
    All other parameters are copies on all ranks.

    Attributes:
        rank, num_ranks: in the whole mesh.
        ep_rank, ep_size: in the expert-parallel group.
        tp_size: neighbours of that group that share each expert, by its intermediate size.
        world: all ranks; None for a rank on its own.
        ep: the group that shares a layer's experts; None for ``ep_size`` 1.
        edp: the group that holds copies of this rank's experts; None for a group of one.
        sums: all ranks once more; None for a rank on its own. What it carries does not stand in
            line with the exchanges of the other groups.
        mesh: the mesh; None for a rank on its own.
        expert_mesh: the same, with "ep" as two dimensions where ranks share experts: "ep" of the
            sets, "etp" of the ranks of a set.

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
        """Which shard of its experts this rank holds."""
        return self.ep_rank % self.tp_size

    @staticmethod
    def from_mesh(mesh: DeviceMesh, *, tp_size: int = 1) -> "ParallelGroups":
        """Return the groups of a two-dimensional mesh named ("edp", "ep") over all ranks.

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
        assert sums is None or isinstance(sums, dist.ProcessGroup)  # no number: all ranks are in it
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
    """Lay a mesh over all ranks of the initialised process group, or of none.

    Args:
        ep_size: ranks that share a layer's experts, neighbours in rank; 0 for all.
        device_type: "cpu" or "cuda".
        tp_size: how many of them share each expert.

    Raises:
        ValueError: ``ep_size`` does not divide the number of ranks, ``tp_size`` does not divide
            ``ep_size``, or there is no such type of device.
        RuntimeError: a launcher has started several ranks, which have no process group yet.
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
    """Turn gradients of each rank's mean loss into those of the mean over all ranks, in place.

    A dense gradient is summed over all ranks. An expert's gradient holds the tokens of its whole
    expert-parallel group already, so it is summed over the ranks that hold a copy of that expert.
    Both are divided by the number of ranks.

    Args:
        dense, expert: gradients, contiguous.

    Raises:
        ValueError: ``groups`` is of another type.
    """
    check_type(groups, ParallelGroups, name="groups")
    _sum_over(dense, group=groups.world if groups.num_ranks > 1 else None, scale=groups.num_ranks)
    _sum_over(expert, group=groups.edp, scale=groups.num_ranks)


def global_norm(
    dense: Iterable[torch.Tensor], expert: Iterable[torch.Tensor], *, groups: ParallelGroups
) -> torch.Tensor:
    """Return the norm of all gradients of the model, each counted once, as a float32 scalar.

    Args:
        dense: gradients that are the same on all ranks.
        expert: those of this rank's experts, with replicas what ``count_once`` leaves of them.
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
