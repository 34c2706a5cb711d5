"""Measure training steps of whole models by each strategy, and their lower bound."""

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchmarks.model_bench.case import (
    ModelCase,
    Subject,
    TrainingOptimizer,
    build_subject,
    memory_named,
)
from halley.core.timeline import Recorder
from halley.cost.hardware import peak_flops_per_s
from halley.distributed.mesh import ParallelGroups
from halley.moe.transformer import MoETransformer, flops_per_token
from halley.strategies.base import AbstractStrategy
from halley.tools.candidates import bound_gemms, build_candidates, describe_link, wire_us
from halley.tools.layer_case import RELATIVE_TOLERANCE, LayerCase, relative_error
from halley.tools.timer import (
    Progress,
    Row,
    Timing,
    machine_keys,
    measure_waits,
    time_interleaved,
    time_keys,
)


if TYPE_CHECKING:
    from halley.fused.buffers import Workspaces


MakeOptimizer = Callable[[MoETransformer], TrainingOptimizer]


def measure_models(
    cases: list[ModelCase],
    strategies: list[str],
    *,
    make_optimizer: MakeOptimizer,
    groups: ParallelGroups,
    device: torch.device,
    num_samples: int,
    commit: str | None,
    on_progress: Progress | None = None,
    on_rows: Callable[[list[Row]], object] | None = None,
) -> list[Row]:
    """Measure the cases one after another and return all result lines.

    Args:
        cases: the models.
        strategies: names of strategies; their values are compared with those of the first.
        make_optimizer: returns the optimizer of the trainer for a model on these groups.
        groups: one expert-parallel group of all ranks.
        device, num_samples, on_progress: as for ``bench_model``.
        commit: to write into the lines; None takes that of the working tree.
        on_rows: called on every rank after each case with the lines so far.

    Raises:
        ValueError: the experts do not divide over the ranks.
        MemoryError: this rank has too little memory; names model, layers and strategy.
    """
    # Imported here so that commands without kernels also run where Triton is missing.
    from halley.fused.buffers import Workspaces

    link, link_keys = describe_link(groups, device=device)
    machine = machine_keys(groups, device=device, commit=commit) | link_keys
    recorder = Recorder(device, enabled=False)
    workspaces = Workspaces(groups.ep, device)
    rows: list[Row] = []
    for case in cases:
        layer = LayerCase(model=case.model, num_tokens=case.num_tokens, dtype=case.dtype)
        candidates = build_candidates(
            layer, strategies, groups=groups, recorder=recorder, device=device,
            workspaces=workspaces,
        )  # fmt: skip
        found = bench_model(
            case,
            candidates,
            make_optimizer=make_optimizer,
            groups=groups,
            recorder=recorder,
            device=device,
            workspaces=workspaces,
            link_bytes_per_s=link,
            num_samples=num_samples,
            on_progress=on_progress,
        )
        rows += [row | machine for row in found]
        if on_rows is not None:
            on_rows(rows)
        workspaces.close()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def bench_model(
    case: ModelCase,
    candidates: dict[str, AbstractStrategy],
    *,
    make_optimizer: MakeOptimizer,
    groups: ParallelGroups,
    recorder: Recorder,
    device: torch.device,
    workspaces: "Workspaces",
    link_bytes_per_s: float,
    num_samples: int = 11,
    on_progress: Progress | None = None,
) -> list[Row]:
    """Measure the steps of one model; return a result line for each strategy, on every rank.

    All candidates alternate on one model, whose weights no step changes.

    Args:
        case: the model.
        candidates: the result of ``build_candidates``. Of several settings of one strategy, the
            line has the fastest. Values are compared with the first candidate.
        make_optimizer: as for ``measure_models``.
        groups, recorder, device: those of the candidates.
        workspaces: buffers that the candidates share; closed after each candidate.
        link_bytes_per_s: the first result of ``describe_link``.
        num_samples: timed steps of each candidate.
        on_progress: called with a text, the steps done and the total.

    Raises:
        ValueError, MemoryError: as for ``measure_models``.
    """
    text = f"{case.model.name}, {case.model.num_layers} layers"
    report = None if on_progress is None else partial(on_progress, text)
    first = next(iter(candidates))
    with memory_named(case, f"strategy {first}"):
        subject = build_subject(
            case, candidates[first], groups=groups, recorder=recorder, device=device
        )
        bounds = _lower_bounds(
            subject,
            device=device,
            link_bytes_per_s=link_bytes_per_s,
            num_samples=num_samples,
            on_progress=report,
        )
    errors = _check_values(case, subject, candidates=candidates, on_progress=on_progress)
    right = {n: s for n, s in candidates.items() if errors[n] <= RELATIVE_TOLERANCE[case.dtype]}
    runs = _runners(case, subject, candidates=right, make_optimizer=make_optimizer)
    timings: dict[str, Timing] = {}
    if runs:
        timings = time_interleaved(
            runs, device=device, num_samples=num_samples, group=groups.world, on_progress=report
        )
    rows: list[Row] = []
    for name in _best_settings(candidates, timings):
        row = _row(case, groups, name=name) | bounds | {"max_rel_err": errors[name]}
        if name in timings:
            row |= _times(case, timings[name], groups=groups, device=device)
            workspaces.close()  # memory of other candidates must not count
            row |= _extras(runs[name], recorder, device=device, groups=groups)
        rows.append(row)
    return rows


