"""Run the kernels of one layer on ranks that are threads."""

from collections.abc import Callable
from typing import TypeVar

import torch

from halley.interpreter.scheduler import Scheduler
from tests.fused.kernel_case import TIMEOUT_S, KernelCase, make_tokens
from tests.fused.kernel_rank import KernelRank
from tests.symm_mem.thread_heap import ThreadWorld


T = TypeVar("T")


def run_world(
    case: KernelCase,
    fn: Callable[[KernelRank], T],
    *,
    seed: int = 0,
    resident: int = 4,
    starve: float = 0.0,
    timeout_s: float = TIMEOUT_S,
    max_switches: int = 200_000,
) -> list[T]:
    """Call ``fn`` on every rank of a new group and return the results by rank."""
    scheduler = Scheduler(seed, resident=resident, starve=starve, max_switches=max_switches)
    world = ThreadWorld(case.num_ranks, scheduler.barrier)

    def run(rank: int) -> T:
        return fn(KernelRank(world.heap(rank), case, timeout_s=timeout_s))

    return scheduler.run_ranks(case.num_ranks, run)


def run_forward(
    case: KernelCase,
    *,
    fused: bool = True,
    seed: int = 0,
    resident: int = 4,
    starve: float = 0.0,
    timeout_s: float = TIMEOUT_S,
) -> list[list[torch.Tensor]]:
    """Run all calls of the case one after another; return outputs by rank and call."""

    def run(rank: KernelRank) -> list[torch.Tensor]:
        return [
            rank.forward(*make_tokens(case, rank.rank, call=call), fused=fused)
            for call in range(len(case.num_tokens_CW))
        ]

    return run_world(case, run, seed=seed, resident=resident, starve=starve, timeout_s=timeout_s)
