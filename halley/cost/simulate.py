"""Discrete-event simulator: tasks run in order on their stream, once what they need has ended."""

from collections import defaultdict
from dataclasses import dataclass

from halley.core.timeline import Span


@dataclass(frozen=True, kw_only=True)
class Task:
    """Work to simulate.

    Attributes:
        name: unique in its task list.
        stream: "compute" or "comm"; tasks of one stream of one rank never overlap.
        duration_us: predicted run time.
        needs: names of tasks, of any rank, that must end first.
    """

    name: str
    stream: str
    duration_us: float
    needs: tuple[str, ...] = ()
    rank: int = 0


def simulate(tasks: list[Task]) -> list[Span]:
    """Return when each task runs.

    Args:
        tasks: in the order in which each stream would issue them.

    Raises:
        ValueError: a name is used twice, or a task needs one that is not listed before it.
    """
    free_us: dict[tuple[int, str], float] = defaultdict(float)
    spans: dict[str, Span] = {}
    for task in tasks:
        if task.name in spans:
            raise ValueError(f"task name ({task.name}) must be unique")
        if missing := [name for name in task.needs if name not in spans]:
            raise ValueError(f"{task.name} needs {missing}, not listed before it")
        lane = (task.rank, task.stream)
        start_us = max([free_us[lane], *(spans[name].end_us for name in task.needs)])
        span = Span(
            name=task.name,
            rank=task.rank,
            stream=task.stream,
            start_us=start_us,
            duration_us=task.duration_us,
        )
        free_us[lane] = span.end_us
        spans[task.name] = span
    return list(spans.values())


def makespan_us(tasks: list[Task]) -> float:
    """Return when the last task ends, 0 for none."""
    return max((span.end_us for span in simulate(tasks)), default=0.0)
