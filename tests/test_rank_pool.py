"""The pool that runs tests on several ranks: its results, and its message when a rank fails."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.rank_pool import RunRanks


def _all_reduce(rank: int, num_ranks: int, x: torch.Tensor) -> torch.Tensor:
    x.mul_(rank + 1)
    dist.all_reduce(x)
    return x


def _state(rank: int, num_ranks: int) -> tuple[int, int, str, bool]:
    threads = os.environ["OMP_NUM_THREADS"]
    return os.getpid(), torch.get_num_threads(), threads, torch.initial_seed() == rank


def _fail_on_rank_1(rank: int, num_ranks: int, others_wait: bool) -> None:
    assert rank != 1, "one is wrong"
    if others_wait:
        dist.barrier()


def _die_on_rank_1(rank: int, num_ranks: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _hang_on_rank_0(rank: int, num_ranks: int) -> None:
    while rank == 0:
        time.sleep(0.01)


def _warn(rank: int, num_ranks: int) -> None:
    warnings.warn("soon gone", DeprecationWarning, stacklevel=1)


def test_ranks_are_processes_that_stay_with_one_thread_and_their_own_seed(run_ranks) -> None:
    states = run_ranks(_state, 2)
    assert len({os.getpid(), *(pid for pid, *_ in states)}) == 3
    assert [state[1:] for state in states] == [(1, "1", True)] * 2
    assert run_ranks(_state, 2) == states


def test_all_reduce_sums_copies_of_the_argument(run_ranks: RunRanks) -> None:
    x = torch.arange(3.0)
    for y in run_ranks(_all_reduce, 2, x):
        torch.testing.assert_close(y, torch.tensor([0.0, 3.0, 6.0]), rtol=0, atol=0)
    torch.testing.assert_close(x, torch.arange(3.0), rtol=0, atol=0)


@pytest.mark.parametrize(("others_wait", "rank_0"), [(False, "returned"), (True, "did not return")])
def test_failure_names_the_rank_and_ends_the_wait_of_others(run_ranks, others_wait, rank_0) -> None:
    begin = time.monotonic()
    first = "_fail_on_rank_1 failed, first on rank 1 of 2"
    with pytest.raises(AssertionError, match=first) as info:
        run_ranks(_fail_on_rank_1, 2, others_wait, timeout_s=60.0)
    assert time.monotonic() - begin < 30.0
    assert f"--- rank 0: {rank_0}" in str(info.value)
    assert "AssertionError: one is wrong" in str(info.value)
    assert ("in barrier" in str(info.value)) == others_wait  # the stack of rank 0


def test_exit_code_of_a_killed_rank_is_shown_and_the_next_run_works(run_ranks: RunRanks) -> None:
    before = run_ranks(_state, 2)
    with pytest.raises(AssertionError, match=r"--- rank 1: died with exit code -9"):
        run_ranks(_die_on_rank_1, 2)
    pids = {pid for pid, *_ in (*before, *run_ranks(_state, 2))}
    assert len(pids) == 4


def test_hang_ends_at_the_timeout(run_ranks: RunRanks) -> None:
    [(hanging, *_), _] = run_ranks(_state, 2)
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"--- rank 0: did not return in \d\.\d s") as info:
        run_ranks(_hang_on_rank_0, 2, timeout_s=0.4)
    assert time.monotonic() - begin < 30.0
    assert "_hang_on_rank_0" in str(info.value).split("--- rank 0")[1]
    with pytest.raises(ProcessLookupError):
        os.kill(hanging, 0)


def test_warning_on_a_rank_is_an_error(run_ranks: RunRanks) -> None:
    with pytest.raises(AssertionError, match="DeprecationWarning: soon gone"):
        run_ranks(_warn, 1)


def test_function_that_cannot_be_pickled_is_refused(run_ranks: RunRanks) -> None:
    with pytest.raises((AttributeError, TypeError), match="local object"):
        run_ranks(lambda rank, num_ranks: rank, 1)
