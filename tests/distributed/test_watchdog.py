"""The watchdog, with real processes: a test kills or stops a rank, the others must name it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.rendezvous import rendezvous

from halley.core.timeline import CurrentOperation
from halley.distributed.watchdog import EXIT_LOST_PEER, Watchdog


NUM_RANKS = 3
INTERVAL_S, TIMEOUT_S = 0.2, 2.0
LIMIT_S = 60.0
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
            time.sleep(LIMIT_S)  # in place of a GPU kernel that waits for another rank forever
        total = torch.ones(4)
        dist.all_reduce(total)
        assert total.tolist() == [NUM_RANKS] * 4
        time.sleep(0.02)


def _run_rank(behaviour: str, rank: int, port: int, folder: Path) -> None:
    os.dup2(os.open(folder / f"stderr.{rank}", os.O_CREAT | os.O_WRONLY), 2)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
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
            return
        try:
            _work(behaviour, watchdog, rank, folder)
        except RuntimeError as error:
            raise watchdog.explain(error) from None


class _Job:
    """Three ranks started by a test, each a process that runs ``_run_rank``."""

    def __init__(self, behaviour: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._folder = folder
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.ranks = [
            context.Process(target=_run_rank, args=(behaviour, rank, port, folder), daemon=True)
            for rank in range(NUM_RANKS)
        ]
        for process in self.ranks:
            process.start()

    def wait_until_under_way(self) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not (self._folder / "under-way").exists():
            assert time.monotonic() < deadline_s, self._read_stderr(0)
            time.sleep(0.02)

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.ranks[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def collect(self, ranks: list[int]) -> dict[int, tuple[int | None, list[str]]]:
        """Return the exit code and the error lines of ranks that must end without a signal."""
        deadline_s = time.monotonic() + LIMIT_S
        for rank in ranks:
            self.ranks[rank].join(deadline_s - time.monotonic())
        return {rank: (self.ranks[rank].exitcode, self._read_stderr(rank)) for rank in ranks}

    def _read_stderr(self, rank: int) -> list[str]:
        # Torch writes further lines about broken connections.
        lines = (self._folder / f"stderr.{rank}").read_text().splitlines()
        return [line for line in lines if re.match(r"halley: |\w+Error: ", line)]


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[[str], _Job]]:
    """Return the function that starts three ranks with a behaviour; kill them at the end."""
    jobs: list[_Job] = []

    def start(behaviour: str) -> _Job:
        jobs.append(_Job(behaviour, tmp_path))
        return jobs[-1]

    yield start
    for job in jobs:
        for process in job.ranks:
            process.kill()
            process.join()


def test_killed_rank_is_named_by_the_error(start_job: Callable[[str], _Job]):
    name = "rank 0, which hosts the store (connection lost)"
    job = start_job("loops")
    job.wait_until_under_way()
    job.send_signal(0, signal.SIGKILL)
    for rank, (code, lines) in job.collect([1, 2]).items():
        assert code == 1
        (line,) = lines
        assert re.sub(r"\d+$", "", line) == f"RuntimeError: rank {rank} lost {name} in step "


@pytest.mark.parametrize(
    ("victim", "number", "name"),
    [
        (1, signal.SIGKILL, "rank 1 (no heartbeat for 2 s)"),
        (0, signal.SIGSTOP, "rank 0, which hosts the store (no answer for 2 s)"),
    ],
)
def test_watchdog_ends_ranks_that_hang(
    start_job: Callable[[str], _Job], victim: int, number: signal.Signals, name: str
):
    job = start_job("hangs")
    job.wait_until_under_way()
    job.send_signal(victim, number)
    ends = job.collect([rank for rank in range(NUM_RANKS) if rank != victim])
    for rank, end in ends.items():
        assert end == (
            EXIT_LOST_PEER,
            [f"halley: failed on rank {rank}: rank {rank} lost {name} in step 3"],
        )


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [("raises", "ValueError: no text left"), ("finishes", "its training was over")],
)
def test_error_says_why_a_rank_left(start_job: Callable[[str], _Job], behaviour: str, reason: str):
    ends = start_job(behaviour).collect([0, 2])
    for rank, end in ends.items():
        line = f"RuntimeError: rank {rank} lost rank 1 (rank 1 ended early: {reason}) in step 3"
        assert end == (1, [line])


def test_ranks_that_end_one_after_the_other_are_not_lost(start_job: Callable[[str], _Job]):
    assert start_job("ends").collect([0, 1, 2]) == dict.fromkeys(range(NUM_RANKS), (0, []))


def test_suspended_job_continues(start_job: Callable[[str], _Job]):
    job = start_job("loops")
    job.wait_until_under_way()
    for number, duration_s in [(signal.SIGSTOP, TIMEOUT_S + 0.5), (signal.SIGCONT, 1.0)]:
        for rank in range(NUM_RANKS):
            job.send_signal(rank, number)
        time.sleep(duration_s)
    assert [process.exitcode for process in job.ranks] == [None] * NUM_RANKS


@pytest.fixture
def watchdogs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Watchdog]]:
    """Yield two running watchdogs in one process, which has begun no operation."""
    monkeypatch.setattr("halley.distributed.peers.CURRENT_OPERATION", CurrentOperation())
    store = HashStore()
    pair = [Watchdog(store, rank=rank, num_ranks=2, interval_s=0.1) for rank in range(2)]
    for watchdog in pair:
        watchdog.__enter__()
    yield pair
    for watchdog in reversed(pair):
        watchdog.stop()


def test_error_with_all_ranks_alive_is_repeated(watchdogs: list[Watchdog]):
    watchdogs[1].step = 12
    begin_s = time.monotonic()
    error = watchdogs[1].explain(RuntimeError("sizes differ\nmore"))
    assert time.monotonic() - begin_s < 10.0  # four heartbeats, not the 15 s of a lost rank
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