def _lower_bounds(
    subject: Subject,
    *,
    device: torch.device,
    link_bytes_per_s: float,
    num_samples: int,
    on_progress: Callable[[int, int], None] | None,
) -> Row:
    """Return the sum of the lower bounds of the MoE layers; the rest of the model adds nothing.

    The bound of a layer is that of the layer benchmark with the routing of the model: the larger of
    three times its two GEMMs and four times its wire time. GEMMs are timed layer by layer, because
    the rows of all layers would not fit beside the model.
    """
    groups = subject.groups
    gemm_us = total_wire_us = floor_us = 0.0
    deviations: list[float] = []
    for tensors in subject.layers():
        gemms = bound_gemms(tensors)
        timings = time_interleaved(
            gemms,
            device=device,
            num_samples=num_samples,
            group=groups.world,
            on_progress=on_progress,
        )
        layer_gemm_us = 3 * min(timing.median_us for timing in timings.values())
        layer_wire_us = 4 * wire_us(tensors, link_bytes_per_s=link_bytes_per_s)
        gemm_us += layer_gemm_us
        total_wire_us += layer_wire_us
        floor_us += max(layer_gemm_us, layer_wire_us)
        load_E = tensors.counts_WE.sum(0).double()
        deviations.append(float((load_E / load_E.sum()).std(correction=0)))
    return {
        "load_std": round(statistics.mean(deviations), 5),
        "gemm_us": round(gemm_us, 1),
        "wire_us": round(total_wire_us, 1),
        "floor_us": round(floor_us, 1),
    }


def _check_values(
    case: ModelCase,
    subject: Subject,
    *,
    candidates: dict[str, AbstractStrategy],
    on_progress: Progress | None,
) -> dict[str, float]:
    """Return the error of each candidate against the first one, the same on all ranks.

    No step changes the weights, so a wrong candidate does not affect the others.
    """
    wanted: torch.Tensor | None = None
    errors: list[float] = []
    for index, (name, strategy) in enumerate(candidates.items()):
        if on_progress is not None:
            on_progress(f"{case.model.name}: checking {name}", index, len(candidates))
        with memory_named(case, f"strategy {name}"):
            subject.use(strategy)
            values = subject.values()
        wanted = values if wanted is None else wanted
        errors.append(max(map(relative_error, values, wanted)))
    worst = torch.tensor(errors, dtype=torch.float64, device=subject.tokens_BS.device)
    if subject.groups.world is not None:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=subject.groups.world)
    return dict(zip(candidates, worst.tolist(), strict=True))


def _runners(
    case: ModelCase,
    subject: Subject,
    *,
    candidates: dict[str, AbstractStrategy],
    make_optimizer: MakeOptimizer,
) -> dict[str, Callable[[], None]]:
    optimizer = make_optimizer(subject.model)

    def runner(name: str, strategy: AbstractStrategy) -> Callable[[], None]:
        def run() -> None:
            with memory_named(case, f"strategy {name}"):
                subject.use(strategy)
                subject.step(optimizer)

        return run

    return {name: runner(name, strategy) for name, strategy in candidates.items()}


def _best_settings(
    candidates: dict[str, AbstractStrategy], timings: dict[str, Timing]
) -> list[str]:
    """Return the fastest candidate of each strategy, or its first if none has a time."""
    settings: dict[str, list[str]] = {}
    for name in candidates:
        settings.setdefault(name.partition(" ")[0], []).append(name)
    return [
        min(names, key=lambda name: timings[name].median_us if name in timings else math.inf)
        for names in settings.values()
    ]


def _times(case: ModelCase, timing: Timing, *, groups: ParallelGroups, device: torch.device) -> Row:
    """Return times, tokens per second and MFU over all ranks."""
    tokens_per_s = case.num_tokens * groups.num_ranks / (timing.median_us * 1e-6)
    mfu = None
    # The peak rate is that of bfloat16.
    peak = peak_flops_per_s(device) if case.dtype == torch.bfloat16 else None
    if peak is not None:
        flops = flops_per_token(case.model, seq_len=case.seq_len)
        mfu = round(tokens_per_s * flops / (peak * groups.num_ranks), 4)
    return {
        **time_keys(timing),
        "tokens_per_s": round(tokens_per_s, 1),
        "mfu": mfu,
    }


def _extras(
    run: Callable[[], None],
    recorder: Recorder,
    *,
    device: torch.device,
    groups: ParallelGroups,
) -> Row:
    """Measure exposed communication and memory of the worst rank, in steps that are not timed.

    Memory is the peak of torch's allocator: weights, optimizer state and activations.
    """
    exposed_us = measure_waits(run, recorder, device=device, group=groups.world)
    peak_mib = 0.0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        peak_mib = torch.cuda.max_memory_allocated(device) / 2**20
    worst = torch.tensor(peak_mib, device=device)
    if groups.world is not None:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=groups.world)
    return {
        "exposed_comm_us": exposed_us,
        "peak_mib": round(worst.item(), 1) if device.type == "cuda" else None,
    }


def _row(case: ModelCase, groups: ParallelGroups, *, name: str) -> Row:
    """Return a result line with the keys of the workload, and without times."""
    strategy, _, setting = name.partition(" ")
    return {
        "case": "model",
        "model": case.model.name,
        "num_layers": case.model.num_layers,
        "num_tokens": case.num_tokens,
        "seq_len": case.seq_len,
        "batch_size": case.batch_size,
        "ep_size": groups.ep_size,
        "tp_size": 1,
        "skew": "router",
        "seed": case.seed,
        "dtype": str(case.dtype).removeprefix("torch."),
        "strategy": strategy,
        "passes": "none",
        "direction": "step",
        "setting": setting or None,
        "median_us": None,
        "p10_us": None,
        "p90_us": None,
        "samples": 0,
        "tokens_per_s": None,
        "mfu": None,
        "exposed_comm_us": None,
        "peak_mib": None,
        "bit_equal": None,
    }
