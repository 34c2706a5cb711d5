"""Checks that every symmetric heap must pass; all ranks call them together."""

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from halley.distributed.peers import SHM
from halley.symm_mem.heap import ALIGNMENT, AbstractSymmHeap, SymmTensor


_SEGMENT = f"{SHM}/#"  # /proc shows unnamed files so
TOO_MANY = 2**50  # number of bytes, more than any machine has

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def copy_bytes(target: int, source: int, num_bytes: int, *, device: torch.device) -> None:
    """Copy between addresses of this rank, as a kernel does with ``ptrs_W``."""
    if device.type == "cpu":
        ctypes.memmove(target, source, num_bytes)
        return
    driver = ctypes.CDLL("libcuda.so.1")
    arguments = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes)
    assert driver.cuMemcpyDtoD_v2(*arguments) == 0
    torch.cuda.synchronize(device)


def write(x: torch.Tensor, address: int) -> None:
    """Store a contiguous tensor at an address."""
    copy_bytes(address, x.data_ptr(), x.nbytes, device=x.device)


def read(like: torch.Tensor, address: int) -> torch.Tensor:
    """Return a tensor of this shape and dtype from an address."""
    x = torch.empty_like(like)
    copy_bytes(x.data_ptr(), address, x.nbytes, device=x.device)
    return x


def check_all_to_all(heap: AbstractSymmHeap, tensor: SymmTensor) -> None:
    """Check that all copies ``(num_ranks, ...)`` are zero and that each rank can write to each."""
    local, addresses = tensor.local, tensor.ptrs_W.tolist()
    assert tensor.ptrs_W.dtype == torch.int64
    assert tensor.ptrs_W.device == local.device == heap.device
    assert len(addresses) == len(set(addresses)) == heap.num_ranks
    assert addresses[heap.rank] == local.data_ptr()
    assert all(address % ALIGNMENT == 0 for address in addresses)
    assert local.is_contiguous()
    for address in addresses:
        assert not read(local, address).any()
    heap.barrier()

    row_bytes = local[0].nbytes
    for peer, address in enumerate(addresses):
        row = torch.full_like(local[0], 10 * heap.rank + peer + 1)
        write(row, address + heap.rank * row_bytes)
    heap.barrier()
    for writer in range(heap.num_ranks):
        want = torch.full_like(local[0], 10 * writer + heap.rank + 1)
        assert torch.equal(local[writer], want)
    for peer, address in enumerate(addresses):
        want = torch.full_like(local[0], 10 * heap.rank + peer + 1)
        assert torch.equal(read(local, address)[heap.rank], want)
    heap.barrier()


def check_several_tensors(heap: AbstractSymmHeap) -> None:
    """Check several shapes and dtypes at once, ``num_bytes``, and reuse of freed memory."""
    tensors, num_bytes = [], 0
    for i, dtype in enumerate(DTYPES):
        shape = (heap.num_ranks, 3 + 100 * i, i + 1)
        tensors.append(heap.zeros(shape, dtype))
        num_bytes += heap.num_ranks * (3 + 100 * i) * (i + 1) * dtype.itemsize
        assert heap.num_bytes == num_bytes
        assert tensors[-1].local.shape == shape
        assert tensors[-1].local.dtype == dtype
    for tensor in tensors:
        check_all_to_all(heap, tensor)
    for i in (3, 0):
        num_bytes -= tensors[i].local.nbytes
        heap.free(tensors[i])
        assert heap.num_bytes == num_bytes
    for tensor in tensors[1:3]:  # tensors beside a freed one keep their values
        assert torch.equal(tensor.local[0].unique(), tensor.local.new_tensor([heap.rank + 1]))
        heap.free(tensor)
    del tensors, tensor
    for _ in range(2):
        again = heap.zeros((heap.num_ranks, 50), torch.float32)
        check_all_to_all(heap, again)
        heap.free(again)
        del again


def check_scalar(heap: AbstractSymmHeap) -> None:
    """Check a tensor without dimensions."""
    scalar = heap.zeros((), torch.float64)
    assert (scalar.local.shape, scalar.local.nbytes) == ((), 8)
    write(torch.ones_like(scalar.local), scalar.ptrs_W.tolist()[heap.rank])
    assert scalar.local.item() == 1.0
    heap.free(scalar)


