"""Measure training steps with each compiler pass, without passes, and with other schedulers."""

import gc
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch._dynamo
import torch._dynamo.config
import torch._functorch.config
import torch.distributed as dist

from benchmarks.gpu_memory import unused_pool_bytes
from benchmarks.graph_bench.case import (
    CHUNKED,
    DIVIDED,
    LANES,
    NONE,
    OVERLAP,
    SEQUENTIAL,
    WGRAD,
    GraphCase,
    graph_case_name,
)
from benchmarks.graph_bench.variants import Variant, Workshop
from halley.core.timeline import union_us
from halley.cost.simulate import GraphTime
from halley.distributed.mesh import ParallelGroups
from halley.tools.candidates import measure_link
from halley.tools.timer import (
    Progress,
    Row,
    Timing,
    machine_keys,
    time_interleaved,
    time_keys,
    to_float,
)
from halley.tools.tracing import exposed_comm_us, trace_step


_TRACES = 3
_HEAD_START_US = 300_000.0  # longer than the step of any model of this benchmark
_SHOWN_NAMES = 4  # of gradients that differ
Key = tuple[str, str]  # variant and setting


def measure_graph_cases(
    cases: Sequence[GraphCase],
    variants: Sequence[str],
    *,
    groups: ParallelGroups,
    device: torch.device,
    num_samples: int,
    commit: str | None,
    slow_link: str = "none",
    on_progress: Progress | None = None,
    on_rows: Callable[[list[Row]], object] | None = None,
) -> list[Row]:
    """Measure the cases one after another and return all result lines.

    Args:
        cases: the models.
        variants: of ``VARIANTS``. "none" always runs, because all others are compared with it.
        groups: one expert-parallel group of all ranks, at least two.
        device: of this rank.
        num_samples: timed steps of each variant.
        commit: to write into the lines; None takes that of the working tree.
        slow_link: how NCCL is slowed down; written into the lines.
        on_progress: called with a text, the steps done and the total.
        on_rows: called on every rank after each case with the lines so far.

    Raises:
        RuntimeError: a variant failed on some ranks only. If it fails on all ranks, its line has
            the error.
    """
    link = measure_link(groups, device=device)
    common = machine_keys(groups, device=device, commit=commit) | {
        "case": graph_case_name(slow_link),
        "slow_link": slow_link,
        "link_gb_per_s": round(link / 1e9, 3),
    }
    rows: list[Row] = []
    for case in cases:
        found = _bench_case(
            case,
            variants,
            groups=groups,
            device=device,
            num_samples=num_samples,
            on_progress=on_progress,
        )
        rows += [row | common for row in found]
        if on_rows is not None:
            on_rows(rows)
        _release(device)
    return rows


def _bench_case(
    case: GraphCase,
    variants: Sequence[str],
    *,
    groups: ParallelGroups,
    device: torch.device,
    num_samples: int,
    on_progress: Progress | None,
) -> list[Row]:
    """Measure the steps of one model; return a result line for each variant, on every rank.

    All variants alternate on the same parameters, which no step changes. Predictions are those of
    this rank; rank 0 has measured the times of the operators.
    """
    report = None if on_progress is None else partial(on_progress, case.shape.name)
    keys = [(name, s) for name in dict.fromkeys([NONE, *variants]) for s in case.settings(name)]
    with (
        tempfile.TemporaryDirectory() as folder,
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        torch._functorch.config.patch(activation_memory_budget=case.activation_budget),
    ):
        workshop = Workshop(case, groups, device, profiles=Path(folder) / "profiles.jsonl")
        made: dict[Key, Variant | str] = {}
        for index, key in enumerate(keys):
            if on_progress is not None:
                text = f"{case.shape.name}: {' '.join(key).strip()}, first step"
                on_progress(text, index, len(keys))
            made[key] = workshop.prepare(*key)
        workshop.forget_values()
        ready = {key: each for key, each in made.items() if isinstance(each, Variant)}
        timings: dict[str, Timing] = {}
        if ready:
            timings = time_interleaved(
                {" ".join(key): each.run for key, each in ready.items()},
                device=device,
                num_samples=num_samples,
                group=groups.world,
                on_progress=report,
            )
        times = dict(zip(ready, timings.values(), strict=True))
        predicted = _predict(ready, case.num_microbatches)
        held_bytes = sum(each.held_bytes for each in ready.values())
        rows: list[Row] = []
        for key in _best_settings(keys, times):
            row = _workload(case, groups, key)
            if key in ready:
                row |= _figures(ready[key], times[key], predicted.get(key[0]), groups=groups)
                others_bytes = held_bytes - ready[key].held_bytes
                row |= _traced(ready[key], others_bytes, device=device, groups=groups)
            else:
                row |= {"error": made[key]}
            rows.append(row)
    return _compared(rows)


