"""Record what the CTAs of a fused layer do: spans of a timeline, and shares of each kernel's time.

A kernel's time is the profiler's, and without one the time from the first CTA's start to the last
one's end. It has these shares, as means over the CTAs of a launch:

- the phases of ``fused/kernels/marks.py``, such as "fetch", "wait" and "multiply";
- "idle": between those two times, before a CTA has started or after it has ended;
- "launch and exit": the part of the profiler's time outside of those two times.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

import torch
from rich.table import Table

from halley.core.timeline import Recorder, Span
from halley.distributed.mesh import ParallelGroups
from halley.distributed.peers import all_gather_objects
from halley.fused.buffers import Workspaces
from halley.fused.kernels.marks import PHASES, Launch, ProgramRecords
from halley.strategies.base import AbstractStrategy
from halley.strategies.registry import build_strategy
from halley.tools.candidates import compile_ahead
from halley.tools.layer_case import LayerCase, LayerTensors, make_tensors, outputs_of
from halley.tools.timer import Row, machine_keys, to_float
from halley.tools.tracing import gather_spans, trace_step


KERNELS_CASE = "kernels"  # the "case" of result lines
IDLE, LAUNCH = "idle", "launch and exit"
SHARES = (*PHASES, IDLE, LAUNCH)
_NUM_WARMUP = 3  # later calls replay launches


def record_case(
    case: LayerCase, *, groups: ParallelGroups, device: torch.device, commit: str | None
) -> tuple[list[Row], list[Span]]:
    """Build and record a layer; return result lines, means over ranks, and spans. A collective."""
    records, recorder = ProgramRecords(device), Recorder(device, enabled=False)
    workspaces = Workspaces(groups.ep, device, records=records)
    where = {"recorder": recorder, "device": device}
    strategy = build_strategy("fused", groups.ep, workspaces=workspaces, **where)
    tensors = make_tensors(case, groups, **where)
    compile_ahead([strategy], tensors)
    rows, spans = record_pass(strategy, tensors, records)
    strategy.release()
    keys: Row = {"case": KERNELS_CASE, "model": case.model.name, "num_tokens": case.num_tokens}
    keys |= {"strategy": "fused", "dtype": str(case.dtype).removeprefix("torch.")}
    machine = machine_keys(groups, device=device, commit=commit)
    return [keys | row | machine for row in mean_rows(rows)], spans


def record_pass(
    strategy: AbstractStrategy, tensors: LayerTensors, records: ProgramRecords
) -> tuple[list[Row], list[Span]]:
    """Record forward and backward of a layer; return a row per launch of each rank, and all spans.

    The rows are as from ``share_row``. On a GPU, the pass runs under the profiler. Time zero of the
    spans is each rank's first record, because the clocks of GPUs may differ. A collective.
    """
    groups, device = tensors.groups, tensors.x_TD.device

    def step() -> None:
        records.clear()
        outputs_of(strategy, tensors)

    where = {"rank": groups.ep_rank, "device": device, "group": groups.ep}
    traced = trace_step(step, warmup=_NUM_WARMUP, **where)
    launches = records.read()
    profiled = match_profile(launches, traced) if device.type == "cuda" else [None] * len(launches)
    rows = [share_row(*pair) for pair in zip(launches, profiled, strict=True)]
    spans = to_spans(launches, rank=groups.ep_rank)
    if groups.ep is not None:
        rows = [row for each in all_gather_objects(rows, group=groups.ep) for row in each]
        spans = gather_spans(spans, groups.ep)
    return rows, spans


def match_profile(launches: Sequence[Launch], profiled: Sequence[Span]) -> list[float]:
    """Return the profiler's time of each launch in us; the n-th launch of a kernel has its n-th.

    ``launches`` are in order. Different numbers of launches are a ``RuntimeError``.
    """
    times_us: dict[str, list[float]] = defaultdict(list)
    for span in sorted(profiled, key=lambda span: span.start_us):
        times_us[span.name].append(span.duration_us)
    for name, num_recorded in Counter(launch.kernel for launch in launches).items():
        if (num_profiled := len(times_us[name])) != num_recorded:
            raise RuntimeError(f"{name}: {num_recorded} recorded, {num_profiled} profiled launches")
    left = {name: iter(each) for name, each in times_us.items()}
    return [next(left[launch.kernel]) for launch in launches]


def share_row(launch: Launch, profiled_us: float | None) -> Row:
    """Return the kernel, times in us and shares of a launch.

    ``median_us`` is the kernel's time, ``recorded_us`` the time from the first CTA's start to the
    last one's end. The shares sum to 1, or to more if the profiler's time is the shorter one.
    """
    recorded_us = (launch.end_ns - launch.start_ns) / 1e3
    kernel_us = recorded_us if profiled_us is None else profiled_us
    total_ns = dict.fromkeys(PHASES, 0)
    for phases in launch.phases:
        for name, start_ns, end_ns in phases:
            total_ns[name] += end_ns - start_ns
    times_us = {name: ns / 1e3 / launch.num_programs for name, ns in total_ns.items()}
    times_us[IDLE] = recorded_us - sum(times_us.values())
    times_us[LAUNCH] = max(0.0, kernel_us - recorded_us)
    direction = "backward" if launch.backward else "forward"
    names = {"kernel": launch.kernel, "direction": direction, "num_programs": launch.num_programs}
    row: Row = {**names, "median_us": kernel_us, "recorded_us": recorded_us}
    return row | {"shares": {name: us / kernel_us for name, us in times_us.items()}}


def mean_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the means of times and shares over the rows of each kernel and direction."""
    groups: dict[tuple[object, ...], list[dict[str, object]]] = defaultdict(list)
    for row in rows:
        groups[row["kernel"], row["direction"], row["num_programs"]].append(row)
    found: list[Row] = []
    for same in groups.values():
        shares: list[dict[str, float]] = [row["shares"] for row in same]  # pyright: ignore
        mean: Row = {"shares": {n: round(fmean(each[n] for each in shares), 5) for n in SHARES}}
        for key in ("median_us", "recorded_us"):
            mean[key] = round(fmean(to_float(row[key]) for row in same), 3)
        found.append(same[0] | mean)
    return found


def to_spans(launches: Sequence[Launch], *, rank: int) -> list[Span]:
    """Return a span per recorded phase, on one stream for each kernel and index of a CTA."""
    zero_ns = min((launch.start_ns for launch in launches), default=0)
    return [
        Span(
            name=name, rank=rank, stream=stream, start_us=start_us, duration_us=(end - start) / 1e3
        )
        for launch in launches
        for program, phases in enumerate(launch.phases)
        for name, start, end in phases
        for stream, start_us in [(f"{launch.kernel} {program:04}", (start - zero_ns) / 1e3)]
    ]


def kernel_table(rows: Sequence[Row]) -> Table:
    """Return a table of result lines: time of each kernel in us, shares in percent."""
    table = Table(title="Kernels of strategy fused: mean time in us, and shares of it in %")
    for name in ("model", "tokens", "kernel", "direction"):
        table.add_column(name, no_wrap=True)
    for name in ("CTAs", "us", *SHARES):
        table.add_column(name, justify="right")
    for row in rows:
        shares: dict[str, float] = row["shares"]  # pyright: ignore[reportAssignmentType]
        texts = [str(row[key]) for key in ("model", "num_tokens", "kernel", "direction")]
        texts += [str(row["num_programs"]), f"{to_float(row['median_us']):,.1f}"]
        table.add_row(*texts, *(f"{100 * shares[name]:.1f}" for name in SHARES))
    return table
