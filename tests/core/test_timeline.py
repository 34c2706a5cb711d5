"""Times of spans, compared with numbers by hand and with counted cells of a line."""

import gzip
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from halley.core import timeline
from halley.core.timeline import (
    Recorder,
    Span,
    exposed_us,
    innermost,
    to_chrome_trace,
    total_us,
    union,
    union_us,
    waited_us,
    write_chrome_trace,
)


def span(name: str, start_us: float, end_us: float, stream: str = "compute", rank: int = 0) -> Span:
    times = {"start_us": start_us, "duration_us": end_us - start_us}
    return Span(name=name, rank=rank, stream=stream, **times)


def spans_of_cells() -> st.SearchStrategy[list[Span]]:
    cell = st.integers(min_value=0, max_value=20)
    pair = st.tuples(cell, cell).map(sorted)
    return st.lists(pair.map(lambda ends: span("x", float(ends[0]), float(ends[1]))), max_size=8)


def cells(spans: list[Span]) -> set[int]:
    return {cell for s in spans for cell in range(int(s.start_us), int(s.end_us))}


def test_waits_are_unknown_if_layers_mark_none() -> None:
    experts, sums = span("experts", 2, 5), span("gradients.wait", 20, 21, "exposed")
    assert waited_us([experts, span("dispatch.wait", 4, 10, "exposed"), sums]) == 7.0
    assert waited_us([experts, sums, span("replicas.wait", 6, 9, "exposed")]) is None
    assert waited_us([]) is None


def test_union_merges_spans_that_overlap_touch_or_nest() -> None:
    spans = [span("a", *each) for each in [(20, 25), (0, 10), (2, 5), (8, 12), (12, 13), (15, 15)]]
    assert union(spans) == [(0.0, 13.0), (20.0, 25.0)]
    assert union_us(spans) == 18.0
    assert total_us(spans) == 5 + 10 + 3 + 4 + 1 + 0  # overlapping time counts more than once


@given(comm=spans_of_cells(), compute=spans_of_cells())
def test_interval_arithmetic_equals_counting_cells(comm: list[Span], compute: list[Span]) -> None:
    assert union_us(comm) == len(cells(comm))
    assert exposed_us(comm, compute) == len(cells(comm) - cells(compute))
    pieces = innermost(comm)  # disjoint, so that the sum of their times is that of their union
    assert total_us(pieces) == union_us(pieces) == union_us(comm)


def test_innermost_gives_each_moment_to_the_innermost_span() -> None:
    wait = span("wait", 60, 90, "exposed")
    others = [span("layer", 0, 100), span("dispatch", 10, 90), span("next", 100, 110)]
    assert innermost([wait, *others]) == [
        span("layer", 0, 10),
        span("dispatch", 10, 60),
        wait,
        span("layer", 90, 100),
        span("next", 100, 110),
    ]
    # Of two spans that overlap without nesting, the later one gets the moment.
    assert innermost([span("a", 0, 10), span("b", 5, 15)]) == [span("a", 0, 5), span("b", 5, 15)]


def test_chrome_trace_has_a_process_a_rank_and_a_row_a_stream() -> None:
    trace = to_chrome_trace([span("experts", 3, 8, rank=1), span("dispatch", 1, 4, "comm", rank=1)])
    assert trace["displayTimeUnit"] == "ms"
    assert trace["traceEvents"] == [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "rank 1"}},
        {"ph": "M", "name": "process_sort_index", "pid": 1, "args": {"sort_index": 1}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "comm"}},
        {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": 1, "args": {"sort_index": 1}},
        {"ph": "X", "name": "dispatch", "cat": "comm", "pid": 1, "tid": 1, "ts": 1, "dur": 3},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "compute"}},
        {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": 2, "args": {"sort_index": 2}},
        {"ph": "X", "name": "experts", "cat": "compute", "pid": 1, "tid": 2, "ts": 3, "dur": 5},
    ]


