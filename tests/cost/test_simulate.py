"""Schedules worked out by hand: streams that overlap, tasks that wait."""

import pytest

from halley.cost.simulate import Contention, Task, makespan_us, simulate


def _chunks() -> list[Task]:
    tasks: list[Task] = []
    for c in range(2):
        tasks += [
            Task(name=f"dispatch{c}", stream="comm", duration_us=10.0),
            Task(name=f"experts{c}", stream="compute", duration_us=30.0, needs=(f"dispatch{c}",)),
        ]
    return tasks


def test_chunks_overlap_and_a_stream_never_does() -> None:
    spans = {span.name: span for span in simulate(_chunks())}
    assert spans["dispatch1"].start_us == 10.0  # while experts0 computes
    assert spans["experts1"].start_us == 40.0  # compute is busy until then
    assert makespan_us(_chunks()) == 70.0  # not 80: one dispatch is hidden


def test_span_says_what_ran_where() -> None:
    (span,) = simulate([Task(name="experts", stream="compute", duration_us=2.5, rank=3)])
    assert (span.name, span.rank, span.stream) == ("experts", 3, "compute")
    assert (span.start_us, span.end_us) == (0.0, 2.5)


def test_each_rank_has_its_own_streams() -> None:
    tasks = [
        Task(name="a", stream="compute", duration_us=10.0, rank=0),
        Task(name="b", stream="compute", duration_us=4.0, rank=1),
        Task(name="send", stream="comm", duration_us=3.0, rank=0, needs=("a", "b")),
        Task(name="c", stream="compute", duration_us=1.0, rank=1, needs=("send",)),
        Task(name="d", stream="compute", duration_us=1.0, rank=0),
    ]
    starts = {span.name: span.start_us for span in simulate(tasks)}
    assert starts == {"a": 0.0, "b": 0.0, "send": 10.0, "c": 13.0, "d": 10.0}
    assert makespan_us(tasks) == 14.0


def test_task_waits_for_all_that_it_needs_and_holds_its_stream() -> None:
    tasks = [
        Task(name="short", stream="comm", duration_us=1.0),
        Task(name="long", stream="compute", duration_us=9.0),
        Task(name="both", stream="comm", duration_us=1.0, needs=("short", "long")),
        Task(name="behind", stream="comm", duration_us=1.0),  # issued later: runs later
    ]
    starts = {span.name: span.start_us for span in simulate(tasks)}
    assert starts == {"short": 0.0, "long": 0.0, "both": 9.0, "behind": 10.0}


def test_no_tasks() -> None:
    assert simulate([]) == []
    assert makespan_us([]) == 0.0


def test_unknown_need_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"experts needs \['dispatch'\], not listed before it"):
        simulate([Task(name="experts", stream="compute", duration_us=1.0, needs=("dispatch",))])
    with pytest.raises(ValueError, match=r"a needs \['a'\]"):
        simulate([Task(name="a", stream="compute", duration_us=1.0, needs=("a",))])


def test_name_used_twice_is_an_error() -> None:
    twice = [Task(name="a", stream=stream, duration_us=1.0) for stream in ("compute", "comm")]
    with pytest.raises(ValueError, match=r"task name \(a\) must be unique"):
        simulate(twice)


def test_streams_slow_each_other_down_while_both_run() -> None:
    tasks = [
        Task(name="send", stream="comm", duration_us=10.0),
        Task(name="gemm", stream="compute", duration_us=30.0),
        Task(name="reply", stream="comm", duration_us=6.0, needs=("gemm",)),
        Task(name="other", stream="compute", duration_us=8.0, rank=1),
    ]
    spans = {span.name: span for span in simulate(tasks, Contention(compute=1.5, comm=1.2))}
    # Beside the GEMM the all-to-all takes 12 us, in which 8 of the GEMM's 30 us are done.
    assert spans["send"].end_us == pytest.approx(12.0)
    assert spans["gemm"].end_us == pytest.approx(12.0 + 22.0)
    assert spans["reply"].duration_us == pytest.approx(6.0)  # alone
    assert spans["other"].duration_us == pytest.approx(8.0)  # of another rank


def test_contended_simulator_is_the_other_where_there_is_next_to_none() -> None:
    for tasks in (_chunks(), [*_chunks(), Task(name="nothing", stream="comm", duration_us=0.0)]):
        plain = {span.name: span for span in simulate(tasks)}
        for span in simulate(tasks, Contention(compute=1.0 + 1e-9)):
            assert span.start_us == pytest.approx(plain[span.name].start_us, abs=1e-5)
            assert span.end_us == pytest.approx(plain[span.name].end_us, abs=1e-5)


def test_contention_never_speeds_up() -> None:
    with pytest.raises(ValueError, match=r"comm \(0.9\) must be at least 1"):
        Contention(comm=0.9)
