"""Predict the time of a graph in a given order: simulate its operations on two streams."""

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
        name: unique in the graph.
        role: "compute" occupies the compute stream, "start" starts a collective, "wait" blocks the
            compute stream until the operations that it needs have ended, "free" takes no time.
        duration_us: of the computation or the collective; 0 for "wait" and "free".
        needs: indices of the operations whose results this one takes.
        host_us: host time to launch the operation.
        is_read: whether the host waits for the end of the operation, because it reads its result.
    """

    name: str
    role: Role
    duration_us: float
    needs: tuple[int, ...] = ()
    host_us: float = 0.0
    is_read: bool = False

    def __post_init__(self) -> None:
        # A plan creates thousands of operations: call the slow check only for a wrong role.
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
    """Return the operations as tasks of the simulator, in the order in which the host launches.

    A collective starts after all computation that was launched before it, needed or not, because
    its stream waits for the compute stream at the time of the launch. So a weight-gradient GEMM
    that is launched before a collective delays it. No operation starts before its launch.

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
    """Return the span of each operation, without the host and without operations of no duration."""
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
    comm = [span for span in spans if span.stream == "comm"]
    compute = [span for span in spans if span.stream == "compute"]
    return GraphTime(
        makespan_us=max((span.end_us for span in spans), default=0.0),
        comm_us=total_us(comm),
        exposed_us=exposed_us(comm, compute),
    )
