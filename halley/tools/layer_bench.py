"""Measure MoE layers with each strategy: values, time, lower bound, waits and memory."""

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups
from halley.planner.expert_balance import max_over_mean
from halley.strategies.auto import AutoStrategy
from halley.strategies.base import AbstractStrategy
from halley.strategies.hierarchical import HierarchicalStrategy
from halley.tools.candidates import (
    GRAPH,
    bound_gemms,
    build_candidates,
    compile_ahead,
    measure_link,
    wire_us,
)
from halley.tools.layer_case import (
    RELATIVE_TOLERANCE,
    LayerCase,
    LayerTensors,
    make_tensors,
    outputs_of,
    reference_outputs,
    relative_error,
)
from halley.tools.timer import (
    Progress,
    Row,
    captured,
    machine_keys,
    measure_waits,
    time_interleaved,
    time_keys,
)


_DIRECTIONS = ("forward", "forward_backward")
_SEARCH_SAMPLES = 5  # to find the fastest setting of a strategy
_HOST_SAMPLES = 10
_CHECKED_CALL = 3  # later calls may replay the launches of earlier ones, so check a later one


def bench_layer(
    case: LayerCase,
    candidates: dict[str, AbstractStrategy],
    *,
    groups: ParallelGroups,
    recorder: Recorder,
    device: torch.device,
    link_bytes_per_s: float,
    num_samples: int = 11,
    on_progress: Progress | None = None,
) -> list[Row]:
    """Measure one layer; return a result line for each strategy and direction; a collective.

    Args:
        case: the layer and its load.
        candidates: the result of ``build_candidates``. Of several settings of one strategy, the
            fastest is measured. ``bit_equal`` compares with the first candidate that uses the same
            GEMM implementation.
        groups, recorder, device: those of the candidates.
        link_bytes_per_s: the result of ``measure_link``.
        num_samples: timed runs of each candidate.
        on_progress: called with a text, the runs done and the total.

    Raises:
        ValueError: the experts do not divide over the ranks.
    """
    tensors = make_tensors(case, groups, device=device, recorder=recorder)
    compile_ahead(list(candidates.values()), tensors, groups)
    report = _labelled(on_progress, f"{case.model.name}: checking values")
    errors = _check_values(candidates, tensors, groups, on_progress=report)
    gemms = bound_gemms(tensors, groups)
    crossing_us = wire_us(tensors, groups, link_bytes_per_s=link_bytes_per_s)
    strategies = list(dict.fromkeys(name.partition(" ")[0] for name in candidates))
    tolerance = RELATIVE_TOLERANCE[case.dtype]
    correct = {n: s for n, s in candidates.items() if errors[n][0] <= tolerance}
    rows: list[Row] = []
    for direction in _DIRECTIONS:
        runs = {name: _runner(name, s, tensors, direction) for name, s in correct.items()}
        best = _best_settings(strategies, runs, device=device, groups=groups)
        timings = time_interleaved(
            {name: runs[name] for name in best.values()} | gemms,
            device=device,
            num_samples=num_samples,
            group=groups.ep,
            on_progress=_labelled(on_progress, f"{case.model.name} {direction}"),
        )
        gemm_us = min(timings[name].median_us for name in gemms)
        for strategy in strategies:
            first = next(name for name in candidates if name.partition(" ")[0] == strategy)
            name = best.get(strategy, first)  # if no setting has correct values, report the first
            row = _row(case, groups, candidates[name], direction=direction, name=name)
            row |= _lower_bounds(gemm_us, crossing_us, direction=direction)
            row |= {"load_max_over_mean": _load_ratio(tensors, groups)}
            row |= {"max_rel_err": errors[name][0], "bit_equal": errors[name][1]}
            if name in timings:
                row |= time_keys(timings[name])
                row |= _untimed_keys(runs[name], recorder, device=device, groups=groups)
                row["symm_mib"] = _symm_mib(candidates[name])
            rows.append(row)
    return [row | {"hidden": _hidden(row, rows, device)} for row in rows]


def _hidden(row: Row, rows: list[Row], device: torch.device) -> float | None:
    """Return the time that ``fused`` saves over ``unfused``, as a share of the wire time.

    The share is cut to 1, because ``fused`` also hides copies within the rank. The result is None
    for other strategies, if one of the two has no time, and on a CPU, where the interpreter
    dominates the time.
    """
    if device.type == "cpu":
        return None
    unfused_us = [
        each["median_us"]
        for each in rows
        if (each["strategy"], each["direction"]) == ("unfused", row["direction"])
    ]
    fused_us, wire_us = row["median_us"], row["wire_us"]
    if row["strategy"] != "fused" or not all(unfused_us) or not (unfused_us and fused_us):
        return None
    if not isinstance(wire_us, float) or not wire_us:
        return None
    saved_us = cast(float, unfused_us[0]) - cast(float, fused_us)
    return round(min(1.0, saved_us / wire_us), 4)


