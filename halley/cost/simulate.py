"""Discrete-event simulator: predict when tasks with dependencies run on streams of ranks."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from halley.core.timeline import Span, exposed_us, total_us
from halley.core.types import Task
from halley.core.validation import check_choice, check_fields


_COMM = "comm"
HOST = "host"
_ROUNDING_US = 1e-6  # a task with at most this time left has ended: subtractions are inexact


@dataclass(frozen=True, kw_only=True)
class Contention:
    """Factors by which computation and communication of one rank slow each other down.

    Both share SMs (or CPU cores) and memory bandwidth. The factors are valid for the two numbers of
    reserved SMs (``ops.sm_carveout``).
    """

    compute: float = 1.0  # time of GEMMs during communication, divided by their time alone
    comm: float = 1.0  # time of communication during GEMMs, divided by its time alone
    # The same two factors for computation that memory limits, such as norms.
    memory_compute: float = 1.0
    memory_comm: float = 1.0
    sm_margin: int = 0  # SMs that dense GEMMs leave free for communication
    grouped_sm_margin: int = 0  # SMs that grouped GEMMs leave free for communication

    def __post_init__(self) -> None:
        check_fields(self)
        factors = {"compute": 1, "comm": 1, "memory_compute": 1, "memory_comm": 1}
        limits = {"sm_margin": 0, "grouped_sm_margin": 0, **factors}
        for name, least in limits.items():
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} ({value}) must be at least {least}")

    def compute_factor(self, memory_share: float) -> float:
        """Return the factor of computation of which memory limits a share of the time."""
        return (1.0 - memory_share) * self.compute + memory_share * self.memory_compute

    def comm_factor(self, memory_share: float) -> float:
        """Return the factor of communication beside computation that memory limits in part."""
        beside_memory = max(self.comm, self.memory_comm)
        return 1.0 / ((1.0 - memory_share) / self.comm + memory_share / beside_memory)


NO_CONTENTION = Contention()


def simulate(tasks: list[Task], contention: Contention = NO_CONTENTION) -> list[Span]:
    """Simulate tasks on the streams of ranks; return the span of each task, in the given order.

    Each stream of each rank runs its tasks in the given order, each as soon as the tasks that it
    needs have ended. ``contention`` applies while the "comm" stream and any compute stream of one
    rank are busy at the same time. The "host" stream slows down no other stream.

    Raises:
        ValueError: two tasks have the same name, or a task needs one that is not listed before it.
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
        span = spans[task.name] = _span(task, start_us, task.duration_us)
        free_us[lane] = span.end_us
    if contention != NO_CONTENTION:
        return _simulate_contention(tasks, contention)
    return list(spans.values())


def _span(task: Task, start_us: float, duration_us: float) -> Span:
    name, rank, stream = task.name, task.rank, task.stream
    return Span(name=name, rank=rank, stream=stream, start_us=start_us, duration_us=duration_us)


def _simulate_contention(tasks: Sequence[Task], contention: Contention) -> list[Span]:
    """Simulate tasks; concurrent computation and communication of a rank slow each other down."""
    waiting: dict[tuple[int, str], deque[Task]] = defaultdict(deque)  # tasks of each (rank, stream)
    for task in tasks:
        waiting[task.rank, task.stream].append(task)
    # The running task of each (rank, stream): its start, and its remaining time if it ran alone.
    starts_us: dict[tuple[int, str], float] = {}
    left_us: dict[tuple[int, str], float] = {}
    spans: dict[str, Span] = {}
    now_us = 0.0
    while len(spans) < len(tasks):
        for lane, queue in waiting.items():
            is_idle = queue and lane not in left_us
            if is_idle and all(name in spans for name in queue[0].needs):
                starts_us[lane], left_us[lane] = now_us, queue[0].duration_us
        if all(left > _ROUNDING_US for left in left_us.values()):
            # The speeds of all running tasks are constant until the next task ends.
            running = {lane: waiting[lane][0] for lane in left_us}
            rates = {lane: _rate(lane, running, contention) for lane in running}
            step_us = min(left / rates[lane] for lane, left in left_us.items())
            now_us += step_us
            for lane, rate in rates.items():
                left_us[lane] -= step_us * rate
        for lane in [lane for lane, left in left_us.items() if left <= _ROUNDING_US]:
            del left_us[lane]
            task, start_us = waiting[lane].popleft(), starts_us[lane]
            spans[task.name] = _span(task, start_us, now_us - start_us)
    return [spans[task.name] for task in tasks]


