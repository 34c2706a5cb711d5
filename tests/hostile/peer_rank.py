"""Ranks of a small layer, one of which fails on purpose, as tests of faults start them."""

import contextlib
import os
import re
import signal
import socket
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Self, final

import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.distributed.watchdog import Watchdog
from halley.strategies.registry import build_strategy
from tests.strategies.layer_case import LayerCase, run_forward


BAD_RANK, BAD_STEP = 1, 2
LIMIT_S = 60.0
TIMES = {"interval_s": 0.2, "timeout_s": 2.0, "grace_s": 1.0, "deadlock_s": 2.0, "stall_s": 5.0}
PRELOAD = ["torch.testing", "halley.strategies.fused", "tests.rank_pool", __name__]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of rank ``BAD_RANK`` in step ``BAD_STEP``.

    Attributes:
        kind: "kill", "stop", "skip forward", "skip backward" or "none".
        strategy: of the layer.
        watched: whether the ranks run under a watchdog.
        timeout_s: time limit of the process group and of fused kernels.
    """

    kind: str
    strategy: str
    watched: bool
    num_ranks: int = 3
    timeout_s: float = 30.0


def _take_steps(fault: Fault, rank: int, watchdog: Watchdog | None) -> None:
    recorder = Recorder("cpu", enabled=False)
    strategy = build_strategy(
        fault.strategy,
        dist.group.WORLD,
        recorder=recorder,
        device=torch.device("cpu"),
        timeout_s=fault.timeout_s,
    )
    case = LayerCase(num_tokens_W=(4,) * fault.num_ranks, num_experts=2 * fault.num_ranks)
    for step in range(1, BAD_STEP + 2):
        if watchdog is not None:
            watchdog.step = step
        kind = fault.kind if (rank, step) == (BAD_RANK, BAD_STEP) else "none"
        if kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind != "skip forward":
            call = run_forward(strategy.forward, case, rank)
            if kind != "skip backward":
                call.y_TD.backward(call.grad_TD)
        total = torch.ones(3)
        dist.all_reduce(total)  # of the user's own
        assert total.tolist() == [fault.num_ranks] * 3


def run_rank(fault: Fault, rank: int, port: int, folder: Path) -> None:
    """Join the others and train; stderr goes to a file of the folder."""
    os.dup2(os.open(folder / f"stderr.{rank}", os.O_CREAT | os.O_WRONLY), 2)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(fault.num_ranks), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    dist.init_process_group("gloo", timeout=timedelta(seconds=fault.timeout_s))
    if fault.watched:
        with Watchdog.of_group(None, **TIMES) as watchdog:
            _take_steps(fault, rank, watchdog)
    else:
        _take_steps(fault, rank, None)
    dist.destroy_process_group()


@final
class Job:
    """The ranks of a test, each a process of its own."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._folder = folder
        folder.mkdir(parents=True)
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._ranks = [
            context.Process(target=run_rank, args=(fault, rank, port, folder), daemon=True)
            for rank in range(fault.num_ranks)
        ]

    def __enter__(self) -> Self:
        for process in self._ranks:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._ranks:
            process.kill()
            process.join()

    def collect(self, ranks: list[int]) -> dict[int, tuple[int | None, list[str]]]:
        """Return exit code and named errors of ranks that must end by themselves, in time."""
        deadline_s = time.monotonic() + LIMIT_S
        for rank in ranks:
            self._ranks[rank].join(max(0.0, deadline_s - time.monotonic()))
        return {rank: (self._ranks[rank].exitcode, self._read(rank)) for rank in ranks}

    def _read(self, rank: int) -> list[str]:
        # Torch writes around these what it sees of broken connections; of a chain of errors the
        # last is the one that the user reads.
        lines = (self._folder / f"stderr.{rank}").read_text().splitlines()
        return [line for line in lines if re.match(r"halley: |\w+Error: ", line)][-1:]


Ends = dict[int, tuple[int | None, list[str]]]


def run_jobs(faults: list[Fault], folder: Path) -> list[Ends]:
    """Run jobs at the same time; return how those of their ranks ended that must end themselves."""
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(Job(fault, folder / str(at))) for at, fault in enumerate(faults)
        ]
        lost = [{BAD_RANK} if fault.kind in ("kill", "stop") else set() for fault in faults]
        return [
            job.collect([rank for rank in range(fault.num_ranks) if rank not in gone])
            for job, fault, gone in zip(jobs, faults, lost, strict=True)
        ]
