"""The symmetric heap in GPU memory passes the checks of all heaps; its barrier; groups."""

import os

import pytest
import torch
import torch.distributed as dist

from halley.distributed.peers import MAY_SHARE, peer_access
from halley.symm_mem.heap import CudaHeap, _multicast_off, open_heap
from tests.gpus import NUM_GPUS, device_of, needs_gpu
from tests.symm_mem.heap_case import (
    CHECKS,
    check_all_to_all,
    check_close,
    check_heap,
    read,
    subgroups,
)


@pytest.mark.parametrize("before", [None, "0"])
def test_multicast_variable_is_restored(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with _multicast_off():
        assert os.environ[name] == "1"
    assert os.environ.get(name) == before


@needs_gpu
def test_single_process_needs_no_group() -> None:
    assert peer_access(None, torch.device("cuda")) == ""
    heap = open_heap(None, torch.device("cuda", 0))
    assert isinstance(heap, CudaHeap)
    check_heap(heap)


def _check(rank: int, num_ranks: int, number: int) -> None:
    device = device_of(rank)
    heap = CudaHeap(dist.group.WORLD, device)
    assert (heap.rank, heap.num_ranks, heap.device) == (rank, num_ranks, device)
    (*CHECKS, check_close)[number](heap)
    heap.close()


@needs_gpu
@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize(
    "number", range(len(CHECKS) + 1), ids=[check.__name__ for check in (*CHECKS, check_close)]
)
def test_heap_contract(run_ranks, number: int, num_ranks: int) -> None:
    run_ranks(_check, num_ranks, number)


def _wait_for_work(rank: int, num_ranks: int) -> None:
    heap = CudaHeap(dist.group.WORLD, device_of(rank))
    tensor = heap.zeros((1 << 20,), torch.float32)
    for i in range(1, 6):
        torch.cuda._sleep(20_000_000)  # the stream is busy for about 10 ms
        tensor.local.fill_(i)
        heap.barrier()
        assert torch.cuda.current_stream().query()
        peer = (rank + 1) % num_ranks
        found = read(tensor.local, tensor.ptrs_W.tolist()[peer])
        assert torch.equal(found, torch.full_like(found, i))
        heap.barrier()
    heap.close()


@needs_gpu
def test_barrier_waits_for_the_work_of_the_current_stream(run_ranks) -> None:
    run_ranks(_wait_for_work, 2)


def _check_subgroups(rank: int, num_ranks: int) -> None:
    device = device_of(rank)
    with subgroups([0, 1], [1, 2]) as groups:
        heaps = [CudaHeap(group, device) for group in groups]
        for heap in heaps:
            for size in (5, 7, 300_000):
                check_all_to_all(heap, heap.zeros((2, size), torch.float32))
        for heap in heaps:
            check_all_to_all(heap, heap.zeros((2, 9), torch.int32))
            heap.close()


@pytest.mark.skipif(NUM_GPUS < 3, reason="torch's rendezvous hangs where groups share a GPU")
def test_groups_that_share_a_rank_have_separate_heaps(run_ranks) -> None:
    run_ranks(_check_subgroups, 3)


def _share_a_gpu(rank: int, num_ranks: int) -> None:
    os.environ.pop(MAY_SHARE, None)
    with pytest.raises(RuntimeError, match="no symmetric memory: ranks 0 and 1 share one GPU"):
        CudaHeap(dist.group.WORLD, torch.device("cuda", 0))


@needs_gpu
def test_ranks_on_one_gpu_are_refused(run_ranks) -> None:
    run_ranks(_share_a_gpu, 2)
