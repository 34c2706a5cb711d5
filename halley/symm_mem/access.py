"""Find out whether ranks can address each other's memory, and over which link."""

import ctypes
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from halley.distributed.peers import all_gather_objects, host_name


SHM = Path("/dev/shm")  # a folder of Linux whose files are shared memory

# If this environment variable of PyTorch is 1, ranks may share a GPU, which runs them alternately.
# Sharing is slow, and only for tests on a machine with one GPU.
MAY_SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


@dataclass(frozen=True, kw_only=True)
class MemoryLocation:
    """Host and device of a rank's memory, and the other GPUs whose memory its GPU can address."""

    host: str
    boot_id: str  # of the host's kernel, as two hosts may have one name; "" if unknown
    device: str  # "cpu" or "cuda:<index>"
    # st_dev of /dev/shm, equal only if ranks share /dev/shm; None on a GPU or without /dev/shm.
    shm_id: int | None = None
    uuid: str = ""  # uuid of the GPU
    reachable: tuple[str, ...] = ()  # uuids of the GPUs whose memory this GPU can address
    may_share: bool = False  # the rank may use the GPU of another rank, see ``MAY_SHARE``


def peer_access(group: dist.ProcessGroup | None, device: torch.device | str) -> str:
    """Return "" if all ranks can address each other's memory, else the reason why not. Collective.

    All ranks of the group get the same answer, which does not change while the processes live.
    With NCCL, a CUDA device must be the current one.
    """
    operation = "the check of peer access"
    location = _locate(torch.device(device))
    return find_problem(all_gather_objects(location, group=group, operation=operation))


def find_problem(locations_W: list[MemoryLocation]) -> str:
    """Return the first reason why these ranks cannot address each other's memory; "" if none."""
    for rank, location in enumerate(locations_W):
        if location.device == "cpu" and location.shm_id is None:
            return f"rank {rank} has no shared memory: {location.host} has no {SHM}"
    for (rank, here), (peer, there) in itertools.permutations(enumerate(locations_W), 2):
        both = f"ranks {rank} and {peer}"
        if (here.host, here.boot_id) != (there.host, there.boot_id):
            return f"{both} are on different hosts, {here.host} and {there.host}"
        if here.device.partition(":")[0] != there.device.partition(":")[0]:
            return f"{both} are on different kinds of device, {here.device} and {there.device}"
        if here.shm_id != there.shm_id:
            return f"{both} have different {SHM}: they are in different containers"
        if here.device == "cpu":
            continue
        if here.uuid == there.uuid:
            if here.may_share and there.may_share:
                continue
            return f"{both} share one GPU, {here.device} and {there.device}"
        if here.device == there.device:  # torch's symmetric memory would confuse them
            return (
                f"{both} both call their GPU {here.device}: let every rank see all GPUs "
                "(CUDA_VISIBLE_DEVICES)"
            )
        if there.uuid not in here.reachable:
            return (
                f"no peer access from {here.device} of rank {rank} to {there.device} of rank {peer}"
            )
    return ""


def link_kind(device: torch.device | str) -> str:
    """Return the link from a GPU to all other visible GPUs, "NVLink" or "PCIe"; "" without others.

    Only NVLink has native peer atomics. If the links differ, the result is "PCIe"; on a CPU, "".
    """
    device = torch.device(device)
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if num_gpus < 2:
        return ""
    driver, has = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    driver.cuInit(0)  # a caller may run before torch initializes CUDA
    index = torch.cuda.current_device() if device.index is None else device.index
    for peer in range(num_gpus):
        if peer != index:
            code = driver.cuDeviceGetP2PAttribute(ctypes.byref(has), _NATIVE_ATOMICS, index, peer)
            if code:
                raise RuntimeError(f"cuDeviceGetP2PAttribute failed with CUDA error {code}")
            if not has.value:
                return "PCIe"
    return "NVLink"


def _locate(device: torch.device) -> MemoryLocation:
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    host: dict[str, Any] = {"host": host_name(), "boot_id": boot_id}
    if device.type == "cpu":
        # Without /dev/shm, use None: ``find_problem`` then reports this on all ranks.
        shm_id = SHM.stat().st_dev if SHM.is_dir() else None
        return MemoryLocation(**host, device="cpu", shm_id=shm_id)
    index = torch.cuda.current_device() if device.index is None else device.index
    reachable = tuple(
        _uuid(peer)
        for peer in range(torch.cuda.device_count())
        if peer != index and torch.cuda.can_device_access_peer(index, peer)
    )
    gpu = host | {"device": f"cuda:{index}", "uuid": _uuid(index), "reachable": reachable}
    return MemoryLocation(**gpu, may_share=os.environ.get(MAY_SHARE) == "1")


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
