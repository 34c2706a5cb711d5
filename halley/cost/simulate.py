"""Discrete-event simulator: predict when tasks with dependencies run on streams of ranks."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final, get_args

from halley.core.field_types import check_choice, check_fields
from halley.core.timeline import Span, exposed_us, total_us


_COMM = "comm"
HOST = "host"
_ROUNDING_US = 1e-6  # a task with less remaining time has ended: subtractions leave such errors


@dataclass(frozen=True, kw_only=True)
class Task:
    """A piece of work for the simulator.

    Attributes:
        name: unique in the list of tasks.
        stream: "compute", "comm" or "host". Tasks of one stream of one rank run one at a time.
        duration_us: the time that the task takes alone.
        needs: names of tasks, of any rank, that must end before this one starts.
        rank: the rank that runs the task.
    """

    name: str
    stream: str
    duration_us: float
    needs: tuple[str, ...] = ()
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class Contention:
    """Factors by which computation and communication of one rank slow each other down.

    Both share hardware: communication uses SMs (or CPU cores) and memory bandwidth.

    Attributes:
        compute: time of computation that overlaps communication, over its time alone; at least 1.
        comm: time of communication that overlaps computation, over its time alone; at least 1.
        sm_margin, grouped_sm_margin: SMs that dense and grouped GEMMs leave free for communication
            (``ops.sm_carveout``). Both factors are valid for these numbers of SMs.

    Raises:
        ValueError: a factor is below 1 or not finite, or a number of SMs is negative.
    """

    compute: float = 1.0
    comm: float = 1.0
    sm_margin: int = 0
    grouped_sm_margin: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("sm_margin", "grouped_sm_margin"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} ({value}) must be at least 0")
        for name in ("compute", "comm"):
            if (value := getattr(self, name)) < 1.0:
                raise ValueError(f"{name} ({value}) must be at least 1")


NO_CONTENTION = Contention()


def simulate(tasks: list[Task], contention: Contention = NO_CONTENTION) -> list[Span]:
    """Return the span of each task, in the order of the tasks.

    Each stream of each rank runs its tasks in order, each as soon as the tasks that it needs have
    ended.

    Args:
        tasks: in the order in which each stream issues them.
        contention: applies while the "comm" stream and any compute stream of one rank are busy at
            the same time. The "host" stream slows down no other stream.

    Raises:
        ValueError: two tasks have the same name, or a task needs one that is not listed before it.
    """
    _check(tasks)
    if contention != NO_CONTENTION:
        return _Contended(tasks, contention).run()
    free_us: dict[tuple[int, str], float] = defaultdict(float)
    spans: dict[str, Span] = {}
    for task in tasks:
        lane = (task.rank, task.stream)
        start_us = max([free_us[lane], *(spans[name].end_us for name in task.needs)])
        span = spans[task.name] = _span(task, start_us=start_us, duration_us=task.duration_us)
        free_us[lane] = span.end_us
    return list(spans.values())


def _span(task: Task, *, start_us: float, duration_us: float) -> Span:
    name, rank, stream = task.name, task.rank, task.stream
    return Span(name=name, rank=rank, stream=stream, start_us=start_us, duration_us=duration_us)


def _check(tasks: Sequence[Task]) -> None:
    seen: set[str] = set()
    for task in tasks:
        if task.name in seen:
            raise ValueError(f"task name ({task.name}) must be unique")
        if missing := [name for name in task.needs if name not in seen]:
            raise ValueError(f"{task.name} needs {missing}, not listed before it")
        seen.add(task.name)


@final
class _Contended:
    """Simulation with contention: the speed of each task changes when another starts or ends."""

    def __init__(self, tasks: Sequence[Task], contention: Contention) -> None:
        self._tasks = tasks
        self._rates = {True: 1.0 / contention.comm, False: 1.0 / contention.compute}
        self._lanes: dict[tuple[int, str], deque[Task]] = defaultdict(deque)
        for task in tasks:
            self._lanes[task.rank, task.stream].append(task)
        # Remaining time of the running task of each lane, as if it ran alone.
        self._left_us: dict[tuple[int, str], float] = {}
        self._starts_us: dict[str, float] = {}
        self._ends_us: dict[str, float] = {}

    def run(self) -> list[Span]:
        """Advance the time from one end of a task to the next, and return the spans."""
        now_us = 0.0
        while len(self._ends_us) < len(self._tasks):
            if self._begin(now_us):
                continue
            # All rates are constant until the next task ends.
            rates = {lane: self._rate(lane) for lane in self._left_us}
            step_us = min(left / rates[lane] for lane, left in self._left_us.items())
            now_us += step_us
            for lane, rate in rates.items():
                self._left_us[lane] -= step_us * rate
            self._end(now_us)
        times_us = ((self._starts_us[task.name], self._ends_us[task.name]) for task in self._tasks)
        return [
            _span(task, start_us=start_us, duration_us=end_us - start_us)
            for task, (start_us, end_us) in zip(self._tasks, times_us, strict=True)
        ]

    def _begin(self, now_us: float) -> bool:
        """Start all tasks that can start now; return whether a task of zero duration has ended."""
        for lane, waiting in self._lanes.items():
            if waiting and lane not in self._left_us:
                task = waiting[0]
                if all(name in self._ends_us for name in task.needs):
                    self._starts_us[task.name] = now_us
                    self._left_us[lane] = task.duration_us
        return self._end(now_us)

    def _end(self, now_us: float) -> bool:
        done = [lane for lane, left in self._left_us.items() if left <= _ROUNDING_US]
        for lane in done:
            del self._left_us[lane]
            self._ends_us[self._lanes[lane].popleft().name] = now_us
        return bool(done)

    def _rate(self, lane: tuple[int, str]) -> float:
        rank, is_comm = lane[0], lane[1] == _COMM
        overlaps = lane[1] != HOST and any(
            r == rank and stream != HOST and (stream == _COMM) != is_comm
            for r, stream in self._left_us
        )
        return self._rates[is_comm] if overlaps else 1.0


def makespan_us(tasks: list[Task]) -> float:
    """Return the end of the last task in microseconds; 0 for no tasks."""
    return max((span.end_us for span in simulate(tasks)), default=0.0)


Role = Literal["compute", "start", "wait", "free"]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a graph.

    Attributes:
        name: unique in the graph.
        role: "compute" occupies the compute stream. "start" starts a collective. "wait" blocks the
            compute stream until the operations in ``needs`` have ended. "free" takes no time.
        duration_us: of the computation or the collective; 0 for "wait" and "free".
        needs: indices of the operations whose results this one takes.
        host_us: host time to launch the operation.
        is_read: the host reads the result, so it waits for the end of the operation.
    """

    name: str
    role: Role
    duration_us: float
    needs: tuple[int, ...] = ()
    host_us: float = 0.0
    is_read: bool = False

    def __post_init__(self) -> None:
        # A plan creates thousands of operations, so the slow check runs only for a wrong role.
        if self.role not in get_args(Role):
            check_choice(self.role, get_args(Role), name="role")


