"""A training run, top to bottom: build or resume, step, report, save."""

import dataclasses
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from halley.core.config import RunConfig
from halley.core.timeline import waited_us
from halley.moe.model import flops_per_token
from halley.moe.strategy import describe_strategies
from halley.moe.world import World
from halley.perf.peak import peak_flops_per_s
from halley.train.checkpoint import (
    check_writable,
    find_newest_checkpoint,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
)
from halley.train.planned import describe_plan
from halley.train.progress import METRICS_FILE, Metrics, Reporter, drop_later_steps, say
from halley.train.step import TrainingRun, build_run, train_step


CONFIG_FILE = "config.json"
COUNTS_FILE = "counts.json"
CHECKPOINTS_FOLDER = "checkpoints"

Table = dict[str, Any]


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
        ValueError: the configuration does not fit the ranks, the data, the folder or the checkpoint
            in it.
        RuntimeError: a peer is lost, a checkpoint cannot be written, or the run diverged.
    """
    output = Path(config.output)
    checkpoints = output / CHECKPOINTS_FOLDER
    console = Console(stderr=True, quiet=not world.is_first)
    check_writable(checkpoints)
    checkpoint, manifest = _find_checkpoint(config, checkpoints)
    if checkpoint is not None:
        _check_same(config, manifest, path=checkpoint, warn=world.is_first)
    first_step = manifest["step"]
    if first_step >= config.train.num_steps:
        say(console, _describe_done(config, first_step))
        return {"step": first_step}
    run = build_run(config, world)
    if checkpoint is not None:
        run.optimizer.resume(load_checkpoint(checkpoint, run.state()))
        # Older checkpoints have no note of it: as many as steps of today's size read.
        num_read = manifest["notes"].get("num_sequences", run.loader.num_read(first_step))
        run.loader.resume(first_step, num_read=num_read)
    metrics_path = output / METRICS_FILE if world.is_first else None
    if metrics_path is not None:
        drop_later_steps(metrics_path, step=first_step)
        _write_config(config, output / CONFIG_FILE)
    reporter = Reporter(config, console=console, metrics=metrics_path, first_step=first_step)
    reporter.say(_describe(run, first_step))
    peak = peak_flops_per_s(world.device) * world.num_ranks
    peak_tokens_per_s = peak / flops_per_token(config.model, seq_len=config.data.seq_len)

    metrics: Metrics = {}
    with reporter.running(first_step):
        for step in range(first_step, config.train.num_steps):
            on_step(step + 1)
            metrics = _take_step(run, step, peak_tokens_per_s=peak_tokens_per_s)
            reporter.report(metrics)
            _check_finite(metrics)  # before what diverged takes the place of a good checkpoint
            if _is_due(config, step + 1):
                _save(run, step=step + 1)
    return metrics


def _take_step(run: TrainingRun, step: int, *, peak_tokens_per_s: float) -> Metrics:
    start_s = time.perf_counter()
    result = train_step(run, step)
    step_s = time.perf_counter() - start_s
    exposed_us = waited_us(run.recorder.collect())
    tokens_per_s = run.tokens_per_step / step_s
    return {
        "step": step + 1,
        **dataclasses.asdict(result),
        "step_s": step_s,
        "tokens_per_s": tokens_per_s,
        "mfu": tokens_per_s / peak_tokens_per_s,
        "exposed_share": None if exposed_us is None else exposed_us * 1e-6 / step_s,
    }


def _save(run: TrainingRun, *, step: int) -> None:
    output = Path(run.config.output)
    save_checkpoint(
        output / CHECKPOINTS_FOLDER,
        run.state(),
        step=step,
        keep=run.config.checkpoint.keep,
        notes={
            "config": dataclasses.asdict(run.config),
            "num_sequences": run.loader.num_read(step),
        },
    )
    run.counts.write(output / COUNTS_FILE, step=step)


def _check_finite(metrics: Metrics) -> None:
    for name in ("loss", "grad_norm"):
        value = metrics[name]
        if value is None or not math.isfinite(value):
            raise RuntimeError(
                f"{name} ({value}) of step {metrics['step']:.0f} is not finite: the run diverged; "
                "checkpoints of earlier steps stay"
            )


def _find_checkpoint(config: RunConfig, folder: Path) -> tuple[Path | None, Table]:
    """Return the checkpoint from which the run goes on, and its manifest; None starts at step 0.

    Raises:
        ValueError: there is one, and the run is not to resume: it would be taken for its own.
    """
    path = find_newest_checkpoint(folder)
    if path is None:
        return None, {"step": 0}
    if not config.checkpoint.resume:
        raise ValueError(
            f"checkpoint.resume (false) must have an output without checkpoints: {path} is there"
        )
    return path, read_manifest(path)


def _check_same(config: RunConfig, manifest: Table, *, path: Path, warn: bool) -> None:
    """Check that a run may go on from a checkpoint.

    Raises:
        ValueError: it is of another model or kind of optimizer.
    """
    saved = _flat(manifest["notes"].get("config", {}))
    for name, value in _flat(dataclasses.asdict(config)).items():
        before = saved.get(name, value)  # a field that is younger than the checkpoint is not in it
        if before == value:
            continue
        if _must_stay(name):
            raise ValueError(
                f"{name} ({value!r}) must be {before!r}, as in checkpoint {path} from which "
                "the run would go on; with another output it starts anew"
            )
        if warn and name in ("data.seq_len", "train.seed"):
            warnings.warn(
                f"{name} ({value}) was {before} up to step {manifest['step']}: the text comes in "
                "another order now, so this pass reads some of it again and leaves some out",
                stacklevel=3,
            )


def _must_stay(name: str) -> bool:
    # These steer training, as a learning rate does, and leave the model what it computes.
    steers = name.endswith(("bias_update_rate", "balance_coefficient", "z_coefficient"))
    return name == "optimizer.kind" or (name.startswith("model.") and not steers)


def _flat(table: Table, *, prefix: str = "") -> Table:
    """Return the values of nested tables by their dotted names."""
    values: Table = {}
    for name, value in table.items():
        if isinstance(value, dict):
            values |= _flat(value, prefix=f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values


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


def _describe_done(config: RunConfig, step: int) -> str:
    return (
        f"run ({config.output}) is done already: it is at step {step} of train.num_steps "
        f"({config.train.num_steps}); to go on, set train.num_steps above {step}"
    )
