"""How long a graph takes in a given order: its operations as tasks of the simulator."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from halley.core.field_types import check_choice
from halley.core.timeline import Span, exposed_us, total_us
from halley.cost.simulate import HOST, NO_CONTENTION, Contention, Task, simulate


Role = Literal["compute", "start", "wait", "free"]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a graph.

    Attributes:
        name: unique in its graph.
        role: "compute" keeps the device busy; "start" begins a collective; "wait" holds the compute
            stream until what it needs has ended; "free" takes no time.
        duration_us: of the computation, or of the collective; 0 for the others.
        needs: indices of the operations whose results it takes.
        host_us: that the host takes to issue it.
        is_read: whether the host waits for its end before it goes on.
    """

    name: str
    role: Role
    duration_us: float
    needs: tuple[int, ...] = ()
    host_us: float = 0.0
    is_read: bool = False

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):  # plans make thousands of operations
            check_choice(self.role, get_args(Role), name="role")


@dataclass(frozen=True, kw_only=True)
class GraphTime:
    """What one rank's graph is predicted to take, in microseconds.

    Attributes:
        makespan_us: from the first operation to the end of the last.
        comm_us: of all collectives together.
        exposed_us: in which a collective runs and no computation.
    """

    makespan_us: float
    comm_us: float
    exposed_us: float


def graph_tasks(operations: Sequence[Operation], order: Sequence[int]) -> list[Task]:
    """Return the operations as tasks, in the order in which the host issues them.

    A collective starts once all computation that was issued before it has ended, needed or not:
    its stream waits for the compute stream at the moment of issue. So a weight gradient that is
    issued ahead of a collective delays it. Nothing starts before the host has issued it.

    Args:
        operations: of the graph.
        order: a permutation of their indices in which each stands after what it needs.
    """
    tasks: list[Task] = []
    last_compute = last_read = ""
    ends: dict[int, tuple[str, ...]] = {}  # tasks that make an operation's result
    for index in order:
        operation = operations[index]
        needs = tuple(dict.fromkeys(name for need in operation.needs for name in ends[need]))
        if operation.role == "free":
            ends[index] = needs
            continue
        stream = "comm" if operation.role == "start" else "compute"
        if operation.role == "start" and last_compute and last_compute not in needs:
            needs = (*needs, last_compute)
        if operation.host_us or last_read:
            issue = Task(
                name=f"{operation.name} issued",
                stream=HOST,
                duration_us=operation.host_us,
                needs=(last_read,) if last_read else (),
            )
            tasks.append(issue)
            needs = (*needs, issue.name)
            last_read = ""
        tasks.append(
            Task(
                name=operation.name,
                stream=stream,
                duration_us=operation.duration_us,
                needs=needs,
            )
        )
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
    """Return when each operation runs; operations that take no time leave no span, nor the host."""
    spans = simulate(graph_tasks(operations, order), contention)
    return [span for span in spans if span.duration_us > 0.0 and span.stream != HOST]


def graph_time(
    operations: Sequence[Operation],
    order: Sequence[int],
    contention: Contention = NO_CONTENTION,
) -> GraphTime:
    """Return the predicted time of the graph in that order."""
    return time_of(graph_spans(operations, order, contention))


def time_of(spans: Sequence[Span]) -> GraphTime:
    """Return the time of a graph from when its operations run on one rank."""
    comm = [span for span in spans if span.stream == "comm"]
    compute = [span for span in spans if span.stream == "compute"]
    return GraphTime(
        makespan_us=max((span.end_us for span in spans), default=0.0),
        comm_us=total_us(comm),
        exposed_us=exposed_us(comm, compute),
    )
