"""Spans: the timed pieces of work that the simulator, the profiler and the recorder produce.

All three use the same type, so the same functions measure overlap and write Chrome traces.
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
        stream: "compute", "comm", "exposed" (the rank waits for communication), or any other row of
            the timeline. Further compute streams are "compute 7" and so on.
        start_us: start time; all spans of one timeline have the same origin.
        duration_us: duration.
    """

    name: str
    rank: int
    stream: str
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        """The end time."""
        return self.start_us + self.duration_us


@final
class Recorder:
    """Times the marked parts of a step.

    On a CPU a part is timed by the wall clock. On a GPU it is timed by two events on the current
    stream, which only ``collect`` reads, so that marking never makes the host wait. The profiler
    shows the same parts as ``halley::<name>``. Any thread may mark parts, such as the one that runs
    backward.

    Args:
        device: where the parts run, a CPU or a CUDA device, or its name.
        rank: the rank written into the spans.
        enabled: if false, parts are shown to the profiler but not recorded. It may be changed
            between steps.

    Raises:
        ValueError: the device is neither, or an argument has the wrong type.
    """

    def __init__(self, device: torch.device | str, *, rank: int = 0, enabled: bool = True) -> None:
        self._device = parse_device(device)
        check_type(rank, int, name="rank")
        check_type(enabled, bool, name="enabled")
        self._rank = rank
        self.enabled = enabled
        self._parts: list[tuple[str, str, _Moment, _Moment]] = []

    def span(self, name: str, *, stream: str = "compute") -> AbstractContextManager[object]:
        """Return a context that marks the code inside ``with`` as one part.

        A part inside ``torch.compile`` is not marked, and a part inside a CUDA graph capture is
        shown to the profiler only. In both cases the work does not run when the ``with`` block
        does.

        Args:
            name: name of the part; names of waits end in ".wait".
            stream: row of the timeline; "exposed" for time spent waiting for communication.
        """
        if torch.compiler.is_compiling():
            return nullcontext()
        if stream == "exposed":
            return CURRENT_OPERATION.waiting(name, self._part(name, stream))
        return self._part(name, stream)

    def _part(self, name: str, stream: str) -> AbstractContextManager[object]:
        if self.enabled and not self._is_capturing():
            return self._timed(name, stream)
        # A mark costs some microseconds of host time even without a profiler. PyTorch has no public
        # function that says whether a profiler runs.
        if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            return record_function(f"halley::{name}")
        return nullcontext()

    def collect(self) -> list[Span]:
        """Return the parts that ended since the last call, by start time; the first starts at zero.

        Waits for the device.
        """
        parts, self._parts = self._parts, []
        if not parts:
            return []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        origin = parts[0][2]
        # Starts and ends are both measured from one origin. So rounding cannot move the end of an
        # inner part past the end of the outer part.
        times_us = [(_elapsed_us(origin, a), _elapsed_us(origin, b)) for _, _, a, b in parts]
        first_us = min(start_us for start_us, _ in times_us)
        spans = [
            Span(
                name=name,
                rank=self._rank,
                stream=stream,
                start_us=start_us - first_us,
                duration_us=end_us - start_us,
            )
            for (name, stream, _, _), (start_us, end_us) in zip(parts, times_us, strict=True)
        ]
        return sorted(spans, key=_outer_first)

    @contextmanager
    def _timed(self, name: str, stream: str) -> Generator[None, None, None]:
        with record_function(f"halley::{name}"):
            start = self._now()
            try:
                yield
            finally:
                self._parts.append((name, stream, start, self._now()))

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _now(self) -> _Moment:
        if self._device.type == "cpu":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def total_us(
    spans: Iterable[Span], *, name_prefix: str | None = None, stream: str | None = None
) -> float:
    """Return the sum of the spans' durations; overlapping time counts more than once.

    Args:
        spans: spans of any rank.
        name_prefix: count only spans whose name has this prefix.
        stream: count only spans of this stream.
    """
    return sum(
        span.duration_us
        for span in spans
        if (name_prefix is None or span.name.startswith(name_prefix))
        and (stream is None or span.stream == stream)
    )


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
    """Return the parts of ``intervals`` outside ``cover``.

    Args:
        intervals: disjoint and in order, as ``union`` returns them.
        cover: likewise.
    """
    left: list[Interval] = []
    first = 0
    for start_us, end_us in intervals:
        while first < len(cover) and cover[first][1] <= start_us:
            first += 1
        index = first
        while index < len(cover) and cover[index][0] < end_us:
            if cover[index][0] > start_us:
                left.append((start_us, cover[index][0]))
            start_us = cover[index][1]
            index += 1
        if end_us > start_us:
            left.append((start_us, end_us))
    return left


def waited_us(spans: Iterable[Span]) -> float | None:
    """Return how long a rank waited for communication, or None if its layers do not mark waits.

    Layers that communicate inside kernels or inside a compiled graph mark no waits; only a profiler
    shows them. Such a step still marks waits for gradient sums and replicas, but these are the
    smaller share, so the result is None.

    Args:
        spans: recorded spans of one rank.
    """
    waits = [span for span in spans if span.stream == "exposed"]
    tells = any(not span.name.startswith(("gradients", "replicas")) for span in waits)
    return total_us(waits) if tells else None


def exposed_us(comm: Iterable[Span], compute: Iterable[Span]) -> float:
    """Return how long communication runs while no computation runs.

    Args:
        comm: communication of one rank.
        compute: computation of the same rank.
    """
    return sum(end_us - start_us for start_us, end_us in subtract(union(comm), union(compute)))


def innermost(spans: Iterable[Span]) -> list[Span]:
    """Cut nested spans into pieces so that each moment belongs to the innermost span.

    Where two spans overlap without nesting, the moment belongs to the later one.

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

    A viewer shows events of one row as nested calls. So spans of a stream that overlap without
    nesting go into further rows, "comm (2)" and so on.
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
            events += [_complete_event(span, tid) for span in row]
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


def _complete_event(span: Span, tid: int) -> dict[str, object]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.stream,
        "pid": span.rank,
        "tid": tid,
        "ts": span.start_us,
        "dur": span.duration_us,
    }