def _check_values(
    candidates: dict[str, AbstractStrategy],
    tensors: LayerTensors,
    groups: ParallelGroups,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, tuple[float, bool]]:
    """Return the largest relative error of each candidate, and whether its bits are as expected.

    Expected are the bits of the first candidate with the same GEMM implementation, and in forward
    without gradients the same output as with gradients.
    """
    expected = reference_outputs(tensors, groups)
    first: dict[str, list[torch.Tensor]] = {}  # by GEMM implementation
    results: dict[str, tuple[float, bool]] = {}
    for index, (name, strategy) in enumerate(candidates.items()):
        if on_progress is not None:
            on_progress(index, len(candidates))
        for _ in range(_CHECKED_CALL if tensors.x_TD.is_cuda else 1):
            found = outputs_of(strategy, tensors)
            (y_TD,) = outputs_of(strategy, tensors, backward=False)
        same = first.setdefault(strategy.gemm, found)
        error = max(relative_error(f, e) for f, e in zip(found, expected, strict=False))
        pairs = zip([*found, y_TD], [*same, found[0]], strict=True)
        is_equal = all(torch.equal(value, other) for value, other in pairs)
        summary = torch.tensor([error, float(not is_equal)], dtype=torch.float64)
        summary = summary.to(tensors.x_TD.device)
        if groups.ep is not None:
            dist.all_reduce(summary, op=dist.ReduceOp.MAX, group=groups.ep)
        results[name] = (float(summary[0]), not bool(summary[1]))
    return results


def _load_ratio(tensors: LayerTensors, groups: ParallelGroups) -> float:
    """Return the rows of the most loaded rank, divided by the mean over ranks."""
    loads_W = tensors.counts_WE.sum(0).view(groups.ep_size // groups.tp_size, -1).sum(1)
    return round(max_over_mean(loads_W.tolist()), 4)


def _runner(
    name: str, strategy: AbstractStrategy, tensors: LayerTensors, direction: str
) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            tensors.run(strategy)

    def forward_backward() -> None:
        outputs_of(strategy, tensors)

    run = forward if direction == "forward" else forward_backward
    is_graph = name.endswith(f" {GRAPH}")
    return captured(run, device=tensors.x_TD.device) if is_graph else run


def _best_settings(
    strategies: list[str],
    runs: dict[str, Callable[[], None]],
    *,
    device: torch.device,
    groups: ParallelGroups,
) -> dict[str, str]:
    """Return the fastest setting of each strategy among those with correct values."""
    best: dict[str, str] = {}
    for strategy in strategies:
        settings = {n: run for n, run in runs.items() if n.partition(" ")[0] == strategy}
        if len(settings) > 1:
            timings = time_interleaved(
                settings, device=device, num_samples=_SEARCH_SAMPLES, group=groups.ep
            )
            best[strategy] = min(timings, key=lambda name: timings[name].median_us)
        elif settings:
            best[strategy] = next(iter(settings))
    return best


def _untimed_keys(
    run: Callable[[], None], recorder: Recorder, *, device: torch.device, groups: ParallelGroups
) -> Row:
    """Measure exposed communication, host time and memory of a candidate, in untimed runs."""
    exposed_us = measure_waits(run, recorder, device=device, group=groups.ep)
    peak_mib = 0.0
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        peak_mib = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    recorder.sent_bytes = 0
    run()  # a replayed CUDA graph counts nothing
    sent = float(recorder.sent_bytes)
    worst = torch.tensor([peak_mib, _host_us(run, device=device), sent], device=device)
    if groups.ep is not None:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=groups.ep)
    return {
        "wire_bytes": int(worst[2]) or None,
        "exposed_comm_us": exposed_us,
        "peak_mib": round(float(worst[0]), 1) if device.type == "cuda" else None,
        "host_us": round(float(worst[1]), 1),
    }


