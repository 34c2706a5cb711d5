"""The symmetric heap: tensors with one copy per rank, each copy addressable by every rank.

The heap owns all memory: a tensor lives until ``free`` or ``close``, which all ranks call together.
Any rank may read and write any copy. Only ``zeros``, ``free`` and ``barrier`` synchronize the
ranks. Kernels must order all other accesses with flags of their own.

    addresses on rank 0         memory            addresses on rank 1
    ptrs_W[0]  ------------>  copy of rank 0  <------------  ptrs_W[0]
    ptrs_W[1]  ------------>  copy of rank 1  <------------  ptrs_W[1]

``peer_access`` finds out whether the ranks of a group can address each other's memory at all.
"""

import abc
import ctypes
import itertools
import math
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from halley.distributed.peers import all_gather_objects


T = TypeVar("T")
RangeHook = Callable[[int, int], None]  # address, num_bytes

ALIGNMENT = 256  # bytes of a base address, more than any load or TMA descriptor needs
SHM = Path("/dev/shm")  # files here are shared memory on Linux

# An environment variable of PyTorch. With value 1, several ranks may share a GPU, which then runs
# them alternately. It is slow, and serves tests on a machine with one GPU.
MAY_SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmTensor:
    """A symmetric tensor: one copy per rank, each copy addressable by every rank.

    A kernel adds offsets to ``ptrs_W[peer]`` as to a pointer of its own. The code that uses the
    tensor defines which rank writes to which copy, and which rank waits. Equality is identity.

    Attributes:
        local: this rank's copy, contiguous, aligned to ``ALIGNMENT`` bytes.
        ptrs_W: address of each rank's copy, this rank included, int64, on the device of ``local``.
            The addresses are valid on this rank only: each rank maps the copies at other addresses.
    """

    local: torch.Tensor
    ptrs_W: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The memory of one tensor as a heap allocated it.

    Attributes:
        local: this rank's copy, uint8 ``(num_bytes,)``.
        addresses_W: address of each rank's copy.
        hook_addresses: addresses of the copies for which this rank calls its hooks.
        owner: an object that keeps the addresses valid as long as it lives.
    """

    local: torch.Tensor
    addresses_W: list[int]
    hook_addresses: list[int]
    owner: object = None


class AbstractSymmHeap(abc.ABC):
    """Allocates symmetric tensors for the ranks of one group. Subclasses are final.

    ``zeros``, ``free``, ``barrier`` and ``close`` are collectives: all ranks call them in the same
    order. A subclass defines how memory is allocated and how ranks wait for each other.

    Attributes:
        rank, num_ranks: in the group of the heap.
        device: device of the tensors.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        device: torch.device,
        on_map: RangeHook | None = None,
        on_unmap: RangeHook | None = None,
    ) -> None:
        """Create an empty heap.

        Args:
            on_map, on_unmap: called with the address and number of bytes of each copy that becomes
                addressable, or stops being so. They tell the interpreter's sanitizer which
                addresses are valid.
        """
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self._on_map = on_map
        self._on_unmap = on_unmap
        self._segments: dict[SymmTensor, Segment] = {}
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's copies, without the rounding of the allocator."""
        return sum(segment.local.nbytes for segment in self._segments.values())

    # Without this, tensors that are made during evaluation could not be used in training.
    @torch.inference_mode(mode=False)
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmTensor:
        """Return a tensor of zeros. Collective; on return, every rank reads zeros in all copies.

        Args:
            shape: shape of one copy, the same on all ranks; () is one element.

        Raises:
            ValueError: a size is not positive.
            MemoryError: a rank has too little memory. Raised on all ranks; the heap stays usable.
            RuntimeError: the ranks asked for different numbers of bytes, or the heap is closed.
        """
        if any(size < 1 for size in shape):
            raise ValueError(f"shape ({tuple(shape)}) must have sizes of at least 1")
        if self._closed:
            raise RuntimeError("the symmetric heap is closed")
        segment = self._allocate(math.prod(shape) * dtype.itemsize)
        assert all(address % ALIGNMENT == 0 for address in segment.addresses_W)
        tensor = SymmTensor(
            local=segment.local.view(dtype).view(shape),
            ptrs_W=torch.tensor(segment.addresses_W, dtype=torch.int64, device=self.device),
        )
        self._segments[tensor] = segment
        self._call_hook(self._on_map, segment)
        self.barrier()
        return tensor

    def free(self, tensor: SymmTensor) -> None:
        """Free a tensor: the addresses in ``ptrs_W`` become invalid. Collective.

        The memory of this rank's copy lives until the last reference to ``tensor.local`` ends.

        Raises:
            ValueError: the tensor is not from this heap, or is already freed.
        """
        if tensor not in self._segments:
            raise ValueError("tensor must be one that this heap made and did not free")
        self.barrier()
        self._drop(tensor)

    def close(self) -> None:
        """Free all remaining tensors. A second call does nothing. Collective."""
        if self._closed:
            return
        self._closed = True
        self.barrier()
        for tensor in list(self._segments):
            self._drop(tensor)

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks have called this and have finished earlier work of their streams."""

    @abc.abstractmethod
    def _allocate(self, num_bytes: int) -> Segment:
        """Return zeroed memory on every rank; a failure on one rank is raised on all."""

    @abc.abstractmethod
    def _gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""

    def on_all_ranks(self, num_bytes: int, act: Callable[[], T]) -> T:
        """Return the result of ``act``; if it fails on any rank, raise on all ranks. Collective.

        Otherwise the other ranks would wait forever for the rank that failed.

        Args:
            num_bytes: bytes that ``act`` allocates on each rank.

        Raises:
            MemoryError: ``act`` failed on a rank.
            RuntimeError: the ranks asked for different numbers of bytes.
        """
        failure: Exception | None = None
        result: list[T] = []
        try:
            result.append(act())
        except (OSError, OverflowError, RuntimeError, MemoryError) as error:
            failure = error
        answers = self._gather((num_bytes, "" if failure is None else str(failure)))
        sizes = [size for size, _ in answers]
        if len(set(sizes)) > 1:
            raise RuntimeError(f"num_bytes ({sizes}, by rank) must be the same on all ranks")
        for rank, (_, problem) in enumerate(answers):
            if problem:
                raise MemoryError(
                    f"rank {rank} of {self.num_ranks} has no {num_bytes} bytes of memory besides "
                    f"the {self.num_bytes} symmetric ones it holds: {problem}"
                ) from failure
        return result[0]

    def _drop(self, tensor: SymmTensor) -> None:
        self._call_hook(self._on_unmap, self._segments.pop(tensor))

    def _call_hook(self, hook: RangeHook | None, segment: Segment) -> None:
        if hook is not None:
            for address in segment.hook_addresses:
                hook(address, segment.local.nbytes)


@dataclass(frozen=True, kw_only=True)
class MemoryLocation:
    """The location of a rank's memory.

    Attributes:
        host: name of the machine.
        boot_id: boot id of the machine's kernel, because two machines may have the same name; "" if
            the kernel has none.
        device: "cpu" or "cuda:<index>".
        shm_id: device number of ``/dev/shm`` on a CPU rank, because each container may have its own
            ``/dev/shm``; None without shared memory.
        uuid: uuid of the GPU; "" on a CPU.
        reachable: uuids of the GPUs whose memory this one can address.
        may_share: the rank may use the GPU of another rank, see ``MAY_SHARE``.
    """

    host: str
    boot_id: str
    device: str
    shm_id: int | None = None
    uuid: str = ""
    reachable: tuple[str, ...] = ()
    may_share: bool = False


def peer_access(group: dist.ProcessGroup | None, device: torch.device | str) -> str:
    """Return "" if every rank can address every other rank's memory, else the reason. Collective.

    All ranks of the group get the same answer. It does not change while the processes live, so one
    call is enough.

    Args:
        group: the ranks; None for a single process.
        device: this rank's device; with NCCL a CUDA device must be the current one.
    """
    location = _locate(torch.device(device))
    return find_problem(
        all_gather_objects(location, group=group, operation="the check of peer access")
    )


def find_problem(locations_W: list[MemoryLocation]) -> str:
    """Return the reason why ranks with these memory locations cannot address each other, or ""."""
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
        if here.device == there.device:  # torch identifies a GPU by its index
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
    """Return the link from a GPU to the other visible GPUs: "NVLink", "PCIe", or "" without others.

    If the links differ, the result is "PCIe". Native peer atomics show that a link is NVLink,
    because PCIe has none.

    Raises:
        RuntimeError: the driver call failed.
    """
    device = torch.device(device)
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if num_gpus < 2:
        return ""
    driver, has = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    driver.cuInit(0)  # some callers run before torch initializes CUDA
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
    host = socket.gethostname()
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    if device.type == "cpu":
        # A missing folder is no error here: the ranks must report it together.
        shm_id = SHM.stat().st_dev if SHM.is_dir() else None
        return MemoryLocation(host=host, boot_id=boot_id, device="cpu", shm_id=shm_id)
    index = torch.cuda.current_device() if device.index is None else device.index
    return MemoryLocation(
        host=host,
        boot_id=boot_id,
        device=f"cuda:{index}",
        uuid=_uuid(index),
        reachable=tuple(
            _uuid(peer)
            for peer in range(torch.cuda.device_count())
            if peer != index and torch.cuda.can_device_access_peer(index, peer)
        ),
        may_share=os.environ.get(MAY_SHARE) == "1",
    )


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
