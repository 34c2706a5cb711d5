"""Times of tasks and of graphs of operations, compared with schedules worked out by hand."""

from dataclasses import replace

import pytest

from halley.core.types import Task
from halley.cost.simulate import (
    Contention,
    GraphTime,
    Operation,
    graph_spans,
    graph_time,
    makespan_us,
    simulate,
)


def _task(name: str, stream: str, duration_us: float, *needs: str, rank: int = 0) -> Task:
    return Task(name=name, stream=stream, duration_us=duration_us, needs=needs, rank=rank)


CHUNKS = [
    _task("dispatch0", "comm", 10.0),
    _task("experts0", "compute", 30.0, "dispatch0"),
    _task("dispatch1", "comm", 10.0),
    _task("experts1", "compute", 30.0, "dispatch1"),
]


def test_streams_overlap_and_tasks_of_one_stream_do_not() -> None:
    spans = {span.name: span for span in simulate(CHUNKS)}
    assert spans["dispatch1"].start_us == 10.0  # while experts0 computes
    assert spans["experts1"].start_us == 40.0  # compute is busy until then
    assert makespan_us(CHUNKS) == 70.0  # not 80: one dispatch is hidden
    assert makespan_us([]) == 0.0


def test_each_rank_has_its_own_streams() -> None:
    tasks = [
        _task("a", "compute", 10.0),
        _task("b", "compute", 4.0, rank=1),
        _task("send", "comm", 3.0, "a", "b"),
        _task("c", "compute", 1.0, "send", rank=1),
        _task("d", "compute", 1.0),
    ]
    places = [(span.name, span.rank, span.stream, span.start_us) for span in simulate(tasks)]
    want = zip(tasks, (0.0, 0.0, 10.0, 13.0, 10.0), strict=True)
    assert places == [(task.name, task.rank, task.stream, start_us) for task, start_us in want]
    assert makespan_us(tasks) == 14.0


def test_task_waits_for_its_needs_and_blocks_its_stream() -> None:
    tasks = [
        _task("short", "comm", 1.0),
        _task("long", "compute", 9.0),
        _task("both", "comm", 1.0, "short", "long"),
        _task("behind", "comm", 1.0),  # issued later: runs later
    ]
    starts = {span.name: span.start_us for span in simulate(tasks)}
    assert starts == {"short": 0.0, "long": 0.0, "both": 9.0, "behind": 10.0}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([_task("a", "comm", 1.0, "b")], r"a needs \['b'\], not listed before it"),
        ([_task("a", "comm", 1.0, "a")], r"a needs \['a'\]"),
        ([_task("a", "comm", 1.0), _task("a", "compute", 1.0)], r"task name \(a\) must be unique"),
    ],
)
def test_unknown_need_and_repeated_name_are_errors(tasks: list[Task], message: str) -> None:
    for contention in (Contention(), Contention(comm=2.0)):
        with pytest.raises(ValueError, match=message):
            simulate(tasks, contention)


def test_streams_slow_each_other_down_while_both_run() -> None:
    tasks = [
        _task("send", "comm", 10.0),
        _task("gemm", "compute", 30.0),
        _task("reply", "comm", 6.0, "gemm"),
        _task("other", "compute", 8.0, rank=1),
    ]
    spans = {span.name: span for span in simulate(tasks, Contention(compute=1.5, comm=1.2))}
    # Beside the GEMM the all-to-all takes 12 us, in which 8 of the GEMM's 30 us are done.
    assert spans["send"].end_us == pytest.approx(12.0)
    assert spans["gemm"].end_us == pytest.approx(12.0 + 22.0)
    assert spans["reply"].duration_us == pytest.approx(6.0)  # alone
    assert spans["other"].duration_us == pytest.approx(8.0)  # of another rank


def test_memory_has_its_own_factors() -> None:
    contention = Contention(compute=1.2, comm=1.2, memory_compute=1.0, memory_comm=2.0)
    # With half of the time limited by memory, communication takes 1 / (0.5 / 1.2 + 0.5 / 2.0) = 1.5
    # times as long, and computation 0.5 * 1.2 + 0.5 * 1.0 = 1.1 times, while both run.
    for share, sent_us, compute in ((0.0, 12.0, 1.2), (0.5, 15.0, 1.1), (1.0, 20.0, 1.0)):
        tasks = [_task("send", "comm", 10.0), _task("norm", "compute", 30.0)]
        tasks[1] = replace(tasks[1], memory_share=share)
        send, norm = simulate(tasks, contention)
        assert send.end_us == pytest.approx(sent_us)
        assert norm.end_us == pytest.approx(sent_us + 30.0 - sent_us / compute)
    assert Contention(comm=1.5).comm_factor(1.0) == pytest.approx(1.5)  # memory not measured