@dataclass(frozen=True, kw_only=True)
class GraphTime:
    """Predicted times of the graph of one rank, in microseconds.

    Attributes:
        makespan_us: from the start of the first to the end of the last operation.
        comm_us: sum over all collectives.
        exposed_us: time in which a collective runs and no computation.
    """

    makespan_us: float
    comm_us: float
    exposed_us: float


def graph_tasks(operations: Sequence[Operation], order: Sequence[int]) -> list[Task]:
    """Return the operations as tasks of the simulator, in the order of their launch.

    No operation starts before the host has launched it. At the launch of a collective, its stream
    waits for the compute stream. So it starts after all computation that was launched before, even
    if it needs none of it. A weight-gradient GEMM that is launched before a collective delays it.

    Args:
        operations: of the graph.
        order: a permutation of their indices; each comes after the operations that it needs.
    """
    tasks: list[Task] = []
    last_compute = last_read = ""
    ends: dict[int, tuple[str, ...]] = {}  # tasks that produce the result of an operation
    for index in order:
        operation = operations[index]
        needs = tuple(dict.fromkeys(name for need in operation.needs for name in ends[need]))
        if operation.role == "free":  # its result is there when its own needs have ended
            ends[index] = needs
            continue
        stream = _COMM if operation.role == "start" else "compute"
        # At its launch, the stream of a collective waits for the compute stream.
        if operation.role == "start" and last_compute and last_compute not in needs:
            needs = (*needs, last_compute)
        if operation.host_us or last_read:  # the host launches after it has read ``last_read``
            issue = Task(
                name=f"{operation.name} issued",
                stream=HOST,
                duration_us=operation.host_us,
                needs=(last_read,) if last_read else (),
            )
            tasks.append(issue)
            needs = (*needs, issue.name)
            last_read = ""
        name, duration_us = operation.name, operation.duration_us
        tasks.append(Task(name=name, stream=stream, duration_us=duration_us, needs=needs))
        ends[index] = (operation.name,)
        if stream == "compute":
            last_compute = operation.name
        if operation.is_read:
            last_read = operation.name
    return tasks


def graph_spans(
    operations: Sequence[Operation],
    order: Sequence[int],
    contention: Contention = NO_CONTENTION,
) -> list[Span]:
    """Return the span of each operation that takes time, without the tasks of the host."""
    spans = simulate(graph_tasks(operations, order), contention)
    return [span for span in spans if span.duration_us > 0.0 and span.stream != HOST]


def graph_time(
    operations: Sequence[Operation],
    order: Sequence[int],
    contention: Contention = NO_CONTENTION,
) -> GraphTime:
    """Predict the time of the graph in that order; arguments as for ``graph_spans``."""
    return time_of(graph_spans(operations, order, contention))


def time_of(spans: Sequence[Span]) -> GraphTime:
    """Return the time of a graph, given the spans of its operations on one rank."""
    comm = [span for span in spans if span.stream == _COMM]
    compute = [span for span in spans if span.stream == "compute"]
    return GraphTime(
        makespan_us=max((span.end_us for span in spans), default=0.0),
        comm_us=total_us(comm),
        exposed_us=exposed_us(comm, compute),
    )
