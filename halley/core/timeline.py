"""Record spans (named time intervals of a rank), measure how they overlap, write Chrome traces."""

import gzip
import json
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import torch
from torch.profiler import record_function

from halley.core.validation import check_type, parse_device


Interval = tuple[float, float]
_Moment = int | torch.cuda.Event
_CYCLES_PER_US = 2000  # clock cycles of a GPU at 2 GHz
_POLL_LASTS_S = 1.0  # seconds after a ``poll`` in which a process counts as waiting


@dataclass(frozen=True, kw_only=True)
class Span:
    """Start and duration of a piece of work on one stream of one rank, in microseconds.

    ``stream`` is a row of the timeline: "compute", "comm", "exposed" (the rank waits for
    communication), or any other name. Further compute streams are "compute 7" and so on. All spans
    of one timeline have the same origin of time.
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
@dataclass(eq=False)
class CurrentOperation:
    """The operation that this process began last, which its watchdog reports to other ranks.

    Ranks that run the same program have the same ``num_operations`` at the same point.
    """

    name: str = ""  # of the operation that began last
    num_operations: int = 0
    wait_depth: int = 0  # number of open ``waiting`` contexts, one inside the other
    polled_s: float = -_POLL_LASTS_S  # time of the last ``poll``; the first value means no poll

    @property
    def is_waiting(self) -> bool:
        """Whether this process is inside ``waiting``, or called ``poll`` less than a second ago."""
        return self.wait_depth > 0 or time.monotonic() - self.polled_s < _POLL_LASTS_S

    def begin(self, name: str) -> None:
        """Record that this process begins an operation, which all ranks must run."""
        self.name = name
        self.num_operations += 1

    def waiting(
        self, name: str, inside: AbstractContextManager[object] | None = None
    ) -> AbstractContextManager[object]:
        """Return a context that begins operation ``name`` and marks this process as waiting in it.

        ``inside`` is another context, entered and left with it. A nested wait begins no operation.
        """
        return _Wait(self, name, inside or nullcontext())

    def poll(self) -> None:
        """Count this process as waiting for another rank during the next second."""
        self.polled_s = time.monotonic()


@final
@dataclass(eq=False)
class _Wait:
    # This is a class, because each collective enters it, and a generator's context is slower.
    operation: CurrentOperation
    name: str
    inside: AbstractContextManager[object]

    def __enter__(self) -> object:
        if self.operation.wait_depth == 0:  # an inner wait belongs to the outer operation
            self.operation.begin(self.name)
        self.operation.wait_depth += 1
        return self.inside.__enter__()

    def __exit__(self, *error: Any) -> Any:
        self.operation.wait_depth -= 1
        return self.inside.__exit__(*error)


# This object is global, because custom operators and autograd threads write to it, and PyTorch
# calls them without passing it as an argument. The watchdog reads it to find deadlocks.
CURRENT_OPERATION: Final = CurrentOperation()


@final
class Recorder:
    """Records spans of a step, timed by the wall clock on a CPU and by CUDA events on a GPU.

    The host reads the events only in ``collect``, so it never waits when a span begins or ends. A
    profiler shows the same spans as ``halley::<name>``. Any thread may mark spans, also the thread
    that runs backward. If ``enabled`` is false, spans are shown to the profiler but not recorded.
    A caller may change ``enabled`` between steps.
    """

    def __init__(self, device: torch.device | str, *, rank: int = 0, enabled: bool = True) -> None:
        self._device = parse_device(device)
        check_type(rank, int, name="rank")
        check_type(enabled, bool, name="enabled")
        self._rank = rank
        self.enabled = enabled
        self.sent_bytes = 0  # bytes that ``Exchange`` has sent to other ranks so far
        self._marks: list[tuple[str, str, _Moment, _Moment]] = []  # name, stream, start, end

    def span(self, name: str, *, stream: str = "compute") -> AbstractContextManager[object]:
        """Return a context that records the ``with`` block as one span while ``enabled`` is true.

        Spans of waits for other ranks have stream "exposed" and names that end in ".wait". Inside
        ``torch.compile``, nothing is recorded, and inside a CUDA graph capture, only the profiler
        shows the span, because the block does not run its work then.
        """
        mark: AbstractContextManager[object] = nullcontext()
        if torch.compiler.is_compiling():
            return mark
        is_gpu = self._device.type == "cuda"
        if self.enabled and not (is_gpu and torch.cuda.is_current_stream_capturing()):
            mark = self._timed(name, stream)
        # record_function takes some microseconds of host time even without a profiler. PyTorch has
        # only a private function that tells whether a profiler runs.
        elif torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            mark = record_function(f"halley::{name}")
        return CURRENT_OPERATION.waiting(name, mark) if stream == "exposed" else mark

    @contextmanager
    def paused(self) -> Generator[None]:
        """Record nothing in the ``with`` block; restore ``enabled`` after it, also on an error."""
        enabled, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = enabled

    def collect(self) -> list[Span]:
        """Wait for the device; return spans since the last call, sorted by start, from time 0."""
        marks, self._marks = self._marks, []
        if not marks:
            return []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        origin = marks[0][2]
        # Starts and ends are measured from one origin, so that rounding cannot move the end of an
        # inner span past the end of the outer span.
        times_us = [(_elapsed_us(origin, a), _elapsed_us(origin, b)) for _, _, a, b in marks]
        first_us = min(times_us)[0]
        spans: list[Span] = []
        for (name, stream, *_), (start_us, end_us) in zip(marks, times_us, strict=True):
            times = {"start_us": start_us - first_us, "duration_us": end_us - start_us}
            spans.append(Span(name=name, rank=self._rank, stream=stream, **times))
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


def delay_gpu(delay_us: float) -> None:
    """Let the current CUDA stream wait, so that the host can launch its next kernels meanwhile.

    The wait takes ``delay_us`` microseconds at a clock rate of 2 GHz, and longer at a lower one.
    """
    torch.cuda._sleep(round(delay_us * _CYCLES_PER_US))  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]


def total_us(spans: Iterable[Span]) -> float:
    """Return the sum of the durations of spans; overlapping time counts more than once."""
    return sum(span.duration_us for span in spans)


def union(spans: Iterable[Span]) -> list[Interval]:
    """Return the disjoint time intervals in which at least one span runs, in order."""
    merged: list[Interval] = []
    for start_us, end_us in sorted((span.start_us, span.end_us) for span in spans):
        if merged and start_us <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_us))
        elif end_us > start_us:
            merged.append((start_us, end_us))
    return merged


def union_us(spans: Iterable[Span]) -> float:
    """Return the total time in which at least one span runs, in microseconds."""
    return sum(end_us - start_us for start_us, end_us in union(spans))


def subtract(intervals: list[Interval], cover: list[Interval]) -> list[Interval]:
    """Return the times in ``intervals`` but not in ``cover``; both lists are sorted and merged."""
    uncovered: list[Interval] = []
    for start_us, end_us in intervals:
        first = bisect_right(cover, start_us, key=lambda each: each[1])
        last = bisect_left(cover, end_us, key=lambda each: each[0])
        for cover_start_us, cover_end_us in cover[first:last]:
            if cover_start_us > start_us:
                uncovered.append((start_us, cover_start_us))
            start_us = cover_end_us
        if end_us > start_us:
            uncovered.append((start_us, end_us))
    return uncovered


def waited_us(spans: Iterable[Span]) -> float | None:
    """Return the microseconds of a rank's waits for communication; None if layers record no waits.

    Layers that communicate inside kernels or compiled graphs record no waits. A sum of only the
    waits for gradients and replicas would be misleading.
    """
    waits = [span for span in spans if span.stream == "exposed"]
    is_known = any(not span.name.startswith(("gradients", "replicas")) for span in waits)
    return total_us(waits) if is_known else None


def exposed_us(comm: Iterable[Span], compute: Iterable[Span]) -> float:
    """Return for how many microseconds a rank communicates while it does not compute."""
    return sum(end_us - start_us for start_us, end_us in subtract(union(comm), union(compute)))


def innermost(spans: Iterable[Span]) -> list[Span]:
    """Return the spans of one thread, possibly nested, cut into pieces that do not overlap.

    Each moment belongs to the innermost span, or to the later one of two spans that overlap without
    nesting.
    """
    pieces: list[Span] = []
    stack: list[Span] = []
    cursor_us = 0.0

    def emit(span: Span, until_us: float) -> None:
        nonlocal cursor_us
        if until_us > cursor_us:
            duration_us = until_us - cursor_us
            pieces.append(replace(span, start_us=cursor_us, duration_us=duration_us))
            cursor_us = until_us

    for span in sorted(spans, key=_outer_first):
        while stack and stack[-1].end_us <= span.start_us:
            top = stack.pop()
            emit(top, top.end_us)
        if stack:
            emit(stack[-1], span.start_us)
        cursor_us = span.start_us
        stack.append(span)
    for top in reversed(stack):
        emit(top, top.end_us)
    return pieces


def to_chrome_trace(spans: Iterable[Span]) -> dict[str, object]:
    """Return spans as a Chrome trace with one process per rank and one or more rows per stream.

    Spans that overlap without nesting get further rows: a viewer shows a row as nested calls.
    """
    by_lane: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in spans:
        by_lane[span.rank, span.stream].append(span)

    events: list[dict[str, object]] = []
    for rank in sorted({rank for rank, _ in by_lane}):
        events.append(_metadata("process_name", {"pid": rank}, name=f"rank {rank}"))
        events.append(_metadata("process_sort_index", {"pid": rank}, sort_index=rank))
    tid = 0
    for rank, stream in sorted(by_lane):
        for index, row in enumerate(_nesting_rows(by_lane[rank, stream])):
            tid += 1
            place: dict[str, object] = {"pid": rank, "tid": tid}
            row_name = stream if index == 0 else f"{stream} ({index + 1})"
            events.append(_metadata("thread_name", place, name=row_name))
            events.append(_metadata("thread_sort_index", place, sort_index=tid))
            for span in row:
                times = {"ts": span.start_us, "dur": span.duration_us}
                events.append({"ph": "X", "name": span.name, "cat": stream, **place, **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(spans: Iterable[Span], path: str | Path) -> None:
    """Write spans as a Chrome trace, which Perfetto opens; gzip it if the name ends in .gz."""
    content = json.dumps(to_chrome_trace(spans)).encode()
    try:
        Path(path).write_bytes(gzip.compress(content) if str(path).endswith(".gz") else content)
    except OSError as error:
        raise ValueError(f"trace ({path}) must be a file to write: {error.strerror}") from error


def _elapsed_us(start: Any, end: Any) -> float:
    return (end - start) / 1e3 if isinstance(start, int) else start.elapsed_time(end) * 1e3


def _outer_first(span: Span) -> Interval:
    return (span.start_us, -span.end_us)


def _nesting_rows(spans: list[Span]) -> list[list[Span]]:
    """Return spans divided into rows in which any two spans are disjoint or nested."""
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


def _metadata(kind: str, place: dict[str, object], **args: object) -> dict[str, object]:
    return {"ph": "M", "name": kind, **place, "args": args}
