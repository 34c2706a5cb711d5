"""Spans of a profiled step, and exposed communication computed from them."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.profiler import record_function

from halley.core.timeline import Recorder, Span, total_us, union_us
from halley.tools.tracing import exposed_comm_us, gather_spans, time_by_part, trace_step
from tests.rank_pool import RunRanks
from tests.tools.spans import span


def test_time_by_part_excludes_nested_parts() -> None:
    spans = [
        span("layer", 0, 100),
        span("router", 0, 10),
        span("dispatch.wait", 20, 50, "exposed"),
        span("experts", 50, 90),
        span("layer", 200, 230),
        span("all_reduce", 5, 210, "comm"),  # another stream: does not reduce the layer
    ]
    parts = time_by_part(spans)
    assert parts == {
        "all_reduce": 205,
        "layer": 10 + 10 + 30,
        "experts": 40,
        "dispatch.wait": 30,
        "router": 10,
    }
    assert list(parts)[:2] == ["all_reduce", "layer"]  # longest first


def test_exposed_is_communication_without_any_computation() -> None:
    spans = [
        span("a2a", 0, 100, "comm"),
        span("gemm", 20, 50, "compute 7"),
        span("gemm", 40, 60, "compute 9"),
        span("copy", 0, 100, "copy"),
    ]
    assert exposed_comm_us(spans) == 60.0


def test_exposed_is_the_marked_waits_where_there_are_any() -> None:
    spans = [
        span("a2a", 0, 100, "comm"),
        span("layer", 0, 100),
        span("dispatch.wait", 70, 90, "exposed"),
        span("wait inside", 80, 85, "exposed"),
    ]
    assert exposed_comm_us(spans) == 20.0


def test_spans_of_several_ranks_are_an_error() -> None:
    spans = [span("a", 0, 1, rank=2), span("a", 0, 1, rank=5)]
    with pytest.raises(ValueError, match=r"spans \(of ranks \[2, 5\]\) must be of one rank"):
        exposed_comm_us(spans)
    with pytest.raises(ValueError, match=r"spans \(of ranks \[2, 5\]\) must be of one rank"):
        time_by_part(spans)


def test_trace_of_one_rank_shows_the_innermost_parts() -> None:
    recorder = Recorder("cpu", rank=4)
    num_steps = 0

    def step() -> None:
        nonlocal num_steps
        num_steps += 1
        recorder.collect()
        time.sleep(0.010)
        with recorder.span("layer"):
            with recorder.span("experts"):
                time.sleep(0.030)
            time.sleep(0.020)
        with record_function("not ours"):
            time.sleep(0.010)

    spans = trace_step(step, rank=4, device="cpu", warmup=3)
    assert num_steps == 4
    assert {(s.name, s.stream, s.rank) for s in spans} == {
        ("layer", "compute", 4),
        ("experts", "compute", 4),
        ("other", "other", 4),
    }
    traced_us, recorded_us = time_by_part(spans), time_by_part(recorder.collect())
    assert traced_us.pop("other") >= 20_000.0
    assert traced_us == pytest.approx(recorded_us, abs=10_000.0)
    assert recorded_us["experts"] >= 30_000.0
    assert spans[0].start_us == 0.0
    assert total_us(spans) == pytest.approx(union_us(spans))  # a moment is nobody's twice


@pytest.mark.parametrize("warmup", [0, 1])
def test_trace_with_few_warm_up_steps_holds_one_step(warmup: int) -> None:
    recorder = Recorder("cpu")

    def step() -> None:
        with recorder.span("part"):
            pass

    spans = trace_step(step, rank=0, device="cpu", warmup=warmup)
    assert [s.name for s in spans if s.stream == "compute"] == ["part"]
    assert len(recorder.collect()) == warmup + 1


def test_negative_warm_up_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"warmup \(-1\) must be at least 0"):
        trace_step(lambda: None, rank=0, device="cpu", warmup=-1)


LATE_S = 0.2


def trace_late_peer(rank: int, num_ranks: int, hide: bool) -> list[Span]:
    """Trace an all-to-all whose peer comes late; ``hide`` it behind longer work or not."""
    recorder = Recorder("cpu", rank=rank)
    sent, received = torch.ones(num_ranks), torch.empty(num_ranks)

    def step() -> None:
        time.sleep(LATE_S * rank)
        work = dist.all_to_all_single(received, sent, async_op=True)
        assert work is not None
        if hide:
            with recorder.span("experts"):
                time.sleep(3 * LATE_S)
        with recorder.span("dispatch.wait", stream="exposed"):
            work.wait()

    return gather_spans(trace_step(step, rank=rank, device="cpu", warmup=1))


@pytest.mark.parametrize("hide", [True, False])
def test_gloo_collective_is_comm_and_exposed_only_while_waited_for(
    run_ranks: RunRanks, hide: bool
) -> None:
    of_rank_0, of_rank_1 = run_ranks(trace_late_peer, 2, hide)
    assert of_rank_0 == of_rank_1
    assert {s.rank for s in of_rank_0} == {0, 1}
    early = [s for s in of_rank_0 if s.rank == 0]
    (comm,) = [s for s in early if s.stream == "comm"]
    half_us = LATE_S / 2 * 1e6
    assert comm.name == "gloo:all_to_all"
    assert comm.duration_us > half_us
    if hide:
        (work,) = [s for s in early if s.name == "experts"]
        assert comm.end_us < work.end_us - half_us  # ends when the peer has come, not at the wait
        assert exposed_comm_us(early) < half_us
    else:
        assert half_us < exposed_comm_us(early) < comm.duration_us + half_us

    # Clocks are aligned: an all-to-all ends on both ranks when its last rank has come.
    (late_comm,) = [s for s in of_rank_0 if s.rank == 1 and s.stream == "comm"]
    assert abs(late_comm.end_us - comm.end_us) < half_us
    assert late_comm.start_us - comm.start_us > half_us


def trace_functional_collective(rank: int, num_ranks: int) -> list[Span]:
    recorder = Recorder("cpu", rank=rank)
    group = dist.group.WORLD
    assert group is not None

    def step() -> None:
        time.sleep(LATE_S * rank)
        wait_tensor(all_reduce(torch.ones(4), "sum", group))
        time.sleep(LATE_S * rank)
        total = all_reduce(torch.ones(4), "sum", group)
        with recorder.span("combine.wait", stream="exposed"):
            wait_tensor(total)

    return trace_step(step, rank=rank, device="cpu", warmup=1)


def test_waits_of_functional_collectives_are_exposed(run_ranks: RunRanks) -> None:
    early, _ = run_ranks(trace_functional_collective, 2)
    half_us = LATE_S / 2 * 1e6
    exposed = [s for s in early if s.stream == "exposed" and s.duration_us > half_us]
    assert [s.name for s in exposed] == ["_c10d_functional::wait_tensor", "combine.wait"]
    assert [s.name for s in early if s.stream == "comm"] == ["gloo:all_reduce"] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_trace_has_a_row_for_each_stream_and_one_for_copies() -> None:
    x = torch.ones(2048, 2048, device="cuda")
    y = torch.empty_like(x)
    side = torch.cuda.Stream()
    recorder = Recorder("cuda")

    def step() -> None:
        with recorder.span("experts"):
            torch.mm(x, x, out=y)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y.mul_(2.0)
        torch.cuda.current_stream().wait_stream(side)
        y.copy_(x)

    spans = trace_step(step, rank=0, device="cuda")
    streams = [s.stream for s in spans]
    assert len(spans) == 3  # the marked part itself is no kernel
    assert streams[2] == "copy"
    assert streams[0] != streams[1]
    assert all(stream.startswith("compute ") for stream in streams[:2])
    assert all(s.start_us > 0.0 for s in spans)
    assert spans[0].end_us <= spans[1].start_us
    assert exposed_comm_us(spans) == 0.0
