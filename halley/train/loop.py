"""A training run, top to bottom: build or resume, step, report, save."""

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from halley.core.config import RunConfig
from halley.core.timeline import total_us
from halley.moe.model import flops_per_token
from halley.moe.strategy import describe_strategies
from halley.moe.world import World
from halley.perf.peak import peak_flops_per_s
from halley.train.checkpoint import (
    check_writable,
    find_newest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from halley.train.planned import describe_plan
from halley.train.progress import METRICS_FILE, Metrics, Reporter, drop_later_steps
from halley.train.step import TrainingRun, build_run, train_step


CONFIG_FILE = "config.json"
COUNTS_FILE = "counts.json"
CHECKPOINTS_FOLDER = "checkpoints"


def train(config: RunConfig, world: World, *, on_step: Callable[[int], None]) -> Metrics:
    """Train a model; a collective of all ranks.

    Args:
        config: the run. Its ``output`` folder gets ``config.json``, ``metrics.jsonl``,
            ``checkpoints/`` and, with each of these, ``counts.json``, the load of the experts since
            the one before; all ranks see the same folder.
        world: the ranks.
        on_step: called with the number of each step before it, from 1.

    Returns:
        The metrics of the last step.

    Raises:
        ValueError: the configuration does not fit the ranks, the data or the folder.
        RuntimeError: a peer is lost, a checkpoint cannot be written, or the run diverged.
    """
    output = Path(config.output)
    checkpoints = output / CHECKPOINTS_FOLDER
    check_writable(checkpoints)
    run = build_run(config, world)
    first_step = _resume(run, checkpoints)
    metrics_path = output / METRICS_FILE if world.is_first else None
    if metrics_path is not None:
        drop_later_steps(metrics_path, step=first_step)
        _write_config(config, output / CONFIG_FILE)
    reporter = Reporter(
        config,
        console=Console(stderr=True, quiet=not world.is_first),
        metrics=metrics_path,
        first_step=first_step,
    )
    reporter.say(_describe(run, first_step))
    peak = peak_flops_per_s(world.device) * world.num_ranks
    flops = flops_per_token(config.model, seq_len=config.data.seq_len)

    metrics: Metrics = {"step": first_step}
    with reporter.running(first_step):
        for step in range(first_step, config.train.num_steps):
            on_step(step + 1)
            start_s = time.perf_counter()
            result = train_step(run, step)
            step_s = time.perf_counter() - start_s
            exposed_s = total_us(run.recorder.collect(), stream="exposed") * 1e-6
            tokens_per_s = run.tokens_per_step / step_s
            metrics = {
                "step": step + 1,
                **dataclasses.asdict(result),
                "step_s": step_s,
                "tokens_per_s": tokens_per_s,
                "mfu": tokens_per_s * flops / peak,
                "exposed_share": exposed_s / step_s,
            }
            reporter.report(metrics)
            _check_finite(metrics)  # before what diverged takes the place of a good checkpoint
            if _is_due(config, step + 1):
                keep = config.checkpoint.keep
                save_checkpoint(checkpoints, run.state(), step=step + 1, keep=keep)
                run.counts.write(output / COUNTS_FILE, step=step + 1)
    return metrics


def _check_finite(metrics: Metrics) -> None:
    for name in ("loss", "grad_norm"):
        value = metrics[name]
        if value is None or not math.isfinite(value):
            raise RuntimeError(
                f"{name} ({value}) of step {metrics['step']:.0f} is not finite: the run diverged; "
                "checkpoints of earlier steps stay"
            )


def _resume(run: TrainingRun, folder: Path) -> int:
    """Load the newest valid checkpoint, if there is one; return the steps done.

    Raises:
        ValueError: there is one, and the run is not to resume: it would be taken for its own.
    """
    path = find_newest_checkpoint(folder)
    if path is None:
        return 0
    if not run.config.checkpoint.resume:
        raise ValueError(
            f"checkpoint.resume (false) must have an output without checkpoints: {path} is there"
        )
    step = load_checkpoint(path, run.state())
    run.optimizer.resume(step)
    return step


def _is_due(config: RunConfig, step: int) -> bool:
    every = config.checkpoint.every_steps
    return step == config.train.num_steps or bool(every and step % every == 0)


def _write_config(config: RunConfig, path: Path) -> None:
    text = json.dumps(dataclasses.asdict(config), indent=2) + "\n"
    path.write_text(text, encoding="utf-8")


def _describe(run: TrainingRun, first_step: int) -> str:
    config, groups = run.config, run.groups
    num_parameters = sum(parameter.numel() for parameter in run.model.parameters())
    return (
        ("" if run.plan is None else describe_plan(run.plan) + "\n")
        + f"{config.model.name}: {num_parameters / 1e6:.1f} M parameters a rank, "
        f"{groups.num_ranks} ranks on {run.world.device.type}, ep_size {groups.ep_size}, "
        f"strategy {describe_strategies(config.strategy.split(','))}, "
        + (f"passes {config.passes}, " if config.passes != "none" else "")
        + (f"placement {config.placement}, " if config.placement else "")
        + config.train.dtype
        + (f", resumed after step {first_step}" if first_step else "")
    )
