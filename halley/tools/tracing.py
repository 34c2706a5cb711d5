"""Trace a step as spans, sum their times, and time compiled steps to compare with predictions."""

import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from halley.core.config import RunConfig
from halley.core.timeline import Span, delay_gpu, exposed_us, innermost, subtract, union, union_us
from halley.distributed.mesh import build_groups
from halley.distributed.peers import all_gather_objects
from halley.strategies.traceable import TraceableStrategy
from halley.tools.timer import Progress, start_together, time_interleaved


if TYPE_CHECKING:
    from halley.compiler import OrderReport

_STEP = "halley_step"
_GPU_MARK = "spin_kernel"  # name of the kernel of ``torch.cuda._sleep``
_PART_PREFIX = "halley::"
_WAIT_OP = "_c10d_functional::wait_tensor"


def trace_step(
    step: Callable[[], None],
    *,
    rank: int,
    device: torch.device | str,
    warmup: int = 2,
    group: dist.ProcessGroup | None = None,
    head_start_us: float = 0.0,
) -> list[Span]:
    """Warm up a step, profile one run; return this rank's spans in order of start time. Collective.

    All ranks synchronise before the profiled step, and time zero is its start, on GPUs to a few
    microseconds. The streams are:

    - on a GPU: "comm" for NCCL kernels and copies between GPUs, "compute 7" for other kernels of
      CUDA stream 7, "copy" for other copies and fills;
    - on a CPU: "comm" for gloo collectives from start to completion, "exposed" for recorded parts
      named ``*.wait`` and for waits of functional collectives, "compute" for the other recorded
      parts (``halley::*``; of nested parts the innermost counts), and "other" for the rest.

    Args:
        warmup: number of steps before the traced one; the last of them runs under the profiler.
        group: as for ``start_together``.
        head_start_us: time that the GPU waits before the traced step, while the host launches its
            kernels. A trace slows the host; without a head start it may launch kernels too late. It
            is ahead until it reads a result, and by the about 1000 launches that CUDA queues.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    for _ in range(warmup - 1):
        step()
    if on_gpu:
        torch.cuda._sleep(1)  # loads the kernel of the marks
    # On a GPU, operators are not recorded: that takes time on the host, which would delay kernels.
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    # Without acc_events, torch 2.11 warns about profiler cycles, although there is one cycle only.
    with profile(activities=activities, acc_events=True) as profiler:
        if warmup:
            step()
        start_together(device, group=group)
        if on_gpu and head_start_us:
            _delay_gpus(device, head_start_us, group)
        with _gpu_marks(device) if on_gpu else record_function(_STEP):
            step()
        # Profile until all ranks are done: a collective's event may end after its wait.
        start_together(device, group=group)
    events = list(profiler.events() or [])
    spans = (
        _cuda_spans(events, rank=rank, has_delay=head_start_us > 0.0)
        if on_gpu
        else _cpu_spans(events, rank=rank)
    )
    return sorted(spans, key=lambda span: span.start_us)


def _delay_gpus(device: torch.device, delay_us: float, group: dist.ProcessGroup | None) -> None:
    """Let the GPUs of all ranks wait, and begin their next work at the same time."""
    delay_gpu(delay_us)
    if dist.is_initialized():  # clocks of two GPUs may differ by a percent
        dist.all_reduce(torch.zeros(1, device=device), group=group)


@contextmanager
def _gpu_marks(device: torch.device) -> Generator[None]:
    """Launch a kernel before and after the work of the ``with`` block, and wait for it."""
    torch.cuda._sleep(1)
    yield
    torch.cuda.synchronize(device)
    torch.cuda._sleep(1)


def _is_on_device(event: FunctionEvent) -> bool:
    return event.device_type.name != "CPU"


def _cuda_spans(events: list[FunctionEvent], *, rank: int, has_delay: bool) -> list[Span]:
    marks = [each.time_range for each in events if _GPU_MARK in each.name]
    num_marks = 2 + has_delay
    if len(marks) != num_marks:
        raise RuntimeError(
            f"the trace must have {num_marks} kernels of torch.cuda._sleep, and has {len(marks)}: "
            "the step must not call it"
        )
    *_, first, last = sorted(marks, key=lambda mark: mark.start)
    spans: list[Span] = []
    for event in events:
        if not _is_on_device(event) or not first.end <= event.time_range.start < last.start:
            continue
        if "nccl" in event.name.lower() or event.name.startswith("Memcpy PtoP"):
            stream = "comm"
        elif event.name.startswith(("Memcpy", "Memset")):
            stream = "copy"
        else:
            stream = f"compute {event.device_resource_id}"
        spans.append(_to_span(event, stream, zero_us=first.end, rank=rank))
    return spans


def _cpu_spans(events: list[FunctionEvent], *, rank: int) -> list[Span]:
    (step,) = (event for event in events if event.name == _STEP)
    start_us, end_us = step.time_range.start, step.time_range.end
    events = [event for event in events if start_us <= event.time_range.start < end_us]
    comm: list[Span] = []
    # Spans of two threads do not nest, so ``innermost`` is called for each thread alone.
    parts_by_thread: dict[int, list[Span]] = {step.thread: []}
    waits = [event for event in events if _is_wait(event)]
    for event in events:
        if event.name.startswith("gloo:"):
            comm.append(_to_span(event, "comm", zero_us=start_us, rank=rank))
        elif event.name == _WAIT_OP and any(_is_inside(event, wait) for wait in waits):
            continue  # torch's dispatcher calls ``wait_tensor`` a second time inside its first call
        elif event.name == _WAIT_OP or event.name.startswith(_PART_PREFIX):
            stream = "exposed" if _is_wait(event) else "compute"
            part = _to_span(event, stream, zero_us=start_us, rank=rank)
            parts_by_thread.setdefault(event.thread, []).append(part)
    pieces = {thread: innermost(parts) for thread, parts in parts_by_thread.items()}
    whole = (0.0, end_us - start_us)
    rest = [
        Span(name="other", rank=rank, stream="other", start_us=start, duration_us=end - start)
        for start, end in subtract([whole], union(pieces[step.thread]))
    ]
    return [*comm, *(piece for thread in pieces.values() for piece in thread), *rest]


def _is_wait(event: FunctionEvent) -> bool:
    return event.name == _WAIT_OP or (
        event.name.startswith(_PART_PREFIX) and event.name.endswith(".wait")
    )


def _is_inside(event: FunctionEvent, outer: FunctionEvent) -> bool:
    start_us, of_outer = event.time_range.start, outer.time_range
    return event.thread == outer.thread and of_outer.start < start_us < of_outer.end


def _to_span(event: FunctionEvent, stream: str, *, zero_us: float, rank: int) -> Span:
    name, times = event.name.removeprefix(_PART_PREFIX), event.time_range
    start_us, duration_us = times.start - zero_us, times.end - times.start
    return Span(name=name, rank=rank, stream=stream, start_us=start_us, duration_us=duration_us)


def gather_spans(spans: list[Span], group: dist.ProcessGroup | None = None) -> list[Span]:
    """Return, on each rank, the spans of all ranks of a group (None: all ranks). Collective.

    Time zero must be the same moment on all ranks, as in ``trace_step``.
    """
    by_rank = all_gather_objects(spans, group=group or dist.group.WORLD)
    return [span for rank_spans in by_rank for span in rank_spans]


def exposed_comm_us(spans: Iterable[Span]) -> float:
    """Return the microseconds of exposed communication in the spans of one rank.

    If there are "exposed" spans (of a recorder, or of a trace on a CPU), the result is their total
    time. Otherwise (trace on a GPU, simulation) it is the time of "comm" spans that no "compute"
    span overlaps.
    """
    spans = list(spans)
    waits = [span for span in spans if span.stream == "exposed"]
    if waits:
        return union_us(waits)
    return exposed_us(
        [span for span in spans if span.stream == "comm"],
        [span for span in spans if span.stream.startswith("compute")],
    )


def time_by_part(spans: Iterable[Span]) -> dict[str, float]:
    """Return a rank's microseconds per span name, longest first, without the time of inner spans.

    An "exposed" span counts as nested in the computation that it interrupts. Spans of other streams
    do not reduce the time of computation.
    """
    by_stream: dict[str, list[Span]] = defaultdict(list)
    times_us: dict[str, float] = {}
    for span in spans:
        by_stream["compute" if span.stream == "exposed" else span.stream].append(span)
        times_us[span.name] = 0.0
    for of_stream in by_stream.values():
        for piece in innermost(of_stream):
            times_us[piece.name] += piece.duration_us
    return dict(sorted(times_us.items(), key=lambda item: -item[1]))


def measure_graphs(
    config: RunConfig,
    *,
    options: dict[str, Any],
    device: torch.device,
    num_steps: int,
    on_progress: Progress,
) -> "tuple[list[OrderReport], float, list[Span]]":
    """Time steps of a model with compiler passes; return predictions, time and spans. Collective.

    The graphs run in eager mode, on random tokens. Rank 0 measures the operators; all ranks measure
    the all-to-alls. ``options`` are those of the compiler backend. The result has reports with
    predicted times of the forward and the backward graph, the microseconds of the slowest rank
    (median over steps), and the spans of one step on this rank. A ``RuntimeError`` means that no
    graph of the step has an all-to-all.
    """
    # Imported here, because torch's compiler takes seconds to import. ``halley.compiler`` is first:
    # it installs Halley's interpreter, which must happen before Dynamo imports Triton.
    from halley.compiler import Backend
    from halley.planner.graph_plan import compile_step

    groups = build_groups(config.ep_size, device_type=device.type, tp_size=config.expert_tp_size)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (config.train.batch_size, config.data.seq_len)
    tokens_BS = torch.randint(config.model.vocab_size, shape, generator=generator).to(device)
    backend = Backend()
    with tempfile.TemporaryDirectory() as folder:
        options = {"profiles": Path(folder) / "profiles.jsonl", **options}
        options |= {"inner": "eager", "measure": True}
        functional = TraceableStrategy(groups.ep, tp_size=groups.tp_size)
        layers = [functional] * config.model.num_moe_layers
        place = {"groups": groups, "device": device}
        model, run = compile_step(config, layers, backend=backend, options=options, **place)
        model.init_weights(seed=0)

        def step() -> None:
            run(tokens_BS)
            model.zero_grad()

        on_progress("compiling, and measuring operators", 0, 0)
        # Ignore warnings of torch about its tracing.
        ignored = warnings.catch_warnings(action="ignore")
        with ignored, torch._dynamo.config.patch(capture_scalar_outputs=True):
            (timing,) = time_interleaved(
                {"step": step}, device=device, num_samples=num_steps,
                on_progress=lambda done, total: on_progress("measuring steps", done, total),
            ).values()  # fmt: skip
            spans = trace_step(step, rank=dist.get_rank(), device=device, warmup=1)
    if not backend.reports:
        raise RuntimeError("no graph has an all-to-all, so there is nothing to compare")
    return backend.reports, timing.median_us, spans


def simulated_step(reports: "Sequence[OrderReport]", *, passed: bool) -> list[Span]:
    """Concatenate simulated spans of a step's graphs, with passes if ``passed``, or without."""
    step: list[Span] = []
    for report in reports:
        zero_us = max((span.end_us for span in step), default=0.0)
        spans = report.spans_after if passed else report.spans_before
        step += [replace(span, start_us=span.start_us + zero_us) for span in spans]
    return step
