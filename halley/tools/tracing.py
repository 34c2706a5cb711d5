"""Profile one step, and compute exposed communication and the times of parts from its spans."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from halley.core.timeline import Span, exposed_us, innermost, subtract, union, union_us
from halley.tools.timer import start_together


_STEP = "halley_step"
_PART_PREFIX = "halley::"
_WAIT_OP = "_c10d_functional::wait_tensor"


@dataclass(frozen=True, kw_only=True)
class _Event:
    """One event of the profiler; ``row`` is a host thread or a CUDA stream."""

    name: str
    start_us: float
    end_us: float
    row: int
    on_device: bool
    is_annotation: bool

    def is_inside(self, other: "_Event") -> bool:
        return self.row == other.row and other.start_us < self.start_us < other.end_us

    def to_span(self, name: str, *, rank: int, stream: str, zero_us: float) -> Span:
        return Span(
            name=name,
            rank=rank,
            stream=stream,
            start_us=self.start_us - zero_us,
            duration_us=self.end_us - self.start_us,
        )


def trace_step(
    step: Callable[[], None],
    *,
    rank: int,
    device: torch.device | str,
    warmup: int = 2,
    group: dist.ProcessGroup | None = None,
) -> list[Span]:
    """Run a step several times, the last time under the profiler, and return its spans.

    All ranks synchronise before the profiled step, and time zero is its start. The streams are:

    - on a GPU: "comm" for NCCL kernels and copies between GPUs, "compute 7" for other kernels of
      CUDA stream 7, "copy" for other copies and fills;
    - on a CPU: "comm" for gloo collectives from start to completion, "exposed" for recorded parts
      named ``*.wait`` and for waits of functional collectives, "compute" for the other recorded
      parts (``halley::*``; of nested parts the innermost counts), and "other" for the rest.

    Args:
        step: one step, called ``warmup + 1`` times.
        rank: the rank written into the spans.
        device: the device of the step.
        warmup: number of steps before; the last of them already runs under the profiler.
        group: the ranks that run the step; None means all ranks, or this process alone without
            process groups.

    Raises:
        ValueError: warmup is negative.
    """
    if warmup < 0:
        raise ValueError(f"warmup ({warmup}) must be at least 0")
    device = torch.device(device)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for _ in range(warmup - 1):
        step()
    # Without acc_events, torch 2.11 warns about profiler cycles; this profile has one cycle.
    with profile(activities=activities, acc_events=True) as profiler:
        if warmup:
            step()
        start_together(device, group=group)
        with record_function(_STEP):
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        # The range of a collective may end after the wait for it has returned.
        start_together(device, group=group)
    events = _read(profiler)
    (step_event,) = (event for event in events if event.name == _STEP and not event.on_device)
    inside = [e for e in events if step_event.start_us <= e.start_us < step_event.end_us]
    to_spans = _cuda_spans if device.type == "cuda" else _cpu_spans
    return sorted(to_spans(inside, step_event, rank=rank), key=lambda span: span.start_us)


def gather_spans(spans: list[Span], group: dist.ProcessGroup | None = None) -> list[Span]:
    """Return the spans of all ranks of the group, on every rank.

    Args:
        spans: of this rank; time zero is the same moment on all ranks, as in ``trace_step``.
        group: the ranks that take part; None means all ranks.
    """
    by_rank: list[list[Span]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(by_rank, spans, group=group)
    return [span for rank_spans in by_rank for span in rank_spans]


def exposed_comm_us(spans: Iterable[Span]) -> float:
    """Return the microseconds for which one rank waits for communication.

    If there are "exposed" spans (of a recorder, or of a trace on a CPU), the result is their total
    time. Otherwise (trace on a GPU, simulation) it is the time of "comm" spans that no "compute"
    span overlaps.

    Args:
        spans: of one rank.

    Raises:
        ValueError: the spans are of several ranks.
    """
    spans = list(spans)
    _require_one_rank(spans)
    waits = [span for span in spans if span.stream == "exposed"]
    if waits:
        return union_us(waits)
    return exposed_us(
        [span for span in spans if span.stream == "comm"],
        [span for span in spans if span.stream.startswith("compute")],
    )


def time_by_part(spans: Iterable[Span]) -> dict[str, float]:
    """Return the microseconds of each part by name, longest first, without nested parts.

    An "exposed" span counts as nested in the computation that it interrupts. Spans of other streams
    do not reduce the time of computation.

    Args:
        spans: of one rank, as a recorder collects them.

    Raises:
        ValueError: the spans are of several ranks.
    """
    spans = list(spans)
    _require_one_rank(spans)
    by_stream: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_stream["compute" if span.stream == "exposed" else span.stream].append(span)
    times_us: dict[str, float] = {span.name: 0.0 for span in spans}
    for of_stream in by_stream.values():
        for piece in innermost(of_stream):
            times_us[piece.name] += piece.duration_us
    return dict(sorted(times_us.items(), key=lambda item: -item[1]))


def _read(profiler: profile) -> list[_Event]:
    return [
        _Event(
            name=event.name,
            start_us=event.time_range.start,
            end_us=event.time_range.end,
            row=event.device_resource_id if event.device_type.name != "CPU" else event.thread,
            on_device=event.device_type.name != "CPU",
            is_annotation=event.is_user_annotation,
        )
        for event in profiler.events() or []
    ]


def _cuda_spans(events: list[_Event], step_event: _Event, *, rank: int) -> list[Span]:
    spans: list[Span] = []
    for event in events:
        if not event.on_device or event.is_annotation:
            continue
        if "nccl" in event.name.lower() or event.name.startswith("Memcpy PtoP"):
            stream = "comm"
        elif event.name.startswith(("Memcpy", "Memset")):
            stream = "copy"
        else:
            stream = f"compute {event.row}"
        zero_us = step_event.start_us
        spans.append(event.to_span(event.name, rank=rank, stream=stream, zero_us=zero_us))
    return spans


def _cpu_spans(events: list[_Event], step_event: _Event, *, rank: int) -> list[Span]:
    comm: list[Span] = []
    # A part is nested only in parts of its own thread.
    parts_by_thread: dict[int, list[Span]] = {step_event.row: []}
    waits = [event for event in events if _is_wait(event)]
    to_span = partial(_Event.to_span, rank=rank, zero_us=step_event.start_us)
    for event in events:
        if event.name.startswith("gloo:"):
            comm.append(to_span(event, event.name, stream="comm"))
        elif event.name == _WAIT_OP and any(event.is_inside(wait) for wait in waits):
            continue  # the dispatcher calls the op a second time inside itself
        elif event.name == _WAIT_OP or event.name.startswith(_PART_PREFIX):
            name = event.name.removeprefix(_PART_PREFIX)
            stream = "exposed" if _is_wait(event) else "compute"
            part = to_span(event, name, stream=stream)
            parts_by_thread.setdefault(event.row, []).append(part)
    pieces = {thread: innermost(parts) for thread, parts in parts_by_thread.items()}
    step_interval = (0.0, step_event.end_us - step_event.start_us)
    rest = [
        Span(name="other", rank=rank, stream="other", start_us=start, duration_us=end - start)
        for start, end in subtract([step_interval], union(pieces[step_event.row]))
    ]
    return [*comm, *(piece for thread in pieces.values() for piece in thread), *rest]


def _is_wait(event: _Event) -> bool:
    return event.name == _WAIT_OP or (
        event.name.startswith(_PART_PREFIX) and event.name.endswith(".wait")
    )


def _require_one_rank(spans: list[Span]) -> None:
    ranks = {span.rank for span in spans}
    if len(ranks) > 1:
        raise ValueError(f"spans (of ranks {sorted(ranks)}) must be of one rank")