def _host_us(run: Callable[[], None], *, device: torch.device) -> float:
    """Return the host time of one call in microseconds, including waits of the host."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    samples: list[float] = []
    for _ in range(_HOST_SAMPLES if device.type == "cuda" else 1):
        begin = time.perf_counter()
        run()
        samples.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(samples)


def _symm_mib(strategy: AbstractStrategy) -> float | None:
    """Return the MiB of symmetric memory per rank; None for strategies without such memory.

    Strategies that share their buffers return the same number.
    """
    is_auto = isinstance(strategy, AutoStrategy)
    num_bytes = 0
    for candidate in strategy.candidates.values() if is_auto else [strategy]:
        if workspaces := getattr(candidate, "workspaces", None):
            num_bytes += sum(workspace.symmetric_bytes for workspace in workspaces.all())
    return round(num_bytes / 2**20, 3) if num_bytes else None


def _lower_bounds(gemm_us: float, crossing_us: float, *, direction: str) -> Row:
    """Return the result keys of the lower bound of a layer's time in one direction.

    Backward has two GEMMs for each one of forward, and also one dispatch and one combine.

    Args:
        gemm_us: time of the GEMMs in forward.
        crossing_us: time on the wire of one dispatch or combine.
        direction: "forward" or "forward_backward".
    """
    has_backward = direction == "forward_backward"
    gemm_us *= 3 if has_backward else 1
    total_wire_us = 2 * crossing_us * (2 if has_backward else 1)
    return {
        "gemm_us": round(gemm_us, 1),
        "wire_us": round(total_wire_us, 1),
        "floor_us": round(max(gemm_us, total_wire_us), 1),
    }


def _row(
    case: LayerCase,
    groups: ParallelGroups,
    candidate: AbstractStrategy,
    *,
    direction: str,
    name: str,
) -> Row:
    """Return a benchmark's result line that describes the workload, before times are added."""
    strategy, _, setting = name.partition(" ")
    is_across = isinstance(candidate, HierarchicalStrategy)
    num_nodes = candidate.nodes.num_nodes if is_across else 1
    return {
        "case": "layer",
        "model": case.model.name,
        "num_tokens": case.num_tokens,
        "ep_size": groups.ep_size,
        "tp_size": groups.tp_size,
        "skew": case.skew,
        "spare": case.spare,
        "seed": case.seed,
        "dtype": str(case.dtype).removeprefix("torch."),
        "strategy": strategy,
        "passes": "none",
        "direction": direction,
        "setting": setting or None,
        "num_nodes": num_nodes,
        "wire_bytes": None,
        "median_us": None,
        "p10_us": None,
        "p90_us": None,
        "samples": 0,
        "exposed_comm_us": None,
        "host_us": None,
        "peak_mib": None,
        "symm_mib": None,
    }


def _link_name(device: torch.device) -> str | None:
    """Return the link between GPUs: "nvlink", or how the environment makes NCCL emulate another."""
    if device.type != "cuda":
        return None
    if os.environ.get("NCCL_NET") == "Socket" and "NCCL_HOSTID" in os.environ:
        return "sockets"
    return "channels" if os.environ.get("NCCL_MAX_NCHANNELS") == "1" else "nvlink"


def measure_layers(
    cases: list[LayerCase],
    strategies: list[str],
    *,
    groups: ParallelGroups,
    device: torch.device,
    num_samples: int,
    commit: str | None,
    max_load: float = 0.0,
    case_name: str = "layer",
    on_progress: Progress | None = None,
    on_rows: Callable[[list[Row]], object] | None = None,
) -> list[Row]:
    """Measure the cases one after another and return all result lines.

    Args:
        cases: the layers.
        strategies: names of strategies; "chunked" is measured with several numbers of chunks.
        groups, device, num_samples, on_progress: as for ``bench_layer``.
        commit: written into the lines; None takes that of the working tree.
        max_load: if not 0, fused layers are also measured as CUDA graphs, with buffers for that
            many times the balanced load.
        case_name: the key "case" of the lines, which names their file.
        on_rows: called on every rank after each case with the lines so far.
    """
    # Imported here so that commands without kernels also run where Triton is missing.
    from halley.fused.buffer_cache import Workspaces

    link = measure_link(groups, device=device)
    machine = machine_keys(groups, device=device, commit=commit)
    machine |= {"case": case_name, "link": _link_name(device)}
    machine |= {"link_gb_per_s": round(link / 1e9, 2) or None}
    rows: list[Row] = []
    recorder = Recorder(device, enabled=False)
    where = {"groups": groups, "recorder": recorder, "device": device}
    build = partial(build_candidates, **where)
    bench = partial(bench_layer, **where, num_samples=num_samples)
    make = partial(Workspaces, groups.ep, device, tp_size=groups.tp_size)
    workspaces, bounded = make(), make(max_load=max_load) if max_load else None
    for case in cases:
        candidates = build(case, strategies, workspaces=workspaces, bounded=bounded)
        found = bench(case, candidates, link_bytes_per_s=link, on_progress=on_progress)
        rows += [row | machine for row in found]
        if bounded is not None:
            bounded.check()
        for strategy in candidates.values():
            strategy.release()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if on_rows is not None:
            on_rows(rows)
    return rows


def _labelled(on_progress: Progress | None, text: str) -> Callable[[int, int], None] | None:
    if on_progress is None:
        return None
    return lambda done, total: on_progress(text, done, total)
