"""Compare strategies: run their training steps in alternation, and time each part of a step."""

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist

from halley.core.config import RunConfig
from halley.core.timeline import Span, waited_us
from halley.distributed.mesh import World
from halley.tools.timer import start_together
from halley.tools.tracing import gather_spans, time_by_part, trace_step
from halley.train.step import TrainingRun, build_run, train_step


_INTERPRETED = ("fused", "unfused", "auto")  # may run Triton kernels, which a CPU interprets
_NUM_WARMUP = 3
STEP, EXPOSED, OTHER = "step", "exposed communication", "other"


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Times in microseconds of the parts of a strategy's training step, and spans of one step.

    The time of a part excludes parts nested in it. It is the median over steps of the mean over
    ranks. ``STEP`` is the whole step, ``OTHER`` the time outside of all parts, and ``EXPOSED`` the
    time of all waits (the parts "*.wait"), if the layers record waits.
    """

    parts_us: dict[str, float]
    spans: list[Span]  # spans of one traced step on all ranks


def compare_strategies(
    config: RunConfig,
    strategies: list[str],
    world: World,
    *,
    num_steps: int,
    on_progress: Callable[[int, int], None],
) -> dict[str, StepProfile]:
    """Time ``num_steps`` training steps of each strategy; return profiles by name. Collective.

    All models are in memory, so that their steps can alternate. ``config.strategy`` is ignored.
    """
    if any(name.partition(":")[0] in _INTERPRETED for name in strategies):
        # ``halley.interpreter`` must be imported before Triton, which torch's optimizers import.
        import halley.interpreter  # noqa: F401  # pyright: ignore[reportUnusedImport]
    runs = {
        name: build_run(dataclasses.replace(config, strategy=name), world) for name in strategies
    }
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    total = (num_steps + _NUM_WARMUP) * len(runs)
    for step in range(num_steps + _NUM_WARMUP):
        for index, (name, run) in enumerate(runs.items()):
            parts_us = _measure_step(run, step)
            if step >= _NUM_WARMUP:
                samples[name].append(parts_us)
            on_progress(step * len(runs) + index + 1, total)
    return {
        name: StepProfile(parts_us=_summarise(samples[name], world), spans=_trace(run, num_steps))
        for name, run in runs.items()
    }


def _measure_step(run: TrainingRun, step: int) -> dict[str, float]:
    start_together(run.world.device)
    run.recorder.collect()
    with run.recorder.span(STEP):
        train_step(run, step)
    spans = run.recorder.collect()
    whole = next(span for span in spans if span.name == STEP)
    parts_us = time_by_part(spans)
    parts_us[OTHER] = parts_us.pop(STEP)
    parts_us[STEP] = whole.duration_us
    if (waits_us := waited_us(spans)) is not None:
        parts_us[EXPOSED] = waits_us
    return parts_us


def _summarise(samples: list[dict[str, float]], world: World) -> dict[str, float]:
    names = sorted(samples[0])  # sorted, because the all-reduce needs the same order on all ranks
    table = torch.tensor([[sample[name] for name in names] for sample in samples])
    table = table.to(world.device)
    if dist.is_initialized():
        dist.all_reduce(table)
    table /= world.num_ranks
    columns = zip(names, table.t().tolist(), strict=True)
    return {name: statistics.median(column) for name, column in columns}


def _trace(run: TrainingRun, first_step: int) -> list[Span]:
    steps = count(first_step)

    def step() -> None:
        train_step(run, next(steps))

    run.recorder.enabled = False  # only the profiler records the parts of these steps
    spans = trace_step(step, rank=run.world.rank, device=run.world.device)
    return gather_spans(spans) if dist.is_initialized() else spans