def test_both_simulators_agree_without_contention() -> None:
    # A factor of exactly 1 selects the simulator without contention.
    for tasks in (CHUNKS, [*CHUNKS, _task("nothing", "comm", 0.0)]):
        plain = {span.name: span for span in simulate(tasks)}
        for span in simulate(tasks, Contention(compute=1.0 + 1e-9)):
            assert span.start_us == pytest.approx(plain[span.name].start_us, abs=1e-5)
            assert span.end_us == pytest.approx(plain[span.name].end_us, abs=1e-5)


# dx, an all-to-all that needs it, its wait, and the next operation. dw needs none of these.
DX = Operation(name="dx", role="compute", duration_us=10.0)
DW = Operation(name="dw", role="compute", duration_us=30.0)
VIEW = Operation(name="view", role="free", duration_us=0.0, needs=(0,))
START = Operation(name="start", role="start", duration_us=40.0, needs=(2,))
WAIT = Operation(name="wait", role="wait", duration_us=0.0, needs=(3,))
NEXT = Operation(name="next", role="compute", duration_us=5.0, needs=(4,))
OPERATIONS = (DX, DW, VIEW, START, WAIT, NEXT)


def test_weight_gradient_launched_before_a_collective_delays_it() -> None:
    # dw 0-30, dx 30-40, start 40-80 alone, next 80-85.
    found = graph_time(OPERATIONS, [1, 0, 2, 3, 4, 5])
    assert found == GraphTime(makespan_us=85.0, comm_us=40.0, exposed_us=40.0)
    assert graph_time([], []) == GraphTime(makespan_us=0.0, comm_us=0.0, exposed_us=0.0)


def test_weight_gradient_launched_after_the_start_overlaps_it() -> None:
    # dx 0-10, start 10-50, dw 10-40, next 50-55: 10 us stay exposed.
    found = graph_time(OPERATIONS, [0, 2, 3, 1, 4, 5])
    assert found == GraphTime(makespan_us=55.0, comm_us=40.0, exposed_us=10.0)


def test_wait_delays_operations_launched_after_it() -> None:
    spans = {span.name: span for span in graph_spans(OPERATIONS, [0, 2, 3, 4, 1, 5])}
    assert spans["dw"].start_us == 50.0
    assert set(spans) == {"dx", "dw", "start", "next"}


def test_collectives_run_one_after_another_in_launch_order() -> None:
    operations = [
        Operation(name="a", role="start", duration_us=10.0),
        Operation(name="b", role="start", duration_us=20.0),
    ]
    spans = {span.name: span.start_us for span in graph_spans(operations, [1, 0])}
    assert spans == {"b": 0.0, "a": 20.0}


def test_no_operation_starts_before_the_host_has_launched_it() -> None:
    # Launched at 20, 40 and 60: two kernels of 5 us and a collective of 50 us wait for the host.
    operations = [
        Operation(name="a", role="compute", duration_us=5.0, host_us=20.0),
        Operation(name="b", role="compute", duration_us=5.0, host_us=20.0, needs=(0,)),
        Operation(name="c", role="start", duration_us=50.0, host_us=20.0, needs=(1,)),
    ]
    spans = {span.name: span.start_us for span in graph_spans(operations, [0, 1, 2])}
    assert spans == {"a": 20.0, "b": 40.0, "c": 60.0}
    for contention in (Contention(), Contention(compute=1.5, comm=1.5)):
        assert graph_time(operations, [0, 1, 2], contention).makespan_us == 110.0


def test_host_waits_for_a_result_that_it_reads() -> None:
    # The host reads the result of a (5-105), then launches b in 5 us. So b starts at 110.
    operations = [
        Operation(name="a", role="compute", duration_us=100.0, host_us=5.0, is_read=True),
        Operation(name="b", role="compute", duration_us=10.0, host_us=5.0),
        Operation(name="c", role="compute", duration_us=10.0, host_us=5.0),
    ]
    spans = {span.name: span.start_us for span in graph_spans(operations, [0, 1, 2])}
    assert spans == {"a": 5.0, "b": 110.0, "c": 120.0}
    spans = {span.name: span.start_us for span in graph_spans(operations, [1, 0, 2])}
    assert spans == {"b": 5.0, "a": 15.0, "c": 120.0}
