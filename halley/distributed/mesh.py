"""Join a distributed run, divide its ranks into a device mesh, and average gradients over it."""

import datetime
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from halley.core.types import check_tp_size
from halley.core.validation import check_choice, check_type


# Gradients are all-reduced in buckets of this size. Larger ones overlap less; small ones are slow.
BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """The mesh of ranks and its process groups: "ep" divides experts, "edp" replicates them.

    Every rank trains on its own sequences. The ranks form a mesh ("edp", "ep"). The ranks of an
    "ep" group together hold all experts of a layer. The ranks of an "edp" group hold the same
    experts. All other parameters are replicated on all ranks.

    Example: with 4 ranks and ``ep_size`` 2, the "ep" groups are (0, 1) and (2, 3), and the "edp"
    groups are (0, 2) and (1, 3). Groups of a single rank, and meshes of one process, are None.
    """

    rank: int = 0  # rank in the whole mesh
    num_ranks: int = 1
    ep_rank: int = 0  # rank in the "ep" group
    ep_size: int = 1
    tp_size: int = 1  # ranks of "ep" that share each expert, split along its intermediate size
    world: dist.ProcessGroup | None = None  # group of all ranks
    ep: dist.ProcessGroup | None = None
    edp: dist.ProcessGroup | None = None
    # Group of all ranks for gradient sums. NCCL runs the collectives of a group in order, so
    # gradient sums need a separate group to overlap with all-to-alls.
    sums: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    # Mesh for expert weights. If ``tp_size`` is above 1, its "ep" is split into "ep" and "etp". The
    # ranks along "etp" share experts.
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
        """Index of this rank's shard in each of its experts, from 0 to ``tp_size`` - 1."""
        return self.ep_rank % self.tp_size


def build_groups(ep_size: int, *, device_type: str, tp_size: int = 1) -> ParallelGroups:
    """Create process groups and meshes of all ranks in the default group, if it exists. Collective.

    Args:
        ep_size: size of an expert-parallel group of consecutive ranks; 0 for all ranks. It must
            divide the number of ranks.
        device_type: "cpu" or "cuda".
        tp_size: ranks of the group that share each expert; it must divide ``ep_size``.

    Raises:
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
    edp_size = num_ranks // ep_size
    mesh = init_device_mesh(device_type, (edp_size, ep_size), mesh_dim_names=("edp", "ep"))
    expert_mesh = mesh
    if tp_size > 1:
        ranks = mesh.mesh.view(edp_size, ep_size // tp_size, tp_size)
        expert_mesh = DeviceMesh(device_type, ranks, mesh_dim_names=("edp", "ep", "etp"))
    return ParallelGroups(
        rank=dist.get_rank(),
        num_ranks=num_ranks,
        ep_rank=mesh.get_local_rank("ep"),
        ep_size=ep_size,
        tp_size=tp_size,
        world=dist.group.WORLD,
        ep=mesh.get_group("ep") if ep_size > 1 else None,
        edp=mesh.get_group("edp") if edp_size > 1 else None,
        sums=cast(dist.ProcessGroup, dist.new_group()) if num_ranks > 1 else None,
        mesh=mesh,
        expert_mesh=expert_mesh,
    )


def sync_gradients(
    dense: Iterable[torch.Tensor], expert: Iterable[torch.Tensor], *, groups: ParallelGroups
) -> None:
    """Average the gradients of a model over all ranks, in place. Collective.

    Each rank passes the contiguous gradients of its own mean loss. A dense gradient is
    summed over all ranks. The gradient of an expert already contains the tokens of the whole "ep"
    group, so it is summed over the "edp" group only. Both are divided by the number of ranks.
    """
    check_type(groups, ParallelGroups, name="groups")
    _sum_over(dense, group=groups.world if groups.num_ranks > 1 else None, scale=groups.num_ranks)
    _sum_over(expert, group=groups.edp, scale=groups.num_ranks)


def global_norm(
    dense: Iterable[torch.Tensor], expert: Iterable[torch.Tensor], *, groups: ParallelGroups
) -> torch.Tensor:
    """Return the float32 L2 norm of all gradients of the model; a collective of the "ep" group.

    Dense gradients are the same on all ranks. ``expert`` has the gradients of this rank's experts.
    ``GroupedExperts.without_replicas`` must remove replicas, so that each expert counts once.
    """
    dense_sum, expert_sum = _sum_of_squares(dense), _sum_of_squares(expert)
    if groups.ep is not None and expert_sum is not None:
        dist.all_reduce(expert_sum, group=groups.ep)
    sums = [value for value in (dense_sum, expert_sum) if value is not None]
    if not sums:
        return torch.zeros(())
    return torch.stack(sums).sum().sqrt()


def _sum_of_squares(gradients: Iterable[torch.Tensor]) -> torch.Tensor | None:
    # Norms are float32: a bfloat16 norm would be rounded to 8 significant bits.
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    return torch.stack(norms).square().sum() if norms else None


def _sum_over(
    gradients: Iterable[torch.Tensor], *, group: dist.ProcessGroup | None, scale: int
) -> None:
    """Sum gradients over the group, if any, in buckets, and divide by ``scale``, in place."""
    waiting = list(gradients)[::-1]
    if group is None:
        if scale > 1 and waiting:
            torch._foreach_div_(waiting, scale)  # pyright: ignore[reportPrivateImportUsage]
        return
    while waiting:
        bucket: list[torch.Tensor] = []
        num_bytes = 0
        while waiting and num_bytes < BUCKET_BYTES:
            bucket.append(waiting.pop())
            num_bytes += bucket[-1].nbytes
        # One all-reduce for the bucket, because each all-reduce has a fixed latency.
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, group=group)
        flat /= scale
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


@dataclass(frozen=True, kw_only=True)
class World:
    """Rank, device and store of this process in a run; ``join_world`` yields it."""

    rank: int
    num_ranks: int
    device: torch.device
    store: Store | None = None  # store of the rendezvous; None without a launcher

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def is_launched() -> bool:
    """Return whether a launcher (such as torchrun) set RANK and WORLD_SIZE for this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_launcher() -> None:
    """Raise ``ValueError`` if a launcher's environment variables are wrong or incomplete."""
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if not given:
        return
    if len(given) == 1:
        (name,) = given
        raise ValueError(
            f"environment variable {name} ({os.environ[name]}) must be set together with RANK and "
            "WORLD_SIZE, as torchrun does, or be unset"
        )
    num_ranks = _read_number("WORLD_SIZE", least=1)
    _read_number("RANK", least=0, below=num_ranks)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(f"environment variable {name} must be set where RANK is")
    _read_number("MASTER_PORT", least=0, below=1 << 16)
    for name, least in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        if name in os.environ:
            _read_number(name, least=least)