def _release(device: torch.device) -> None:
    """Free compiled graphs and tensors of a case before the next one."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _best_settings(keys: Sequence[Key], times: dict[Key, Timing]) -> list[Key]:
    """Return the fastest setting of each variant, or its first if none has a time."""
    settings: dict[str, list[Key]] = {}
    for key in keys:
        settings.setdefault(key[0], []).append(key)
    return [
        min(own, key=lambda key: times[key].median_us if key in times else math.inf)
        for own in settings.values()
    ]


def _predict(ready: dict[Key, Variant], num_microbatches: int) -> dict[str, tuple[float, float]]:
    """Return the predicted time of a step and of its exposed communication, by variant.

    A graph has a report only if the pass has changed it, so "none" takes its times from the reports
    of "wgrad", or from the plan of "lanes".
    """
    times: dict[str, list[GraphTime]] = {}
    for variant in (DIVIDED, LANES):
        if (variant, "") in ready:
            times |= {name: [time] for name, time in ready[variant, ""].predicted}
    reports = ready[WGRAD, ""].reports if (WGRAD, "") in ready else ()
    if len(reports) == 2:
        times[NONE] = [each.time_before for each in reports] * num_microbatches
        times[WGRAD] = [each.time_after for each in reports] * num_microbatches
    return {
        name: (sum(each.makespan_us for each in own), sum(each.exposed_us for each in own))
        for name, own in times.items()
    }


def _workload(case: GraphCase, groups: ParallelGroups, key: Key) -> Row:
    """Return a result line without its figures."""
    variant, setting = key
    is_plain = variant in (SEQUENTIAL, CHUNKED)
    figures = "median_us p10_us p90_us floor_us exposed_comm_us comm_us predicted_us"
    figures += " predicted_exposed_us predicted_over_measured compile_s optimise_s plan_s peak_mib"
    figures += " max_rel_err bit_equal num_differing differing filled_windows"
    figures += " num_lanes moves_units planned_peak_bytes planned_total_bytes"
    figures += " sm_margins baseline speedup exposed_over_baseline peak_over_none error"
    return {
        "case": "graph",
        "model": case.shape.name,
        "variant": variant,
        "num_layers": case.shape.num_layers,
        "hidden_size": case.shape.hidden_size,
        "num_experts": case.shape.experts_per_rank * groups.ep_size,
        "gate": case.gate_name,
        "num_tokens": case.num_tokens,
        "seq_len": case.shape.seq_len,
        "batch_size": case.batch_size,
        "num_microbatches": case.num_microbatches,
        "ep_size": groups.ep_size,
        "tp_size": 1,
        "skew": "router",
        "seed": case.seed,
        "dtype": str(case.dtype).removeprefix("torch."),
        "strategy": variant if is_plain else case.strategy,
        "passes": variant if variant in (WGRAD, LANES, DIVIDED) else "none",
        "inner": None if is_plain else "inductor" if variant == OVERLAP else case.inner,
        "fixed_sizes": case.fixed_sizes and not is_plain,
        "max_load": None if is_plain else case.bound,
        "activation_budget": None if is_plain else case.activation_budget,
        "memory_margin": case.memory_margin,
        "direction": "forward_backward",
        "setting": setting or None,
        "settings": case.settings(variant) if setting else None,
        "samples": 0,
        **dict.fromkeys(figures.split()),
    }


def _figures(
    each: Variant,
    timing: Timing,
    predicted: tuple[float, float] | None,
    *,
    groups: ParallelGroups,
) -> Row:
    """Return the keys of a result line that need no trace."""
    worst = _worst([each.difference.max_rel_err, len(each.difference.names)], groups)
    row: Row = {
        **time_keys(timing),
        "compile_s": round(each.compile_s, 2),
        "max_rel_err": worst[0],
        "bit_equal": worst[1] == 0,
        "num_differing": int(worst[1]),
        "differing": list(each.difference.names[:_SHOWN_NAMES]),
    }
    if predicted is not None:
        row["predicted_us"], row["predicted_exposed_us"] = (round(us, 1) for us in predicted)
        row["predicted_over_measured"] = round(predicted[0] / timing.median_us, 4)
    if each.lanes is not None and (plan := each.lanes.plan) is not None:
        row["num_lanes"], row["moves_units"] = plan.num_lanes, plan.moves_units
        row["planned_peak_bytes"], row["sm_margins"] = plan.peak_bytes, plan.sm_margins
        row["planned_total_bytes"] = each.planned_bytes
        row["optimise_s"] = round(each.optimise_s, 2)
    if each.reports:
        planning_s = sum(report.planning_s for report in each.reports)
        measuring_s = sum(report.measuring_s for report in each.reports)
        row["optimise_s"] = round(planning_s + measuring_s, 2)
        row["plan_s"] = round(planning_s, 2)
        windows = [behind for report in each.reports for behind in report.windows.values()]
        row["sm_margins"] = max((report.sm_margins for report in each.reports), default=(0, 0))
        row["filled_windows"] = f"{sum(map(bool, windows))}/{len(windows)}"
    return row


def _traced(
    each: Variant, others_bytes: int, *, device: torch.device, groups: ParallelGroups
) -> Row:
    """Measure communication time and memory of the worst rank, in steps that are not timed.

    Memory is the peak of torch's allocator: parameters, gradients and activations, and the memory
    pools of CUDA graphs. It is without ``others_bytes``, which other variants hold in such pools.
    """
    exposed_us: list[float] = []
    comm_us: list[float] = []
    for _ in range(_TRACES):
        spans = trace_step(
            each.run,
            rank=groups.rank,
            device=device,
            warmup=1,
            group=groups.world,
            head_start_us=_HEAD_START_US,
        )
        exposed_us.append(exposed_comm_us(spans))
        comm_us.append(union_us(span for span in spans if span.stream == "comm"))
    peak_mib = 0.0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        each.run()
        torch.cuda.synchronize(device)
        own_bytes = torch.cuda.max_memory_allocated(device) + unused_pool_bytes(device)
        peak_mib = (own_bytes - others_bytes) / 2**20
    worst = _worst([statistics.median(exposed_us), statistics.median(comm_us), peak_mib], groups)
    return {
        "exposed_comm_us": round(worst[0], 1),
        "comm_us": round(worst[1], 1),
        "peak_mib": round(worst[2], 1) if device.type == "cuda" else None,
    }


def _worst(values: Sequence[float], groups: ParallelGroups) -> list[float]:
    """Return the maximum over all ranks of each value."""
    if groups.world is None:
        return list(values)
    told: list[list[float]] = [[] for _ in range(groups.num_ranks)]
    dist.all_gather_object(told, list(values), group=groups.world)
    return [max(column) for column in zip(*told, strict=True)]


def _compared(rows: list[Row]) -> list[Row]:
    """Add the ratios to the baseline, which is the faster of "sequential" and "none"."""
    medians = {str(row["variant"]): to_float(row["median_us"]) for row in rows if row["median_us"]}
    by_variant = {str(row["variant"]): row for row in rows}
    sequential = [name for name in (SEQUENTIAL, NONE) if name in medians]
    if not sequential:
        return rows
    baseline = min(sequential, key=medians.__getitem__)
    exposed_us = to_float(by_variant[baseline]["exposed_comm_us"])
    peak_mib = by_variant[NONE]["peak_mib"]
    found: list[Row] = []
    for row in rows:
        more: Row = {"baseline": baseline}
        if row["median_us"]:
            more["speedup"] = round(medians[baseline] / to_float(row["median_us"]), 4)
            if exposed_us:
                ratio = to_float(row["exposed_comm_us"]) / exposed_us
                more["exposed_over_baseline"] = round(ratio, 4)
            if peak_mib:
                more["peak_over_none"] = round(to_float(row["peak_mib"]) / to_float(peak_mib), 4)
        found.append(row | more)
    return found
