"""Times of small graphs, worked out by hand."""

from halley.cost.simulate import Contention, GraphTime, Operation, graph_spans, graph_time


# dX, then an all-to-all that needs it, its wait, and what follows; dW needs nothing of these.
DX = Operation(name="dx", role="compute", duration_us=10.0)
DW = Operation(name="dw", role="compute", duration_us=30.0)
VIEW = Operation(name="view", role="free", duration_us=0.0, needs=(0,))
START = Operation(name="start", role="start", duration_us=40.0, needs=(2,))
WAIT = Operation(name="wait", role="wait", duration_us=0.0, needs=(3,))
NEXT = Operation(name="next", role="compute", duration_us=5.0, needs=(4,))
OPERATIONS = (DX, DW, VIEW, START, WAIT, NEXT)


def test_weight_gradient_ahead_of_a_collective_delays_it() -> None:
    # dw 0-30, dx 30-40, start 40-80 alone, next 80-85.
    found = graph_time(OPERATIONS, [1, 0, 2, 3, 4, 5])
    assert found == GraphTime(makespan_us=85.0, comm_us=40.0, exposed_us=40.0)


def test_weight_gradient_behind_the_start_hides_it() -> None:
    # dx 0-10, start 10-50, dw 10-40, next 50-55: 10 us stay exposed.
    found = graph_time(OPERATIONS, [0, 2, 3, 1, 4, 5])
    assert found == GraphTime(makespan_us=55.0, comm_us=40.0, exposed_us=10.0)


def test_wait_holds_what_is_issued_behind_it() -> None:
    spans = {span.name: span for span in graph_spans(OPERATIONS, [0, 2, 3, 4, 1, 5])}
    assert spans["dw"].start_us == 50.0
    assert set(spans) == {"dx", "dw", "start", "next"}


def test_collectives_stand_in_one_queue() -> None:
    operations = [
        Operation(name="a", role="start", duration_us=10.0),
        Operation(name="b", role="start", duration_us=20.0),
    ]
    spans = {span.name: span.start_us for span in graph_spans(operations, [1, 0])}
    assert spans == {"b": 0.0, "a": 20.0}


def test_graph_without_operations() -> None:
    assert graph_time([], []) == GraphTime(makespan_us=0.0, comm_us=0.0, exposed_us=0.0)


def test_nothing_starts_before_the_host_has_issued_it() -> None:
    # Issued at 20, 40, 60: kernels of 5 wait for the host, and so does a collective of 50.
    operations = [
        Operation(name="a", role="compute", duration_us=5.0, host_us=20.0),
        Operation(name="b", role="compute", duration_us=5.0, host_us=20.0, needs=(0,)),
        Operation(name="c", role="start", duration_us=50.0, host_us=20.0, needs=(1,)),
    ]
    spans = {span.name: span.start_us for span in graph_spans(operations, [0, 1, 2])}
    assert spans == {"a": 20.0, "b": 40.0, "c": 60.0}
    for contention in (Contention(), Contention(compute=1.5, comm=1.5)):
        assert graph_time(operations, [0, 1, 2], contention).makespan_us == 110.0


def test_host_waits_for_what_it_reads() -> None:
    # a 5-105 is read; b, which the host issues in 5 us, starts at 110 although it needs nothing.
    operations = [
        Operation(name="a", role="compute", duration_us=100.0, host_us=5.0, is_read=True),
        Operation(name="b", role="compute", duration_us=10.0, host_us=5.0),
        Operation(name="c", role="compute", duration_us=10.0, host_us=5.0),
    ]
    spans = {span.name: span.start_us for span in graph_spans(operations, [0, 1, 2])}
    assert spans == {"a": 5.0, "b": 110.0, "c": 120.0}
    spans = {span.name: span.start_us for span in graph_spans(operations, [1, 0, 2])}
    assert spans == {"b": 5.0, "a": 15.0, "c": 120.0}
