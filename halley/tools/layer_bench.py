"""Measure MoE layers by strategy: errors of values, time, lower bound, waits and memory."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

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
    describe_link,
    wire_us,
)
from halley.tools.layer_case import (
    FLOAT8_TOLERANCE,
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
    max_over_ranks,
    measure_waits,
    no_progress,
    time_interleaved,
    time_keys,
    to_float,
)


_DIRECTIONS = ("forward", "forward_backward")
_SEARCH_SAMPLES = 5  # timed runs of each setting of a strategy, to find the fastest setting
_HOST_SAMPLES = 10
_CHECKED_CALL = 3  # number of the call to check: calls after the first may replay launches


def bench_layer(
    case: LayerCase,
    candidates: dict[str, AbstractStrategy],
    *,
    groups: ParallelGroups,
    recorder: Recorder,
    device: torch.device,
    link_bytes_per_s: float,
    num_samples: int = 11,
    on_progress: Progress = no_progress,
) -> list[Row]:
    """Measure one MoE layer; return a result line per strategy and direction; a collective.

    A ``ValueError`` means that the experts do not divide over the ranks.

    Args:
        candidates: the result of ``build_candidates`` for the same groups and recorder. Of several
            settings of one strategy, the fastest is measured. The key "bit_equal" tells whether the
            bits are those of the first candidate with the same GEMM implementation.
        link_bytes_per_s: the first result of ``describe_link``.
        num_samples: timed runs of each candidate.
    """
    tensors = make_tensors(case, groups, device=device, recorder=recorder)
    compile_ahead(list(candidates.values()), tensors)
    report = partial(on_progress, f"{case.model.name}: checking values")
    errors = _check_values(candidates, tensors, on_progress=report)
    gemms = bound_gemms(tensors)
    crossing_us = wire_us(tensors, link_bytes_per_s=link_bytes_per_s)
    make_row = partial(_row, case, groups, crossing_us=crossing_us)
    loads_W = tensors.counts_WE.sum(0).view(groups.ep_size // groups.tp_size, -1).sum(1)
    load_ratio = round(max_over_mean(loads_W.tolist()), 4)
    strategies = list(dict.fromkeys(name.partition(" ")[0] for name in candidates))
    plain = RELATIVE_TOLERANCE[case.dtype]
    limits = {n: FLOAT8_TOLERANCE if ":float8" in n else plain for n in candidates}
    correct = {n: s for n, s in candidates.items() if errors[n][0] <= limits[n]}
    rows: list[Row] = []
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for direction in _DIRECTIONS:
        runs = {n: _runner(n, s, tensors, direction, pool) for n, s in correct.items()}
        best = _best_settings(strategies, runs, tensors)
        timings = time_interleaved(
            {name: runs[name] for name in best.values()} | gemms,
            device=device,
            num_samples=num_samples,
            group=groups.ep,
            on_progress=partial(on_progress, f"{case.model.name} {direction}"),
        )
        gemm_us = min(timings[name].median_us for name in gemms)
        for strategy in strategies:
            first = next(name for name in candidates if name.partition(" ")[0] == strategy)
            name = best.get(strategy, first)  # if no setting has correct values, report the first
            row = make_row(candidates[name], direction=direction, name=name, gemm_us=gemm_us)
            row |= {"load_max_over_mean": load_ratio}
            row |= {"max_rel_err": errors[name][0], "bit_equal": errors[name][1]}
            if name in timings:
                row |= time_keys(timings[name])
                row |= _untimed_keys(runs[name], recorder, tensors)
                row["symm_mib"] = _symm_mib(candidates[name])
            rows.append(row)
    return [row | {"hidden": _hidden(row, rows, device)} for row in rows]


def _hidden(row: Row, rows: list[Row], device: torch.device) -> float | None:
    """Return the time that ``fused`` saves over ``unfused`` as a fraction of wire time, or None.

    Above 1, the fraction is cut to 1, because ``fused`` also hides copies within the rank. It is
    None on a CPU, where the interpreter dominates the time.
    """
    same = [each for each in rows if each["direction"] == row["direction"]]
    unfused_us = {each["strategy"]: each["median_us"] for each in same}.get("unfused")
    fused_us, wire_us = row["median_us"], row["wire_us"]
    is_fused = device.type != "cpu" and row["strategy"] == "fused"
    if not (is_fused and unfused_us and fused_us and wire_us):
        return None
    saved_us = to_float(unfused_us) - to_float(fused_us)
    return round(min(1.0, saved_us / to_float(wire_us)), 4)


def _check_values(
    candidates: dict[str, AbstractStrategy],
    tensors: LayerTensors,
    *,
    on_progress: Callable[[int, int], None],
) -> dict[str, tuple[float, bool]]:
    """Return each candidate's largest error, and whether it has the bits of the first. Collective.

    First means the first with the same GEMM. Forward without gradients must have these bits too.
    """
    expected, device = reference_outputs(tensors), tensors.x_TD.device
    results: dict[str, tuple[float, bool]] = {}
    for gemm in dict.fromkeys(each.gemm for each in candidates.values()):
        first: list[torch.Tensor] = []  # freed before the next GEMM, because gradients may be large
        for name in [name for name, each in candidates.items() if each.gemm == gemm]:
            on_progress(len(results), len(candidates))
            summary = _compare_values(candidates[name], tensors, expected=expected, first=first)
            error, differs = max_over_ranks(summary, device=device, group=tensors.groups.ep)
            results[name] = (error, not differs)
    return results


def _compare_values(
    strategy: AbstractStrategy,
    tensors: LayerTensors,
    *,
    expected: list[torch.Tensor],
    first: list[torch.Tensor],
) -> list[float]:
    """Return this rank's largest relative error, and 1 if its bits differ from ``first``, else 0.

    ``first`` has the values of the first candidate with the same GEMM; if empty, it receives them.
    """
    for _ in range(_CHECKED_CALL - 1 if tensors.x_TD.is_cuda else 0):
        outputs_of(strategy, tensors)  # not kept: two sets of gradients may exceed the memory
        outputs_of(strategy, tensors, backward=False)
    found = outputs_of(strategy, tensors)
    (y_TD,) = outputs_of(strategy, tensors, backward=False)
    first[:] = first or found
    error = max(relative_error(f, e) for f, e in zip(found, expected, strict=False))
    pairs = zip([*found, y_TD], [*first, found[0]], strict=True)
    return [error, float(not all(torch.equal(value, other) for value, other in pairs))]


def _runner(
    name: str, strategy: AbstractStrategy, tensors: LayerTensors, direction: str, pool: Any
) -> Callable[[], object]:
    run = partial(outputs_of, strategy, tensors, backward=direction != "forward")
    is_graph = name.endswith(f" {GRAPH}")
    return captured(run, device=tensors.x_TD.device, pool=pool) if is_graph else run


def _best_settings(
    strategies: list[str], runs: dict[str, Callable[[], object]], tensors: LayerTensors
) -> dict[str, str]:
    """Return the name of each strategy's fastest candidate in ``runs``, if any; a collective."""
    best: dict[str, str] = {}
    for strategy in strategies:
        settings = {n: run for n, run in runs.items() if n.partition(" ")[0] == strategy}
        if len(settings) > 1:
            where = {"device": tensors.x_TD.device, "group": tensors.groups.ep}
            timings = time_interleaved(settings, num_samples=_SEARCH_SAMPLES, **where)
            best[strategy] = min(timings, key=lambda name: timings[name].median_us)
        elif settings:
            best[strategy] = next(iter(settings))
    return best


