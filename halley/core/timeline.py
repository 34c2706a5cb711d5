"""Spans: pieces of work with start and duration, from the simulator, profiler and recorder.

All three sources use the same type, so the same functions measure overlap and write Chrome traces.
"""

import gzip
import json
import time
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch.profiler import record_function

from halley.core.current_operation import CURRENT_OPERATION
from halley.core.field_types import check_type, parse_device


Interval = tuple[float, float]
_Moment = int | torch.cuda.Event


@dataclass(frozen=True, kw_only=True)
class Span:
    """One piece of work on one stream of one rank; times in microseconds.

    Attributes:
        name: name of the work.
        rank: the rank that ran it.
        stream: row of the timeline: "compute", "comm", "exposed" (the rank waits for
            communication), or any other name. Further compute streams are "compute 7" and so on.
        start_us: start time; all spans of one timeline have the same origin.
    """

    name: str
    rank: int
    stream: str
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@final
class Recorder:
    """Records spans of a step: the wall clock times them on a CPU, CUDA events on a GPU.

    The host reads the events only in ``collect``, so marking a span never makes it wait. A profiler
    shows the same spans as ``halley::<name>``. Any thread may mark spans, also the thread that runs
    backward.

    Args:
        device: the device that runs the work, a CPU or a CUDA device, or its name.
        rank: the rank written into the spans.
        enabled: if false, spans are shown to the profiler but not recorded. It may be changed
            between steps.

    Raises:
        ValueError: the device has another type, or an argument has the wrong type.
    """

    def __init__(self, device: torch.device | str, *, rank: int = 0, enabled: bool = True) -> None:
        self._device = parse_device(device)
        check_type(rank, int, name="rank")
        check_type(enabled, bool, name="enabled")
        self._rank = rank
        self.enabled = enabled
        self._marks: list[tuple[str, str, _Moment, _Moment]] = []  # name, stream, start, end

    def span(self, name: str, *, stream: str = "compute") -> AbstractContextManager[object]:
        """Return a context that records the ``with`` block as one span.

        Nothing is recorded inside ``torch.compile``. Inside a CUDA graph capture, only the profiler
        shows the span. In both cases the ``with`` block runs at another time than its work.

        Args:
            name: name of the span; names of waits end in ".wait".
            stream: row of the timeline; "exposed" for time spent waiting for communication.
        """
        if torch.compiler.is_compiling():
            return nullcontext()
        if stream == "exposed":
            return CURRENT_OPERATION.waiting(name, self._mark(name, stream))
        return self._mark(name, stream)

    def _mark(self, name: str, stream: str) -> AbstractContextManager[object]:
        is_gpu = self._device.type == "cuda"
        if self.enabled and not (is_gpu and torch.cuda.is_current_stream_capturing()):
            return self._timed(name, stream)
        # record_function takes some microseconds of host time even without a profiler. PyTorch has
        # no public function that tells whether a profiler runs.
        if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            return record_function(f"halley::{name}")
        return nullcontext()

    def collect(self) -> list[Span]:
        """Return the spans that ended since the last call, by start time; the first starts at 0.

        Waits for the device.
        """
        marks, self._marks = self._marks, []
        if not marks:
            return []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        origin = marks[0][2]
        # Starts and ends are both measured from one origin. So rounding cannot move the end of an
        # inner span past the end of the outer span.
        times_us = [(_elapsed_us(origin, a), _elapsed_us(origin, b)) for _, _, a, b in marks]
        first_us = min(start_us for start_us, _ in times_us)
        spans = [
            Span(
                name=name,
                rank=self._rank,
                stream=stream,
                start_us=start_us - first_us,
                duration_us=end_us - start_us,
            )
            for (name, stream, _, _), (start_us, end_us) in zip(marks, times_us, strict=True)
        ]
        return sorted(spans, key=_outer_first)

    @contextmanager
    def _timed(self, name: str, stream: str) -> Generator[None, None, None]:
        with record_function(f"halley::{name}"):
            start = self._now()
            try:
                yield
            finally:
                self._marks.append((name, stream, start, self._now()))

    def _now(self) -> _Moment:
        if self._device.type == "cpu":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def total_us(spans: Iterable[Span]) -> float:
    """Return the sum of the spans' durations; overlapping time counts more than once."""
    return sum(span.duration_us for span in spans)


def union(spans: Iterable[Span]) -> list[Interval]:
    """Return the intervals in which at least one span runs, disjoint and in order."""
    merged: list[Interval] = []
    for start_us, end_us in sorted((span.start_us, span.end_us) for span in spans):
        if merged and start_us <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_us))
        elif end_us > start_us:
            merged.append((start_us, end_us))
    return merged


def union_us(spans: Iterable[Span]) -> float:
    """Return the total time in which at least one span runs."""
    return sum(end_us - start_us for start_us, end_us in union(spans))


def subtract(intervals: list[Interval], cover: list[Interval]) -> list[Interval]:
    """Return the time of ``intervals`` that ``cover`` does not cover, as intervals.

    Args:
        intervals, cover: disjoint and in order, as ``union`` returns them.
    """
    uncovered: list[Interval] = []
    first = 0  # a cover that ends before an interval ends before the later intervals too
    for start_us, end_us in intervals:
        while first < len(cover) and cover[first][1] <= start_us:
            first += 1
        index = first
        while index < len(cover) and cover[index][0] < end_us:
            if cover[index][0] > start_us:
                uncovered.append((start_us, cover[index][0]))
            start_us = cover[index][1]
            index += 1
        if end_us > start_us:
            uncovered.append((start_us, end_us))
    return uncovered


