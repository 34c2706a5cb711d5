"""Measure a compiled training step on this host and compare it with its prediction."""

import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._dynamo.config
import torch.distributed as dist

from halley.compiler import Backend, OrderReport
from halley.compiler.options import parse_options
from halley.core.config import RunConfig
from halley.core.timeline import Recorder, Span
from halley.core.types import DTYPES
from halley.distributed.mesh import build_groups
from halley.moe.transformer import MoETransformer
from halley.strategies.traceable import TraceableStrategy
from halley.tools.timer import Progress, start_together
from halley.tools.tracing import trace_step


_NUM_WARMUP = 3


@dataclass(frozen=True, kw_only=True)
class GraphMeasure:
    """Measured and predicted time of a compiled step.

    Attributes:
        reports: one for the forward graph and one for the backward graph.
        predicted_us: sum over both graphs.
        measured_us: time of the slowest rank, as the median over steps.
        measured: spans of one step on this rank.
    """

    reports: tuple[OrderReport, ...]
    predicted_us: float
    measured_us: float
    measured: tuple[Span, ...]

    @property
    def predicted_over_measured(self) -> float:
        """The predicted over the measured time; 1 for a perfect prediction."""
        return self.predicted_us / self.measured_us


def measure_graphs(
    config: RunConfig,
    *,
    options: dict[str, Any],
    device: torch.device,
    num_steps: int,
    on_progress: Progress | None = None,
) -> GraphMeasure:
    """Compile the model of a run with passes, time its steps and trace one; a collective.

    The graphs run in eager mode. Rank 0 measures the operators; all ranks measure the all-to-alls.

    Args:
        config: model, batch size, dtype and expert-parallel size of the run; tokens are random.
        options: of the compiler backend.
        device: of this rank.
        num_steps: timed steps.
        on_progress: called before each step with a text, the steps done and the total.

    Raises:
        ValueError: an option is wrong, or ``num_steps`` is below 1.
        RuntimeError: the graphs have no all-to-all, so there is no prediction.
    """
    if num_steps < 1:
        raise ValueError(f"steps ({num_steps}) must be at least 1")
    parse_options(options)  # before tracing, because Dynamo would wrap the error
    groups = build_groups(config.ep_size, device_type=device.type, tp_size=config.expert_tp_size)
    model = MoETransformer(
        config.model,
        strategy=TraceableStrategy(groups.ep, tp_size=groups.tp_size),
        groups=groups,
        recorder=Recorder("cpu", enabled=False),
        dtype=DTYPES[config.train.dtype],
        device=device,
    )
    model.init_weights(seed=0)
    tokens_BS = _draw_tokens(config, device)
    backend = Backend()
    with tempfile.TemporaryDirectory() as folder:
        options = {"profiles": Path(folder) / "profiles.jsonl", **options}
        options |= {"inner": "eager", "measure": True}
        compiled = torch.compile(model, backend=backend, fullgraph=True, options=options)

        def step() -> None:
            output = compiled(tokens_BS)
            (output.logits_BSV.float().sum() + output.router_loss).backward()
            model.zero_grad()

        with warnings.catch_warnings(), torch._dynamo.config.patch(capture_scalar_outputs=True):
            warnings.simplefilter("ignore")  # warnings of torch about its tracing
            samples_us = _sample_us(step, device, num_steps=num_steps, on_progress=on_progress)
            spans = trace_step(step, rank=dist.get_rank(), device=device, warmup=1)
    if not backend.reports:
        raise RuntimeError("no graph has an all-to-all, so there is nothing to compare")
    return GraphMeasure(
        reports=tuple(backend.reports),
        predicted_us=sum(report.time_after.makespan_us for report in backend.reports),
        measured_us=median(samples_us),
        measured=tuple(spans),
    )


def simulated_step(reports: Sequence[OrderReport], *, passed: bool) -> list[Span]:
    """Return the simulated spans of a step, whose graphs run one after another.

    Args:
        reports: of the graphs, in order.
        passed: True for the graphs after the passes, False for the graphs before them.
    """
    step: list[Span] = []
    for report in reports:
        zero_us = max((span.end_us for span in step), default=0.0)
        spans = report.spans_after if passed else report.spans_before
        step += [replace(span, start_us=span.start_us + zero_us) for span in spans]
    return step


def _draw_tokens(config: RunConfig, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (config.train.batch_size, config.data.seq_len)
    return torch.randint(config.model.vocab_size, shape, generator=generator).to(device)


def _sample_us(
    step: Callable[[], None], device: torch.device, *, num_steps: int, on_progress: Progress | None
) -> list[float]:
    """Return the time of each timed step; the first steps compile and are not timed."""
    samples_us: list[float] = []
    for index in range(_NUM_WARMUP + num_steps):
        if on_progress is not None:
            text = "measuring steps" if index else "compiling, and measuring operators"
            on_progress(text, index, _NUM_WARMUP + num_steps)
        samples_us.append(_step_us(step, device))
    return samples_us[_NUM_WARMUP:]


def _step_us(step: Any, device: torch.device) -> float:
    """Return the time of a step on the slowest rank."""
    start_together(device)
    begin = time.perf_counter_ns()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    duration_us = torch.tensor((time.perf_counter_ns() - begin) / 1e3, device=device)
    dist.all_reduce(duration_us, op=dist.ReduceOp.MAX)
    return duration_us.item()