def _untimed_keys(run: Callable[[], object], recorder: Recorder, tensors: LayerTensors) -> Row:
    """Run a candidate again; return its waits, sent bytes, peak MiB and host time; a collective."""
    device, group = tensors.x_TD.device, tensors.groups.ep
    exposed_us = measure_waits(run, recorder, device=device, group=group)
    is_gpu, before, recorder.sent_bytes = device.type == "cuda", 0, 0
    if is_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    run()  # a replayed CUDA graph adds nothing to sent_bytes
    sent_bytes = float(recorder.sent_bytes)
    if is_gpu:
        torch.cuda.synchronize(device)
    peak_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
    host_us: list[float] = []  # includes the time in which the host waits for the GPU
    for _ in range(_HOST_SAMPLES if is_gpu else 1):
        begin = time.perf_counter()
        run()
        host_us.append(1e6 * (time.perf_counter() - begin))
    found = [peak_mib, sent_bytes, statistics.median(host_us)]
    peak_mib, sent_bytes, slowest_us = max_over_ranks(found, device=device, group=group)
    return {
        "wire_bytes": int(sent_bytes) or None,
        "exposed_comm_us": exposed_us,
        "peak_mib": round(peak_mib, 1) if is_gpu else None,
        "host_us": round(slowest_us, 1),
    }


