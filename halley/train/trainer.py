"""A training run, top to bottom: build or resume, step, report, save."""

import dataclasses
import json
import math
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from halley.core.config import RunConfig
from halley.core.timeline import waited_us
from halley.cost.hardware import peak_flops_per_s
from halley.distributed.mesh import World
from halley.distributed.peers import on_rank_zero
from halley.moe.transformer import flops_per_token
from halley.planner.step_plan import describe_plan
from halley.strategies.registry import describe_strategies
from halley.train.checkpoint import (
    check_writable,
    find_free_name,
    find_newest_checkpoint,
    load_checkpoint,
    read_checkpoint_manifest,
    save_checkpoint,
)
from halley.train.manifest import Manifest
from halley.train.progress import (
    DISCARDED_FILE,
    METRICS_FILE,
    TENSORBOARD_FOLDER,
    Metrics,
    Reporter,
    drop_later_steps,
    say,
)
from halley.train.run_lock import run_lock
from halley.train.step import TrainingRun, build_run, train_step


CONFIG_FILE = "config.json"
COUNTS_FILE = "counts.json"
CHECKPOINTS_FOLDER = "checkpoints"

Table = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a run.

    Attributes:
        metrics: metrics of the last step.
        stop_signal: number of the signal that ended the run early, or 0.
    """

    metrics: Metrics
    stop_signal: int = 0


def train(
    config: RunConfig, world: World, *, on_step: Callable[[int], None], restart: bool = False
) -> Outcome:
    """Train a model. Collective of all ranks.

    Args:
        config: the run. Its ``output`` folder, which all ranks must see, receives ``config.json``,
            ``metrics.jsonl`` and ``checkpoints/``. With each checkpoint, ``counts.json`` receives
            the expert load since the checkpoint before.
        world: the ranks.
        on_step: called before each step with its number, from 1.
        restart: start at step 0 even if the folder holds a run. Its files move to ``previous-1/``
            (or the next free number) in the folder.

    Raises:
        ValueError: the configuration does not fit the ranks, the data, the folder or its
            checkpoint; another run uses the folder; or all its checkpoints are damaged.
        RuntimeError: a rank is lost, a file cannot be written, or the run diverged.
    """
    output = Path(config.output)
    check_writable(output / CHECKPOINTS_FOLDER)
    with ExitStack() as stack:
        on_rank_zero(lambda: stack.enter_context(run_lock(output)))
        if restart:
            on_rank_zero(lambda: _set_aside(output))
        return _train_in_locked_folder(config, world, on_step=on_step)


def _train_in_locked_folder(
    config: RunConfig, world: World, *, on_step: Callable[[int], None]
) -> Outcome:
    output = Path(config.output)
    console = Console(stderr=True, quiet=not world.is_first)
    checkpoint, manifest = _find_checkpoint(config, output / CHECKPOINTS_FOLDER)
    if checkpoint is not None:
        _check_same(config, manifest, path=checkpoint, warn=world.is_first)
    first_step = manifest.step
    if first_step >= config.train.num_steps:
        say(console, _describe_done(config, first_step))
        return Outcome(metrics={"step": first_step})
    run = build_run(config, world)
    if checkpoint is not None:
        run.optimizer.resume(load_checkpoint(checkpoint, run.state()))
        # Checkpoints of version 0.1 may lack the note; assume steps of the present size.
        num_read = manifest.notes.get("num_sequences", run.loader.num_read(first_step))
        run.loader.resume(first_step, num_read=num_read)
    metrics_path = output / METRICS_FILE if world.is_first else None
    if metrics_path is not None:
        drop_later_steps(metrics_path, step=first_step)
        _write_config(config, output / CONFIG_FILE)
    reporter = Reporter(config, console=console, metrics=metrics_path, first_step=first_step)
    reporter.say(_describe(run, first_step))
    with reporter.running(first_step), run.requests.catch_signals():
        outcome = _take_steps(run, first_step, reporter=reporter, on_step=on_step)
    if outcome.stop_signal:
        reporter.say(_describe_stop(outcome))
    return outcome


def _take_steps(
    run: TrainingRun, first_step: int, *, reporter: Reporter, on_step: Callable[[int], None]
) -> Outcome:
    config, world = run.config, run.world
    peak_flops = peak_flops_per_s(world.device)
    peak_tokens_per_s = None
    if peak_flops is not None:
        flops = flops_per_token(config.model, seq_len=config.data.seq_len)
        peak_tokens_per_s = peak_flops * world.num_ranks / flops
    metrics: Metrics = {}
    for step in range(first_step, config.train.num_steps):
        on_step(step + 1)
        metrics = _take_step(run, step, peak_tokens_per_s=peak_tokens_per_s)
        reporter.report(metrics)
        _check_finite(metrics)  # so that no diverged model replaces a good checkpoint
        if _is_due(run, step + 1):
            _save(run, step=step + 1)
        if run.requests.stop_signal:
            break
    return Outcome(metrics=metrics, stop_signal=run.requests.stop_signal)


def _take_step(run: TrainingRun, step: int, *, peak_tokens_per_s: float | None) -> Metrics:
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
        "mfu": None if peak_tokens_per_s is None else tokens_per_s / peak_tokens_per_s,
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
    run.requests.saved()


def _check_finite(metrics: Metrics) -> None:
    for name in ("loss", "grad_norm"):
        value = metrics[name]
        if value is None or not math.isfinite(value):
            raise RuntimeError(
                f"{name} ({value}) of step {metrics['step']:.0f} is not finite: the run diverged; "
                "checkpoints of earlier steps stay"
            )


def _find_checkpoint(config: RunConfig, folder: Path) -> tuple[Path | None, Manifest]:
    """Return the checkpoint to resume from and its manifest; None to start at step 0.

    Raises:
        ValueError: there is a checkpoint and resuming is off, so its files would be overwritten;
            the notes of its manifest are damaged; or all checkpoints are damaged.
    """
    path = find_newest_checkpoint(folder)
    if path is None:
        return None, Manifest(step=0, notes={}, files={})
    if not config.checkpoint.resume:
        raise ValueError(
            f"checkpoint.resume (false) must have an output without checkpoints: {path} is there"
        )
    manifest = read_checkpoint_manifest(path)
    num_read = manifest.notes.get("num_sequences", 0)
    if type(num_read) is not int or num_read < 0:
        raise ValueError(f"num_sequences ({num_read!r}) of checkpoint {path} must be at least 0")
    if not isinstance(manifest.notes.get("config", {}), dict):
        raise ValueError(f"config of checkpoint {path} must be a table")
    return path, manifest


def _set_aside(output: Path) -> None:
    """Move the files of a run into a new folder, so that the next run starts at step 0."""
    # torchrun restarts failed ranks with the same command, which still contains --restart.
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    names = (
        CHECKPOINTS_FOLDER,
        METRICS_FILE,
        DISCARDED_FILE,
        COUNTS_FILE,
        CONFIG_FILE,
        TENSORBOARD_FOLDER,
    )
    found = [output / name for name in names if os.path.lexists(output / name)]
    folder = find_free_name(output, "previous")
    folder.mkdir()
    for path in found:
        path.rename(folder / path.name)
    check_writable(output / CHECKPOINTS_FOLDER)


def _check_same(config: RunConfig, manifest: Manifest, *, path: Path, warn: bool) -> None:
    """Check that a run may resume from a checkpoint.

    Raises:
        ValueError: the checkpoint is of another model or kind of optimizer.
    """
    saved = _flat(manifest.notes.get("config", {}))
    for name, value in _flat(dataclasses.asdict(config)).items():
        before = saved.get(name, value)  # older checkpoints lack newer fields
        if before == value:
            continue
        if _must_stay(name):
            raise ValueError(
                f"{name} ({value!r}) must be {before!r}, as in checkpoint {path} from which "
                "the run would go on; with another output it starts anew"
            )
        if warn and name in ("data.seq_len", "train.seed"):
            warnings.warn(
                f"{name} ({value}) was {before} up to step {manifest.step}: the order of the text "
                "changes, so this epoch repeats some of it and leaves some out",
                stacklevel=4,
            )


def _must_stay(name: str) -> bool:
    # These change training, as a learning rate does, but not the function of the model.
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


def _is_due(run: TrainingRun, step: int) -> bool:
    every = run.config.checkpoint.every_steps
    return (
        step == run.config.train.num_steps
        or bool(every and step % every == 0)
        or run.requests.is_due
        or run.requests.stop_signal != 0
    )


def _write_config(config: RunConfig, path: Path) -> None:
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n", encoding="utf-8")
    os.replace(draft, path)


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


def _describe_stop(outcome: Outcome) -> str:
    name = signal.Signals(outcome.stop_signal).name
    return (
        f"stopped by {name} after step {outcome.metrics['step']:.0f}, with a checkpoint: the same "
        "command goes on from it"
    )