def waited_us(spans: Iterable[Span]) -> float | None:
    """Return how long a rank waited for communication, or None if its layers do not mark waits.

    Layers that communicate inside kernels, or inside a compiled graph, mark no waits. Their step
    still marks the waits for gradient sums and replicas. These alone would be misleading, so the
    result is None.

    Args:
        spans: recorded spans of one rank.
    """
    waits = [span for span in spans if span.stream == "exposed"]
    is_known = any(not span.name.startswith(("gradients", "replicas")) for span in waits)
    return total_us(waits) if is_known else None


def exposed_us(comm: Iterable[Span], compute: Iterable[Span]) -> float:
    """Return how long the communication of a rank runs while no computation of it runs."""
    return sum(end_us - start_us for start_us, end_us in subtract(union(comm), union(compute)))


def innermost(spans: Iterable[Span]) -> list[Span]:
    """Cut nested spans into pieces, so that the pieces of inner and outer spans do not overlap.

    Each moment belongs to the innermost span. Where two spans overlap without nesting, it belongs
    to the span that starts later.

    Args:
        spans: spans of one rank and one thread.
    """
    pieces: list[Span] = []
    stack: list[Span] = []
    cursor_us = 0.0

    def emit_top(until_us: float) -> None:
        nonlocal cursor_us
        if until_us > cursor_us:
            duration_us = until_us - cursor_us
            pieces.append(replace(stack[-1], start_us=cursor_us, duration_us=duration_us))
            cursor_us = until_us

    for span in sorted(spans, key=_outer_first):
        while stack and stack[-1].end_us <= span.start_us:
            emit_top(stack[-1].end_us)
            stack.pop()
        if stack:
            emit_top(span.start_us)
        cursor_us = span.start_us
        stack.append(span)
    while stack:
        emit_top(stack[-1].end_us)
        stack.pop()
    return pieces


def to_chrome_trace(spans: Iterable[Span]) -> dict[str, object]:
    """Return the spans as a Chrome trace with one process per rank and one row per stream.

    A viewer shows the events of a row as nested calls. Spans of a stream that overlap without
    nesting therefore get further rows, "comm (2)" and so on.
    """
    by_lane: dict[tuple[int, str], list[Span]] = {}
    for span in spans:
        by_lane.setdefault((span.rank, span.stream), []).append(span)

    events: list[dict[str, object]] = []
    for rank in sorted({rank for rank, _ in by_lane}):
        events.append(_metadata("process_name", rank, name=f"rank {rank}"))
        events.append(_metadata("process_sort_index", rank, sort_index=rank))
    tid = 0
    for rank, stream in sorted(by_lane):
        for index, row in enumerate(_nesting_rows(by_lane[rank, stream])):
            tid += 1
            row_name = stream if index == 0 else f"{stream} ({index + 1})"
            events.append(_metadata("thread_name", rank, tid=tid, name=row_name))
            events.append(_metadata("thread_sort_index", rank, tid=tid, sort_index=tid))
            for span in row:
                times = {"ts": span.start_us, "dur": span.duration_us}
                place = {"pid": rank, "tid": tid}
                events.append({"ph": "X", "name": span.name, "cat": stream, **place, **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(spans: Iterable[Span], path: str | Path) -> None:
    """Write the spans as a Chrome trace that Perfetto opens, gzipped if the name ends in .gz.

    Raises:
        ValueError: the file cannot be written.
    """
    text = json.dumps(to_chrome_trace(spans))
    try:
        if str(path).endswith(".gz"):
            with gzip.open(path, "wt", encoding="utf-8") as file:
                file.write(text)
        else:
            Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"trace ({path}) must be a file to write: {error.strerror}") from error


def _elapsed_us(start: _Moment, end: _Moment) -> float:
    if isinstance(start, int) or isinstance(end, int):
        assert isinstance(start, int)
        assert isinstance(end, int)
        return (end - start) / 1e3
    return start.elapsed_time(end) * 1e3


def _outer_first(span: Span) -> Interval:
    return (span.start_us, -span.end_us)


def _nesting_rows(spans: list[Span]) -> list[list[Span]]:
    """Divide spans into rows in which any two spans are disjoint or nested."""
    rows: list[list[Span]] = []
    open_ends_us: list[list[float]] = []
    for span in sorted(spans, key=_outer_first):
        for row, ends_us in zip(rows, open_ends_us, strict=True):
            while ends_us and ends_us[-1] <= span.start_us:
                ends_us.pop()
            if not ends_us or span.end_us <= ends_us[-1]:
                row.append(span)
                ends_us.append(span.end_us)
                break
        else:
            rows.append([span])
            open_ends_us.append([span.end_us])
    return rows


def _metadata(kind: str, rank: int, *, tid: int | None = None, **args: object) -> dict[str, object]:
    event: dict[str, object] = {"ph": "M", "name": kind, "pid": rank, "args": args}
    return event if tid is None else {**event, "tid": tid}