def _symm_mib(strategy: AbstractStrategy) -> float | None:
    used = strategy.candidates.values() if isinstance(strategy, AutoStrategy) else [strategy]
    pools = filter(None, (getattr(each, "workspaces", None) for each in used))
    num_bytes = sum(workspace.symmetric_bytes for pool in pools for workspace in pool.all())
    return round(num_bytes / 2**20, 3) if num_bytes else None


def _row(
    case: LayerCase,
    groups: ParallelGroups,
    candidate: AbstractStrategy,
    *,
    direction: str,
    name: str,
    gemm_us: float,
    crossing_us: float,
) -> Row:
    """Return a result line with sizes and lower bound; its measured values are still None or 0.

    The GEMMs of forward take ``gemm_us``, and those of backward twice as long. Forward and backward
    have one dispatch and one combine each, which take ``crossing_us`` on the wire.
    """
    strategy, _, setting = name.partition(" ")
    is_across = isinstance(candidate, HierarchicalStrategy)
    has_backward = direction == "forward_backward"
    gemm_us *= 3 if has_backward else 1
    total_wire_us = 2 * crossing_us * (2 if has_backward else 1)
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
        "num_nodes": candidate.nodes.num_nodes if is_across else 1,
        **dict.fromkeys(("wire_bytes", "median_us", "p10_us", "p90_us")),
        "samples": 0,
        **dict.fromkeys(("exposed_comm_us", "host_us", "peak_mib", "symm_mib")),
        "gemm_us": round(gemm_us, 1),
        "wire_us": round(total_wire_us, 1),
        "floor_us": round(max(gemm_us, total_wire_us), 1),
    }


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
    on_progress: Progress = no_progress,
    on_rows: Callable[[list[Row]], object] | None = None,
) -> list[Row]:
    """Measure layers one after another by each strategy; return all result lines; a collective.

    Args:
        strategies: names of strategies; "chunked" is measured with several numbers of chunks.
        max_load: if not 0, fused, unfused and strategies across nodes are also measured as CUDA
            graphs, with buffers for that many times the balanced load.
        case_name: value of the key "case" in the result lines, and name of their file.
        on_rows: called on every rank after each case with the lines so far.
    """
    # Imported here so that commands without kernels also run where Triton is missing.
    from halley.fused.buffers import Workspaces

    link, link_keys = describe_link(groups, device=device)
    machine = machine_keys(groups, device=device, commit=commit) | {"case": case_name} | link_keys
    rows: list[Row] = []
    where = {"groups": groups, "recorder": Recorder(device, enabled=False), "device": device}
    bench = partial(bench_layer, link_bytes_per_s=link, num_samples=num_samples, **where)
    make = partial(Workspaces, groups.ep, device, tp_size=groups.tp_size)
    workspaces, bounded = make(), make(max_load=max_load) if max_load else None
    for case in cases:
        buffers = {"workspaces": workspaces, "bounded": bounded, "max_load": max_load}
        candidates = build_candidates(case, strategies, **buffers, **where)
        rows += [row | machine for row in bench(case, candidates, on_progress=on_progress)]
        if bounded is not None:
            bounded.check()
        for strategy in candidates.values():
            strategy.release()
        torch.cuda.empty_cache()  # does nothing without a GPU
        if on_rows is not None:
            on_rows(rows)
    return rows
