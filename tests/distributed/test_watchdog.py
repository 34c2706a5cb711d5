"""The watchdog in real processes: a test kills or stops a rank, and the others must name it."""

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.rendezvous import rendezvous

from halley.core.timeline import CurrentOperation
from halley.distributed.watchdog import EXIT_LOST_PEER, Watchdog
from tests.hostile.rank_processes import Ranks, make_context, start_ranks


NUM_RANKS = 3
INTERVAL_S, TIMEOUT_S = 0.2, 2.0
LIMIT_S = 60.0
Start = Callable[..., Ranks]
# These ranks and those of the fixture run_ranks have one fork server, which imports these modules.
PRELOAD = ["torch.testing", "torch.distributed.tensor", "tests.rank_pool", __name__]


def _work(behaviour: str, watchdog: Watchdog, rank: int, folder: Path) -> None:
    """Run all-reduces until the behaviour ends them; in step 3, rank 0 tells the test to start."""
    for step in range(1_000_000):
        watchdog.step = step
        if step == 3 and rank == 1 and behaviour == "raises":
            raise ValueError("no text left")
        if step == 3 and rank == 1 and behaviour == "finishes":
            return
        if step == 3 and rank == 0:
            time.sleep(2 * INTERVAL_S)
            (folder / "under-way").touch()
        if step == 3 and behaviour == "hangs":
            time.sleep(LIMIT_S)  # stands for a GPU kernel that waits forever
        total = torch.ones(4)
        dist.all_reduce(total)
        assert total.tolist() == [NUM_RANKS] * 4
        time.sleep(0.02)


def _run_rank(behaviour: str, folder: Path) -> int:
    warnings.simplefilter("error")
    rank = int(os.environ["RANK"])
    store, _, _ = next(rendezvous("env://"))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=LIMIT_S)
    )
    with Watchdog(
        store,
        rank=rank,
        num_ranks=NUM_RANKS,
        interval_s=INTERVAL_S,
        timeout_s=TIMEOUT_S,
        grace_s=0.5 if behaviour == "hangs" else LIMIT_S,
    ) as watchdog:
        if behaviour == "ends":
            time.sleep(0.5 * rank)  # rank 0, which hosts the store, is the first to end
            return 0
        try:
            _work(behaviour, watchdog, rank, folder)
        except RuntimeError as error:
            raise watchdog.explain(error) from None
    return 0


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Start]:
    """Return the function that starts three ranks with a behaviour; kill them at the end."""
    jobs: list[Ranks] = []

    def start(behaviour: str, *, until_under_way: bool = False) -> Ranks:
        run = partial(_run_rank, behaviour, tmp_path)
        context = make_context(*PRELOAD)
        jobs.append(start_ranks(context, run, num_ranks=NUM_RANKS, logs=tmp_path))
        deadline_s = time.monotonic() + LIMIT_S
        while until_under_way and not (tmp_path / "under-way").exists():
            assert time.monotonic() < deadline_s, jobs[-1].text(0)
            time.sleep(0.02)
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


def test_killed_rank_is_named_by_the_error(start_job: Start):
    name = "rank 0, which hosts the store (connection lost)"
    job = start_job("loops", until_under_way=True)
    job.signal([0], signal.SIGKILL)
    for rank, (code, lines) in job.ends([1, 2]).items():
        assert code == 1
        (line,) = lines
        assert re.sub(r"\d+$", "", line) == f"RuntimeError: rank {rank} lost {name} in step "


def test_watchdog_ends_ranks_that_hang(start_job: Start):
    """See tests/hostile/test_peers.py for a killed rank while others wait in a collective."""
    job = start_job("hangs", until_under_way=True)
    job.signal([0], signal.SIGSTOP)
    name = "rank 0, which hosts the store (no answer for 2 s)"
    for rank, end in job.ends([1, 2]).items():
        line = f"halley: failed on rank {rank}: rank {rank} lost {name} in step 3"
        assert end == (EXIT_LOST_PEER, [line])


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [("raises", "ValueError: no text left"), ("finishes", "its training was over")],
)
def test_error_says_why_a_rank_left(start_job: Start, behaviour: str, reason: str):
    ends = start_job(behaviour).ends([0, 2])
    for rank, end in ends.items():
        line = f"RuntimeError: rank {rank} lost rank 1 (rank 1 ended early: {reason}) in step 3"
        assert end == (1, [line])


def test_rank_that_ended_because_of_another_is_not_named():
    """A slow rank sees both at once: rank 1, which ended, and rank 2, which had lost rank 1."""
    watchdog = Watchdog(HashStore(), rank=0, num_ranks=3)
    watchdog._explaining = True
    lost = "lost rank 1 (rank 1 ended early: its training was over)"
    reasons = {1: "its training was over", 2: f"RuntimeError: rank 2 {lost} in step 3"}
    watchdog._exit_reasons = reasons
    watchdog._judge()
    assert watchdog._verdict == lost

    # If the rank that it had lost is not known to have ended, it is named.
    watchdog._verdict, watchdog._exit_reasons = None, {2: reasons[2]}
    watchdog._judge()
    assert watchdog._verdict == f"lost rank 2 (rank 2 ended early: {reasons[2]})"


def test_ranks_that_end_one_after_the_other_are_not_lost(start_job: Start):
    ends = start_job("ends").ends([0, 1, 2])
    assert ends == dict.fromkeys(range(NUM_RANKS), (0, []))


def test_suspended_job_continues(start_job: Start):
    job = start_job("loops", until_under_way=True)
    for number, duration_s in [(signal.SIGSTOP, TIMEOUT_S + 0.5), (signal.SIGCONT, 1.0)]:
        job.signal(range(NUM_RANKS), number)
        time.sleep(duration_s)
    assert [process.exitcode for process in job.processes] == [None] * NUM_RANKS


def test_error_with_all_ranks_alive_is_repeated(monkeypatch: pytest.MonkeyPatch):
    # Earlier tests in this process have begun operations.
    monkeypatch.setattr("halley.distributed.watchdog.CURRENT_OPERATION", CurrentOperation())
    store = HashStore()
    first, second = (Watchdog(store, rank=r, num_ranks=2, interval_s=0.1) for r in range(2))
    with first, second:
        second.step = 12
        begin_s = time.monotonic()
        error = second.explain(RuntimeError("sizes differ\nmore"))
        assert time.monotonic() - begin_s < 10.0  # it waits for four heartbeats, not for 15 s
    assert str(error) == (
        "rank 1 failed in step 12, though no rank was lost: RuntimeError: sizes differ; "
        "rank 0 last began no operation (operation 0), "
        "rank 1 last began no operation (step 12, operation 0)"
    )


def test_second_run_on_a_store_ignores_the_first():
    store = HashStore()
    for _ in range(2):
        first, second = (Watchdog(store, rank=r, num_ranks=2, interval_s=0.1) for r in range(2))
        with first, second:
            error = first.explain(RuntimeError("no reason"))
            assert "no rank was lost" in str(error)


def test_interpreter_can_exit_inside_the_block():
    source = """
from torch.distributed import HashStore
from halley.distributed.watchdog import Watchdog
Watchdog(HashStore(), rank=0, num_ranks=1, interval_s=0.01).__enter__()
"""
    command = [sys.executable, "-W", "error", "-c", source]
    done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