def _read_number(name: str, *, least: int, below: int | None = None) -> int:
    text = os.environ[name]
    # isdecimal accepts digits of other scripts, and int raises another error for very long texts.
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
    if value < least or (below is not None and value >= below):
        rule = f"at least {least}" + ("" if below is None else f" and below {below}")
        raise ValueError(f"environment variable {name} ({text}) must be an integer, {rule}")
    return value


def pick_device(choice: str) -> torch.device:
    """Return this rank's device for "cpu", "cuda" (GPU LOCAL_RANK) or "auto" (CUDA if any)."""
    if choice not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device ({choice}) must be one of auto, cpu, cuda")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "cpu" or (choice == "auto" and num_devices == 0):
        return torch.device("cpu")
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local_size > num_devices:  # all ranks of a host have equal numbers, so all raise
        raise ValueError(f"nproc ({local_size}) must be at most the number of GPUs ({num_devices})")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def join_world(device_choice: str, *, timeout_s: float = 600.0) -> Iterator[World]:
    """Create the process group (NCCL on CUDA, else gloo), yield a ``World``, destroy the group.

    Without a launcher there is one rank and no group. After an error, the group is not destroyed.
    ``device_choice`` is as for ``pick_device``, and ``timeout_s`` the time limit of a collective.
    """
    check_launcher()
    device = pick_device(device_choice)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not is_launched():
        yield World(rank=0, num_ranks=1, device=device)
        return
    store, rank, num_ranks = next(rendezvous("env://"))
    # ``peers.time_limit`` reads a group's timeout from its store, so set it in the store too.
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("world", store),  # separates the group's keys from other keys
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    yield World(rank=rank, num_ranks=num_ranks, device=device, store=store)
    dist.destroy_process_group()  # not in ``finally``: it would wait for lost ranks