def test_chrome_trace_moves_spans_that_cross_to_another_row() -> None:
    times = {"outer": (0, 10), "inner": (2, 10), "crosses": (5, 15), "after": (10, 12)}
    spans = [span(name, *each, "comm") for name, each in times.items()]
    events = to_chrome_trace(spans)["traceEvents"]
    assert isinstance(events, list)
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    placed = {e["name"]: rows[e["tid"]] for e in events if e["ph"] == "X"}
    assert placed == {"outer": "comm", "inner": "comm", "crosses": "comm (2)", "after": "comm"}


def test_written_traces_read_back(tmp_path: Path) -> None:
    spans = [span("experts", 0.5, 2.25)]
    for name in ("plain.json", "packed.json.gz"):
        write_chrome_trace(spans, tmp_path / name)
        content = (tmp_path / name).read_bytes()
        content = gzip.decompress(content) if name.endswith(".gz") else content
        assert json.loads(content) == to_chrome_trace(spans)


def test_recorder_times_nested_spans_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks_ns = iter([5_000, 7_000, 9_500, 10_000, 12_000, 13_000])
    monkeypatch.setattr(timeline, "time", SimpleNamespace(perf_counter_ns=lambda: next(ticks_ns)))
    recorder = Recorder("cpu", rank=3)
    with recorder.span("layer"), recorder.span("dispatch.wait", stream="exposed"):
        pass
    with recorder.span("loss"):
        pass
    assert recorder.collect() == [
        span("layer", 0.0, 5.0, rank=3),
        span("dispatch.wait", 2.0, 4.5, "exposed", rank=3),
        span("loss", 7.0, 8.0, rank=3),
    ]
    assert recorder.collect() == []


def test_recorder_collects_a_span_that_raised_but_no_open_span() -> None:
    recorder = Recorder("cpu")
    with recorder.span("step"):
        with pytest.raises(KeyError), recorder.paused(), recorder.span("not recorded"):
            raise KeyError
        with pytest.raises(KeyError), recorder.span("failed"):
            raise KeyError
        assert [s.name for s in recorder.collect()] == ["failed"]
    assert [s.name for s in recorder.collect()] == ["step"]


def test_recorder_takes_spans_of_other_threads() -> None:
    recorder = Recorder("cpu")

    def mark(_: int) -> None:
        with recorder.span("mark"):
            pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(mark, range(400)))
    assert [s.name for s in recorder.collect()] == ["mark"] * 400


def test_recorder_shows_its_spans_to_the_profiler() -> None:
    for enabled in (True, False):
        recorder = Recorder("cpu", enabled=enabled)
        activities = [ProfilerActivity.CPU]
        with profile(activities=activities, acc_events=True) as profiler, recorder.span("experts"):
            pass
        assert [event.name for event in profiler.events() or []].count("halley::experts") == 1
        assert [s.name for s in recorder.collect()] == ["experts"] * enabled


def test_recorder_causes_no_graph_break() -> None:
    recorder = Recorder("cpu")

    def double(x: torch.Tensor) -> torch.Tensor:
        with recorder.span("double"):
            return x * 2

    compiled = torch.compile(double, backend="eager", fullgraph=True)
    assert compiled(torch.tensor(3)).item() == 6
    assert recorder.collect() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recorder_times_the_gpu_and_not_the_host() -> None:
    recorder = Recorder("cuda")
    x = torch.ones(4096, 4096, device="cuda")
    y = x @ x
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    with recorder.span("outer"):
        with recorder.span("gemms"):
            for _ in range(100):
                y = x @ x
        with recorder.span("empty"):
            pass
    issue_us = (time.perf_counter() - start_s) * 1e6
    torch.cuda.synchronize()
    whole_us = (time.perf_counter() - start_s) * 1e6
    outer, gemms, empty = recorder.collect()
    assert [s.name for s in (outer, gemms, empty)] == ["outer", "gemms", "empty"]
    assert y[0, 0].item() == 4096.0
    assert outer.start_us == 0.0
    assert issue_us < gemms.duration_us <= outer.duration_us < whole_us
    assert gemms.start_us < 1000.0
    assert outer.end_us >= empty.end_us >= empty.start_us >= gemms.end_us


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recorder_keeps_nothing_of_a_captured_graph() -> None:
    recorder = Recorder("cuda")
    x = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), recorder.span("captured"):
        x += 1
    graph.replay()
    assert recorder.collect() == []
    assert x.tolist() == [1.0] * 4
