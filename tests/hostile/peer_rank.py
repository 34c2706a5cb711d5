"""Start ranks that run a small MoE layer, one of which fails on purpose."""

import os
import signal
import warnings
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.distributed.watchdog import Watchdog
from halley.strategies.registry import build_strategy
from tests.hostile.rank_processes import Ends, Ranks, make_context, start_ranks
from tests.strategies.layer_case import LayerCase, run_forward


BAD_RANK, BAD_STEP = 1, 2
TIMES = {"interval_s": 0.2, "timeout_s": 2.0, "grace_s": 1.0, "deadlock_s": 2.0, "stall_s": 5.0}
PRELOAD = ["torch.testing", "halley.strategies.fused", "tests.rank_pool", __name__]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of rank ``BAD_RANK`` in step ``BAD_STEP``."""

    kind: str  # "kill", "stop", "skip forward", "skip backward" or "none"
    strategy: str
    watched: bool  # whether each rank has a watchdog
    num_ranks: int = 3
    timeout_s: float = 30.0  # limit of the process group and of fused kernels


def _take_steps(fault: Fault, watchdog: Watchdog | None) -> None:
    rank = dist.get_rank()
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
        dist.all_reduce(total)  # a collective of the user's own
        assert total.tolist() == [fault.num_ranks] * 3


def _run_rank(fault: Fault) -> int:
    """Join the process group and run the steps of one rank; return its exit code."""
    warnings.simplefilter("error")
    dist.init_process_group("gloo", timeout=timedelta(seconds=fault.timeout_s))
    if fault.watched:
        with Watchdog.of_group(None, **TIMES) as watchdog:
            _take_steps(fault, watchdog)
    else:
        _take_steps(fault, None)
    dist.destroy_process_group()
    return 0


def run_jobs(faults: list[Fault], folder: Path) -> list[Ends]:
    """Run a job for each fault at the same time; return how the ranks ended that were not lost."""
    context = make_context(*PRELOAD)
    jobs: list[Ranks] = []
    try:
        for index, fault in enumerate(faults):
            logs = folder / str(index)
            logs.mkdir(parents=True)
            run = partial(_run_rank, fault)
            jobs.append(start_ranks(context, run, num_ranks=fault.num_ranks, logs=logs))
        return [_collect(fault, job) for fault, job in zip(faults, jobs, strict=True)]
    finally:
        for job in jobs:
            job.kill()


def _collect(fault: Fault, job: Ranks) -> Ends:
    """Return exit code and last error line of the ranks that the fault did not kill or stop."""
    lost = {BAD_RANK} if fault.kind in ("kill", "stop") else set()
    ends = job.ends(rank for rank in range(fault.num_ranks) if rank not in lost)
    # The last of a chain of errors is the one that the user reads.
    return {rank: (code, errors[-1:]) for rank, (code, errors) in ends.items()}