def _rate(
    lane: tuple[int, str], running: Mapping[tuple[int, str], Task], contention: Contention
) -> float:
    """Return the speed of the task that runs on a (rank, stream): below 1.0 if others slow it."""
    rank, stream = lane
    is_comm = stream == _COMM
    others = [
        task
        for (each, other), task in running.items()
        if each == rank and HOST not in (stream, other) and (other == _COMM) != is_comm
    ]
    if not others:
        return 1.0
    if is_comm:
        return 1.0 / max(contention.comm_factor(task.memory_share) for task in others)
    return 1.0 / contention.compute_factor(running[lane].memory_share)


def makespan_us(tasks: list[Task]) -> float:
    """Simulate tasks without contention; return the latest end in us, or 0 for no tasks."""
    return max((span.end_us for span in simulate(tasks)), default=0.0)


Role = Literal["compute", "start", "wait", "free"]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation of a compiled graph: its role, predicted times and dependencies.

    The role "compute" occupies the compute stream. "start" starts a collective. "wait" blocks the
    compute stream until the operations in ``needs`` have ended. "free" takes no time.
    """

    name: str  # unique in the graph
    role: Role
    duration_us: float
    needs: tuple[int, ...] = ()  # indices of the operations that must end before this one
    host_us: float = 0.0  # host time to launch the operation
    is_read: bool = False  # the host reads the result, so it waits for the end of the operation
    memory_share: float = 0.0  # share of the time that memory limits

    def __post_init__(self) -> None:
        # Plans have thousands of operations and ``check_choice`` is slow: call it only to raise.
        if self.role not in get_args(Role):
            check_choice(self.role, get_args(Role), name="role")


@dataclass(frozen=True, kw_only=True)
class GraphTime:
    """Predicted times of the graph of one rank, in microseconds."""

    makespan_us: float  # from the call of the graph to the end of the last operation
    comm_us: float  # sum of the times of all collectives
    exposed_us: float  # time in which a collective but no computation runs


def graph_tasks(operations: Sequence[Operation], order: Sequence[int]) -> list[Task]:
    """Return simulator tasks for a graph whose operations are launched in the given order.

    No operation starts before the host has launched it. At the launch of a collective, its stream
    waits for the compute stream. So the collective starts after all computation launched before,
    even if it does not need that computation. ``order`` has the index of each operation once, after
    the indices of the operations that it needs.
    """
    tasks: list[Task] = []
    last_compute = last_read = ""
    ends: dict[int, tuple[str, ...]] = {}  # by operation: names of the tasks that make its result
    for index in order:
        operation, name = operations[index], operations[index].name
        needs = tuple(dict.fromkeys(end for need in operation.needs for end in ends[need]))
        if operation.role == "free":  # takes no time: its result is ready when its inputs are
            ends[index] = needs
            continue
        stream = _COMM if operation.role == "start" else "compute"
        if operation.role == "start" and last_compute and last_compute not in needs:
            needs = (*needs, last_compute)
        host_us, duration_us = operation.host_us, operation.duration_us
        if host_us or last_read:  # the launch takes host time, or waits until a result is read
            issued, read = f"{name} issued", (last_read,) if last_read else ()
            tasks.append(Task(name=issued, stream=HOST, duration_us=host_us, needs=read))
            needs = (*needs, issued)
            last_read = ""
        tasks.append(
            Task(
                name=name,
                stream=stream,
                duration_us=duration_us,
                needs=needs,
                memory_share=operation.memory_share,
            )
        )
        ends[index] = (name,)
        if stream == "compute":
            last_compute = name
        if operation.is_read:
            last_read = name
    return tasks


def graph_spans(
    operations: Sequence[Operation], order: Sequence[int], contention: Contention = NO_CONTENTION
) -> list[Span]:
    """Simulate operations in ``order``; return spans longer than 0, without those of the host."""
    spans = simulate(graph_tasks(operations, order), contention)
    return [span for span in spans if span.duration_us > 0.0 and span.stream != HOST]


def graph_time(
    operations: Sequence[Operation], order: Sequence[int], contention: Contention = NO_CONTENTION
) -> GraphTime:
    """Predict the times of a graph whose operations are launched in the given order."""
    return time_of(graph_spans(operations, order, contention))


def time_of(spans: Sequence[Span]) -> GraphTime:
    """Return the times of a graph, given the simulated spans of its operations on one rank."""
    comm = [span for span in spans if span.stream == _COMM]
    compute = [span for span in spans if span.stream == "compute"]
    return GraphTime(
        makespan_us=max((span.end_us for span in spans), default=0.0),
        comm_us=total_us(comm),
        exposed_us=exposed_us(comm, compute),
    )
