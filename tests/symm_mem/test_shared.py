"""The symmetric heap in shared memory: checks of all heaps, sub-groups, and no leaked files."""

import contextlib
import os
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from halley.distributed import peers
from halley.distributed.peers import SHM
from halley.interpreter import registered_memory
from halley.symm_mem import heap as shared
from halley.symm_mem.heap import SharedHeap, open_heap
from tests.symm_mem.heap_case import check_all_to_all, check_heap, read, segments, subgroups


def _check(rank: int, num_ranks: int) -> None:
    heap = SharedHeap(dist.group.WORLD if num_ranks > 1 else None)
    assert (heap.rank, heap.num_ranks, heap.device) == (rank, num_ranks, torch.device("cpu"))
    check_heap(heap)
    del heap
    assert segments() == (0, 0)


def test_heap_passes_the_checks_of_all_heaps(run_ranks) -> None:
    run_ranks(_check, 4)


def test_single_process_needs_no_group() -> None:
    _check(0, 1)


def _check_subgroups(rank: int, num_ranks: int) -> None:
    """Put rank 1 in two groups, in which it has different ranks and tensors."""
    with subgroups([0, 1], [1, 2]) as groups:
        heaps = [SharedHeap(group) for group in groups]
        assert [heap.rank for heap in heaps] == [[0], [1, 0], [1]][rank]
        kept = []
        for heap in heaps:
            kept.append(heap.zeros((2, 5), torch.float32))
            check_all_to_all(heap, kept[-1])
        if rank != 0:  # the group of ranks 1 and 2 has one more tensor
            check_all_to_all(heaps[-1], heaps[-1].zeros((2, 3), torch.int64))
        for heap, tensor in zip(heaps, kept, strict=True):
            want = [[heap.rank + 1.0] * 5, [heap.rank + 11.0] * 5]
            assert tensor.local.tolist() == want  # the other group has not written to it
            check_all_to_all(heap, heap.zeros((2, 1), torch.uint8))
        assert [heap.num_bytes for heap in heaps] == [[42], [42, 90], [90]][rank]
        for heap in heaps:
            heap.close()


def test_groups_that_share_a_rank_have_separate_heaps(run_ranks) -> None:
    run_ranks(_check_subgroups, 3)


def _check_registered(rank: int, num_ranks: int) -> None:
    heap = open_heap(dist.group.WORLD, torch.device("cpu"))
    assert isinstance(heap, SharedHeap)
    before = dict(registered_memory)
    small, large = heap.zeros((3,), torch.float32), heap.zeros((5, 7), torch.int64)
    of_large = before | {(address, 280): 1 for address in large.ptrs_W.tolist()}
    of_small = {(address, 12): 1 for address in small.ptrs_W.tolist()}
    assert registered_memory == of_large | of_small
    heap.free(small)
    assert registered_memory == of_large
    heap.close()
    assert registered_memory == before


def test_kernels_of_every_rank_may_access_all_copies(run_ranks) -> None:
    run_ranks(_check_registered, 2)


def test_device_without_a_heap_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device \(meta\) must be a cpu or a cuda device"):
        open_heap(None, torch.device("meta"))


def _count_segments(rank: int, num_ranks: int) -> None:
    heap = SharedHeap(dist.group.WORLD)
    first, second = heap.zeros((3,), torch.int32), heap.zeros((4,), torch.int32)
    assert segments() == (2 * num_ranks, 2 * num_ranks)
    view = first.local[1:]
    heap.free(first)
    # The peers' copies are unmapped; the view keeps this rank's copy.
    assert segments() == (num_ranks + 1, num_ranks + 1)
    view.fill_(7)
    assert first.local.tolist() == [0, 7, 7]
    del first, view
    assert segments() == (num_ranks, num_ranks)
    del second
    heap.close()
    assert segments() == (0, 0)


def test_mappings_end_with_the_tensors(run_ranks) -> None:
    run_ranks(_count_segments, 2)


def _fail_on_rank_1(rank: int, num_ranks: int, name: str) -> None:
    heap = SharedHeap(dist.group.WORLD)

    message = (
        r"rank 1 of 2 has no 24 bytes of memory besides the 0 symmetric ones it holds: "
        r"\[Errno 28\] No space left on device"
    )
    fail = mock.Mock(side_effect=OSError(28, "No space left on device"))
    failing = mock.patch.object(shared, name, fail) if rank == 1 else contextlib.nullcontext()
    with failing, pytest.raises(MemoryError, match=message):
        heap.zeros((2, 3), torch.float32)
    assert segments() == (0, 0)
    check_all_to_all(heap, heap.zeros((2, 3), torch.float32))
    heap.close()


@pytest.mark.parametrize("name", ["_open_segment", "_map"])
def test_failed_allocation_on_one_rank_raises_on_all(run_ranks, name: str) -> None:
    run_ranks(_fail_on_rank_1, 2, name)


def _ask_for_different_sizes(rank: int, num_ranks: int) -> None:
    heap = SharedHeap(dist.group.WORLD)
    with pytest.raises(RuntimeError, match=r"num_bytes \(\[4, 8\], by rank\) must be the same"):
        heap.zeros((1 + rank,), torch.float32)
    assert segments() == (0, 0)
    heap.close()


def test_different_sizes_are_refused(run_ranks) -> None:
    run_ranks(_ask_for_different_sizes, 2)


_LARGE = 64 * 2**20  # bytes of a large tensor


def _die_in_zeros(rank: int, num_ranks: int, folder: str) -> None:
    """Kill rank 1 after it has allocated a file and before it maps the files of all ranks."""
    heap = SharedHeap(dist.group.WORLD)
    kept = heap.zeros((_LARGE,), torch.uint8)

    def die(path: str, num_bytes: int) -> torch.Tensor:
        assert Path(path).stat().st_nlink == 0  # the file has no name
        assert segments() == (num_ranks, num_ranks + 1)
        Path(folder, "was here").touch()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    if rank == 1:
        shared._map = die
    try:
        heap.zeros((_LARGE,), torch.uint8)
    finally:
        assert kept.local.sum() == 0
        del kept, heap


def _die_between_calls(rank: int, num_ranks: int, folder: str) -> None:
    """Kill rank 1 after all ranks have mapped a tensor; rank 0 can still use rank 1's memory."""
    heap = SharedHeap(dist.group.WORLD)
    tensor = heap.zeros((_LARGE,), torch.uint8)
    tensor.local.fill_(rank + 1)
    peers._REPORT_WAIT_S = 0.1  # shorter than the time after which the pool kills rank 0
    if rank == 1:
        heap.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):  # noqa: PT012
        heap.barrier()  # the first barrier may already fail
        heap.barrier()
    of_rank_1 = read(tensor.local, tensor.ptrs_W.tolist()[1])
    assert (of_rank_1.min().item(), of_rank_1.max().item()) == (2, 2)
    Path(folder, "was here").touch()


def test_killed_rank_leaves_no_shared_memory(run_ranks, tmp_path: Path) -> None:
    before = shutil.disk_usage(SHM).used
    for fn in (_die_in_zeros, _die_between_calls):
        with pytest.raises(AssertionError, match=r"--- rank 1: died with exit code -9"):
            run_ranks(fn, 2, str(tmp_path))
        (tmp_path / "was here").unlink()
        # All processes of the pool are dead. Tests of other processes may use a little.
        assert shutil.disk_usage(SHM).used < before + _LARGE // 2
