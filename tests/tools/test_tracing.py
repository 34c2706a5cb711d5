"""Spans of a profiled step, exposed communication, and a compiled step with its prediction."""

import dataclasses
import time

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.profiler import record_function

from halley.core.config import DataConfig, RunConfig, TrainConfig
from halley.core.models import find_model
from halley.core.timeline import Recorder, Span, total_us, union_us
from halley.tools.tracing import (
    exposed_comm_us,
    gather_spans,
    measure_graphs,
    simulated_step,
    time_by_part,
    trace_step,
)
from tests.core.test_timeline import span
from tests.rank_pool import RunRanks


def test_time_by_part_excludes_nested_parts() -> None:
    spans = [
        span("layer", 0, 100),
        span("router", 0, 10),
        span("dispatch.wait", 20, 50, "exposed"),
        span("experts", 50, 90),
        span("layer", 200, 230),
        span("all_reduce", 5, 210, "comm"),  # another stream: does not reduce the layer
    ]
    assert list(time_by_part(spans).items()) == [  # longest first
        ("all_reduce", 205), ("layer", 10 + 10 + 30), ("experts", 40), ("dispatch.wait", 30),
        ("router", 10),
    ]  # fmt: skip


def test_exposed_is_marked_waits_or_else_communication_without_computation() -> None:
    spans = [span("gemm", 20, 50, "compute 7"), span("gemm", 40, 60, "compute 9")]
    spans += [span("a2a", 0, 100, "comm"), span("copy", 0, 100, "copy")]
    assert exposed_comm_us(spans) == 60.0
    spans += [span("dispatch.wait", 70, 90, "exposed"), span("inside", 80, 85, "exposed")]
    assert exposed_comm_us(spans) == 20.0


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_trace_of_one_step_shows_the_innermost_parts(warmup: int) -> None:
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

    spans = trace_step(step, rank=4, device="cpu", warmup=warmup)
    assert num_steps == warmup + 1
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


def _config(*, tp_size: int) -> RunConfig:
    tiny = find_model("tiny")
    num_experts, top_k = (4, 2) if tp_size == 1 else (1, 1)  # fewer than ranks
    moe = dataclasses.replace(tiny.moe, num_experts=num_experts, top_k=top_k, intermediate_size=32)
    model = dataclasses.replace(tiny, hidden_size=32, num_layers=1, head_dim=8, moe=moe)
    train = dataclasses.replace(TrainConfig(), batch_size=2)
    return RunConfig(model=model, data=DataConfig(seq_len=16), train=train, expert_tp_size=tp_size)


def _measured(
    rank: int, num_ranks: int, tp_size: int
) -> tuple[float, float, set[str], list[float], list[tuple[str, int, int]]]:
    options = {"passes": "wgrad", "memory_margin": 1.0, "unknown_size": 64}
    calls: list[tuple[str, int, int]] = []
    reports, measured_us, spans = measure_graphs(
        _config(tp_size=tp_size), options=options, device=torch.device("cpu"), num_steps=3,
        on_progress=lambda *words: calls.append(words),
    )  # fmt: skip
    torch._dynamo.reset()
    step = simulated_step(reports, passed=True)
    ends_us = [min(s.start_us for s in step), max(s.end_us for s in step)]
    predicted_us = sum(report.time_after.makespan_us for report in reports)
    return predicted_us, measured_us, {s.stream for s in spans}, ends_us, calls


@pytest.mark.parametrize("tp_size", [1, 2])
def test_compiled_step_is_measured_and_predicted(run_ranks: RunRanks, tp_size: int) -> None:
    results = run_ranks(_measured, 2, tp_size, timeout_s=120.0)
    assert results[0][1] == results[1][1] > 0.0  # the slowest rank's
    for predicted_us, _, streams, ends_us, calls in results:
        assert ends_us == [0.0, pytest.approx(predicted_us)]
        assert {"comm", "compute", "exposed"} <= streams
        assert calls[0] == ("compiling, and measuring operators", 0, 0)
        assert calls[-1] == ("measuring steps", 6, 6)
    predicted_us, measured_us, *_ = results[0]  # rank 0 has the measured times
    # Operators of microseconds: the interpreter between them is most of the step.
    assert 0.02 * measured_us < predicted_us < 2.0 * measured_us


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

    first, second, copy = spans = trace_step(step, rank=0, device="cuda")  # parts are no kernels
    assert copy.stream == "copy"
    assert first.stream != second.stream
    assert all(s.stream.startswith("compute ") for s in (first, second))
    assert 0.0 < first.start_us < first.end_us <= second.start_us < copy.start_us
    assert exposed_comm_us(spans) == 0.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_trace_with_a_head_start_has_no_delays_of_the_host() -> None:
    x = torch.ones(1024, device="cuda")

    def step() -> None:
        for _ in range(20):
            time.sleep(2e-3)
            x.add_(1.0)

    lengths_us: list[float] = []
    for head_start_us in (0.0, 200_000.0):
        spans = trace_step(step, rank=0, device="cuda", head_start_us=head_start_us)
        lengths_us.append(spans[-1].end_us - spans[0].start_us)
    assert lengths_us[0] > 30_000.0
    assert lengths_us[1] < 5_000.0
