"""Run host code on one rank or on all, with the same outcome, result or error, on every rank."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from halley.distributed.peers import Collective
from halley.distributed.ranks import gather, place_in


_OPERATION = "work on the run's folder"  # in messages

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks of the default group; (0, 1) without one."""
    return place_in(_default_group())


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
    group = _default_group()
    if group is not None:
        with Collective(_OPERATION, group=group):
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
    rank, _ = rank_and_size()
    outcome: tuple[T | None, str] = (None, "")
    try:
        outcome = (action(rank), "")
    except OSError as error:
        outcome = (None, error.strerror or str(error))
    outcomes = gather(outcome, group=_default_group(), what=_OPERATION)
    for each, (_, problem) in enumerate(outcomes):
        if problem:
            raise RuntimeError(f"rank {each}: {problem}")
    return cast(list[T], [result for result, _ in outcomes])


def _default_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None
