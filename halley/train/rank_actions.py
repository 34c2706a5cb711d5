"""Run host code on one rank or on all, with the same outcome, result or error, on every rank."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist


T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks of the default group; (0, 1) without one."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def on_rank_zero(action: Callable[[], T]) -> T:
    """Run an action on rank 0 alone; every rank gets its result, or raises its error. Collective.

    Raises:
        RuntimeError: the action raised an OSError.
    """
    outcome: list[object] = [None, None]
    rank, _ = rank_and_size()
    if rank == 0:
        try:
            outcome[0] = action()
        except OSError as error:
            outcome[1] = RuntimeError(str(error))
        except Exception as error:
            outcome[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    result, error = outcome
    if isinstance(error, Exception):
        raise error
    return cast(T, result)


def on_all_ranks(action: Callable[[int], T]) -> list[T]:
    """Run an action with its rank on every rank; every rank gets all results. Collective.

    Raises:
        RuntimeError: the action raised an OSError on some rank; names the first.
    """
    rank, num_ranks = rank_and_size()
    outcome: tuple[T | None, str] = (None, "")
    try:
        outcome = (action(rank), "")
    except OSError as error:
        outcome = (None, error.strerror or str(error))
    outcomes = [outcome] * num_ranks
    if dist.is_initialized():
        dist.all_gather_object(outcomes, outcome)
    for each, (_, problem) in enumerate(outcomes):
        if problem:
            raise RuntimeError(f"rank {each}: {problem}")
    return cast(list[T], [result for result, _ in outcomes])
