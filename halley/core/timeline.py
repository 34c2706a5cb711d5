"""What ran when: the simulator, the profiler and the recorder write it, one file draws it."""

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

from halley.core.field_types import check_type
from halley.core.position import POSITION
from halley.core.torch_device import parse_device


Interval = tuple[float, float]
_Moment = int | torch.cuda.Event


@dataclass(frozen=True, kw_only=True)
class Span:
    """One piece of work on one stream of one rank; times in microseconds.

    Attributes:
        name: what ran.
        rank: where it ran.
        stream: "compute", "comm", "exposed" (this rank stands and waits for communication),
            or any other row of the timeline. Further compute streams are "compute 7" and so on.
        start_us: when it began, from a zero that all spans of one timeline share.
        duration_us: how long it took.
    """

    name: str
    rank: int
    stream: str
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        """Return when it ended."""
        return self.start_us + self.duration_us


@final
class Recorder:
    """Marks the parts of a step, and tells afterwards how long each of them took.

    On a CPU a part is timed by the wall clock; on a GPU by two events on the current stream, which
    are read by ``collect`` alone, so that marking never makes the host wait. The profiler shows the
    same parts as ``halley::<name>``. Any thread may mark, the one that runs a backward too.

    Args:
        device: where the parts run, a CPU or a CUDA device, or its name.
        rank: the rank written into the spans.
        enabled: without it parts are still shown to the profiler, but none is kept; may be changed
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
        """Mark what runs inside ``with`` as one part.

        A part inside ``torch.compile`` leaves no mark, and one inside the capture of a CUDA graph
        is only shown to the profiler: neither runs when its ``with`` does.

        Args:
            name: of the part; names of time lost in waiting end in ".wait".
            stream: row of the timeline, "exposed" for time lost in waiting for communication.
        """
        if torch.compiler.is_compiling():
            return nullcontext()
        if stream == "exposed":
            return POSITION.waiting(name, self._part(name, stream))
        return self._part(name, stream)

    def _part(self, name: str, stream: str) -> AbstractContextManager[object]:
        if self.enabled and not self._is_capturing():
            return self._timed(name, stream)
        # A mark costs some microseconds of the host even when no profiler reads it, and torch tells
        # whether one does by no public name.
        if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            return record_function(f"halley::{name}")
        return nullcontext()

    def collect(self) -> list[Span]:
        """Return the parts that ended since the last call, by start; the first starts at zero.

        Waits for the device.
        """
        parts, self._parts = self._parts, []
        if not parts:
            return []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        origin = parts[0][2]
        # A part's end is taken from the common origin, as its start is: rounding then cannot push
        # an inner part's end past the end of the part around it.
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
    """Return the summed durations of the spans, counting twice what overlaps.

    Args:
        spans: of any rank.
        name_prefix: count only spans whose name starts so.
        stream: count only spans of this stream.
    """
    return sum(
        span.duration_us
        for span in spans
        if (name_prefix is None or span.name.startswith(name_prefix))
        and (stream is None or span.stream == stream)
    )


def union(spans: Iterable[Span]) -> list[Interval]:
    """Return the times at which at least one span runs, disjoint and in order."""
    merged: list[Interval] = []
    for start_us, end_us in sorted((span.start_us, span.end_us) for span in spans):
        if merged and start_us <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_us))
        elif end_us > start_us:
            merged.append((start_us, end_us))
    return merged


def union_us(spans: Iterable[Span]) -> float:
    """Return for how long at least one span runs."""
    return sum(end_us - start_us for start_us, end_us in union(spans))


def subtract(intervals: list[Interval], cover: list[Interval]) -> list[Interval]:
    """Return what ``cover`` leaves of ``intervals``.

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
    """Return for how long a rank waited for communication, None where its layers do not tell.

    Layers that communicate inside of kernels, or of a compiled graph, mark no waits; a profiler
    sees them. What is marked then, waits for sums of gradients or replicas, is the smaller part.

    Args:
        spans: recorded, of one rank.
    """
    waits = [span for span in spans if span.stream == "exposed"]
    tells = any(not span.name.startswith(("gradients", "replicas")) for span in waits)
    return total_us(waits) if tells else None


def exposed_us(comm: Iterable[Span], compute: Iterable[Span]) -> float:
    """Return for how long communication runs with no computation to hide it.

    Args:
        comm: communication of one rank.
        compute: computation of the same rank.
    """
    return sum(end_us - start_us for start_us, end_us in subtract(union(comm), union(compute)))


def innermost(spans: Iterable[Span]) -> list[Span]:
    """Cut nested spans so that each moment belongs to the innermost, and return the pieces.

    Where two spans overlap without nesting, the later one has the moment.

    Args:
        spans: of one rank and one thread of work.
    """
    pieces: list[Span] = []
    stack: list[Span] = []
    cursor_us = 0.0

    def give_top(until_us: float) -> None:
        nonlocal cursor_us
        if until_us > cursor_us:
            duration_us = until_us - cursor_us
            pieces.append(replace(stack[-1], start_us=cursor_us, duration_us=duration_us))
            cursor_us = until_us

    for span in sorted(spans, key=_outer_first):
        while stack and stack[-1].end_us <= span.start_us:
            give_top(stack[-1].end_us)
            stack.pop()
        if stack:
            give_top(span.start_us)
        cursor_us = span.start_us
        stack.append(span)
    while stack:
        give_top(stack[-1].end_us)
        stack.pop()
    return pieces


def to_chrome_trace(spans: Iterable[Span]) -> dict[str, object]:
    """Return the spans as a Chrome trace: a process a rank, a row a stream.

    A viewer takes events of one row for nested calls, so spans of a stream that overlap otherwise
    stand in further rows, "comm (2)" and so on.
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
