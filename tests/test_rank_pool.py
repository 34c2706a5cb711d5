"""The pool that runs tests on several ranks: its results, and what it says when a rank fails."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.rank_pool import RunRanks


def _square(rank: int, num_ranks: int, base: int) -> int:
    return base + rank * rank


def _pid(rank: int, num_ranks: int) -> int:
    return os.getpid()


def _all_reduce(rank: int, num_ranks: int, x: torch.Tensor) -> torch.Tensor:
    x.mul_(rank + 1)
    dist.all_reduce(x)
    return x


def _setting(rank: int, num_ranks: int) -> tuple[int, str, bool]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], torch.initial_seed() == rank


def _fail_on_rank_1(rank: int, num_ranks: int) -> None:
    assert rank != 1, "one is wrong"


def _fail_while_others_wait(rank: int, num_ranks: int) -> None:
    _fail_on_rank_1(rank, num_ranks)
    dist.barrier()


def _die_on_rank_1(rank: int, num_ranks: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _hang_on_rank_0(rank: int, num_ranks: int) -> None:
    while rank == 0:
        time.sleep(0.01)


def _warn(rank: int, num_ranks: int) -> None:
    warnings.warn("soon gone", DeprecationWarning, stacklevel=1)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_results_come_by_rank(run_ranks: RunRanks, num_ranks: int) -> None:
    assert run_ranks(_square, num_ranks, 10) == [10, 11, 14][:num_ranks]


def test_ranks_are_processes_that_stay(run_ranks: RunRanks) -> None:
    pids = run_ranks(_pid, 2)
    assert len({os.getpid(), *pids}) == 3
    assert run_ranks(_pid, 2) == pids


def test_all_reduce_sums_copies_of_the_argument(run_ranks: RunRanks) -> None:
    x = torch.arange(3.0)
    for y in run_ranks(_all_reduce, 2, x):
        torch.testing.assert_close(y, torch.tensor([0.0, 3.0, 6.0]), rtol=0, atol=0)
    torch.testing.assert_close(x, torch.arange(3.0), rtol=0, atol=0)


def test_ranks_have_one_thread_and_their_own_seed(run_ranks: RunRanks) -> None:
    assert run_ranks(_setting, 2) == [(1, "1", True)] * 2


def test_assertion_on_one_rank_names_it_and_shows_its_traceback(run_ranks: RunRanks) -> None:
    with pytest.raises(
        AssertionError, match="_fail_on_rank_1 failed, first on rank 1 of 2"
    ) as info:
        run_ranks(_fail_on_rank_1, 2)
    assert "--- rank 0: returned" in str(info.value)
    assert "AssertionError: one is wrong" in str(info.value)


def test_rank_that_waits_for_a_failed_one_is_not_waited_for(run_ranks: RunRanks) -> None:
    begin = time.monotonic()
    with pytest.raises(AssertionError, match="first on rank 1 of 2") as info:
        run_ranks(_fail_while_others_wait, 2, timeout_s=60.0)
    assert time.monotonic() - begin < 30.0
    assert "one is wrong" in str(info.value)
    assert "barrier" in str(info.value)  # where rank 0 was


def test_killed_rank_is_told_by_exit_code_and_the_next_run_works(run_ranks: RunRanks) -> None:
    before = run_ranks(_pid, 2)
    with pytest.raises(AssertionError, match=r"--- rank 1: died with exit code -9"):
        run_ranks(_die_on_rank_1, 2)
    after = run_ranks(_pid, 2)
    assert not set(before) & set(after)


def test_hang_ends_at_the_timeout(run_ranks: RunRanks) -> None:
    [hanging, _] = run_ranks(_pid, 2)
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"--- rank 0: did not return in 1\.\d s") as info:
        run_ranks(_hang_on_rank_0, 2, timeout_s=1.0)
    assert time.monotonic() - begin < 30.0
    assert "_hang_on_rank_0" in str(info.value).split("--- rank 0")[1]
    with pytest.raises(ProcessLookupError):
        os.kill(hanging, 0)


def test_warning_on_a_rank_is_an_error(run_ranks: RunRanks) -> None:
    with pytest.raises(AssertionError, match="DeprecationWarning: soon gone"):
        run_ranks(_warn, 2)


def test_function_that_cannot_travel_is_refused(run_ranks: RunRanks) -> None:
    with pytest.raises((AttributeError, TypeError), match="local object"):
        run_ranks(lambda rank, num_ranks: rank, 1)