def check_wrong_calls(heap: AbstractSymmHeap) -> None:
    """Check that wrong calls are refused and leave the heap usable."""
    with pytest.raises(ValueError, match=r"shape \(\(-1,\)\) must have sizes of at least 1"):
        heap.zeros((-1,), torch.float32)
    tensor = heap.zeros((heap.num_ranks,), torch.int32)
    with pytest.raises(ValueError, match="tensor must be one that this heap made and did not free"):
        heap.free(SymmTensor(local=tensor.local, ptrs_W=tensor.ptrs_W))
    heap.free(tensor)
    with pytest.raises(ValueError, match="tensor must be one that this heap made and did not free"):
        heap.free(tensor)


def check_failed_allocation(heap: AbstractSymmHeap) -> None:
    """Check that all ranks refuse a tensor that is too large, and that the heap stays usable."""
    kept = heap.zeros((heap.num_ranks,), torch.int32)
    held = heap.num_bytes
    message = (
        rf"rank 0 of {heap.num_ranks} has no {TOO_MANY} bytes of memory "
        rf"besides the {held} symmetric ones it holds: .+"
    )
    with pytest.raises(MemoryError, match=message):
        heap.zeros((TOO_MANY,), torch.uint8)
    assert heap.num_bytes == held
    check_all_to_all(heap, kept)
    heap.free(kept)


def check_barrier(heap: AbstractSymmHeap) -> None:
    """Check, several times, that a load after the barrier reads a store before it."""
    tensor = heap.zeros((64,), torch.int64)
    addresses = tensor.ptrs_W.tolist()
    peer = (heap.rank + 1) % heap.num_ranks
    for i in range(30):
        write(torch.full_like(tensor.local, 100 * heap.rank + i), addresses[peer])
        heap.barrier()
        writer = (heap.rank - 1) % heap.num_ranks
        assert torch.equal(tensor.local, torch.full_like(tensor.local, 100 * writer + i))
        heap.barrier()
    heap.free(tensor)


def check_close(heap: AbstractSymmHeap) -> None:
    """Check that closing frees all tensors and refuses further calls."""
    tensor = heap.zeros((5,), torch.float32)
    heap.zeros((7,), torch.float16)
    assert heap.num_bytes == 34
    heap.close()
    assert heap.num_bytes == 0
    heap.close()
    with pytest.raises(RuntimeError, match="the symmetric heap is closed"):
        heap.zeros((1,), torch.float32)
    with pytest.raises(ValueError, match="tensor must be one"):
        heap.free(tensor)


def check_inference_mode(heap: AbstractSymmHeap) -> None:
    """Check that a tensor made in inference mode can be written outside it."""
    with torch.inference_mode():
        tensor = heap.zeros((3,), torch.float32)
    assert not tensor.local.is_inference()
    tensor.local.fill_(1.0)
    heap.free(tensor)


# check_close is not in the list, because it closes the heap.
CHECKS = (
    check_several_tensors, check_scalar, check_wrong_calls, check_failed_allocation, check_barrier,
    check_inference_mode,
)  # fmt: skip


def check_heap(heap: AbstractSymmHeap) -> None:
    """Run all checks and close the heap."""
    for check in CHECKS:
        check(heap)
        assert heap.num_bytes == 0, check.__name__
    check_close(heap)


def segments() -> tuple[int, int]:
    """Return how many shared-memory files this process maps, and how many it has open.

    A mapping counts as open too: Python's mmap keeps a descriptor.
    """
    gc.collect()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if _SEGMENT in line]
    is_open = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a gloo thread closed it meanwhile
            is_open += _SEGMENT in str(link.readlink())
    return len(mapped), is_open


@contextlib.contextmanager
def subgroups(*members: list[int]) -> Iterator[list[dist.ProcessGroup]]:
    """Create groups of these ranks, yield those of this rank, and destroy them."""
    groups = [dist.new_group(ranks) for ranks in members]
    mine = [group for group in groups if isinstance(group, dist.ProcessGroup)]
    yield mine
    dist.barrier()  # all ranks must have connected before one destroys a group
    for group in mine:
        dist.destroy_process_group(group)
