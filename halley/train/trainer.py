"""Train a model: build or resume a run, then step, report and save until it ends."""

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
from typing import Any, cast

from rich.console import Console

from halley.core.config import RunConfig
from halley.core.timeline import waited_us
from halley.core.validation import Table
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
    save_checkpoint,
)
from halley.train.data import Corpus, open_corpus
from halley.train.evaluate import evaluate
from halley.train.manifest import Manifest, read_manifest
from halley.train.progress import (
    METRICS_FILE,
    REPORT_FILES,
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
# Router fields that may change when a run resumes: they affect training, not the model's output.
_STEERING = ("bias_update_rate", "balance_coefficient", "z_coefficient")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The metrics of the last step, and the signal that ended the run early, or 0."""

    metrics: Metrics
    stop_signal: int = 0


def train(
    config: RunConfig, world: World, *, on_step: Callable[[int], None], restart: bool = False
) -> Outcome:
    """Train a model, from the newest checkpoint if any, to the end or a signal. Collective.

    Args:
        config: the run. Its ``output`` folder, which all ranks must see, receives ``config.json``,
            ``metrics.jsonl`` and ``checkpoints/``. With each checkpoint, ``counts.json`` receives
            the expert load since the checkpoint before.
        on_step: called before each step with its number, from 1.
        restart: start at step 0; the files of an earlier run move to ``previous-1/`` (or the next
            free number) in the folder.

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
    checkpoint = find_newest_checkpoint(output / CHECKPOINTS_FOLDER)
    manifest = Manifest(step=0, notes={}, files={})
    if checkpoint is not None:
        manifest = _check_resumable(config, checkpoint, warn=world.is_first)
    first_step = manifest.step
    if first_step >= config.train.num_steps:
        say(
            console,
            f"run ({config.output}) is done already: it is at step {first_step} of train.num_steps "
            f"({config.train.num_steps}); to go on, set train.num_steps above {first_step}",
        )
        return Outcome(metrics={"step": first_step})
    run = build_run(config, world)
    if checkpoint is not None:
        run.optimizer.resume(load_checkpoint(checkpoint, run.state()))
        # Halley 0.1 saved no "num_sequences": assume that no earlier batch size was different.
        num_read = manifest.notes.get("num_sequences", run.loader.num_read(first_step))
        run.loader.resume(first_step, num_read=num_read)
    metrics_path = output / METRICS_FILE if world.is_first else None
    on_rank_zero(lambda: drop_later_steps(output / METRICS_FILE, step=first_step))
    on_rank_zero(lambda: write_json(output / CONFIG_FILE, dataclasses.asdict(config)))
    reporter = Reporter(config, console=console, metrics=metrics_path, first_step=first_step)
    say(console, _describe(run, first_step))
    with reporter.running(first_step), run.requests.catch_signals():
        outcome = _take_steps(run, first_step, reporter=reporter, on_step=on_step)
    if outcome.stop_signal:
        say(
            console,
            f"stopped by {signal.Signals(outcome.stop_signal).name} after step "
            f"{outcome.metrics['step']:.0f}, with a checkpoint: the same command goes on from it",
        )
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
    tokens_per_step = (run.loader.num_read(1) - run.loader.num_read(0)) * config.data.seq_len
    metrics: Metrics = {}
    for step in range(first_step, config.train.num_steps):
        on_step(step + 1)
        start_s = time.perf_counter()
        result = train_step(run, step)
        step_s = time.perf_counter() - start_s
        exposed_us = waited_us(run.recorder.collect())
        tokens_per_s = tokens_per_step / step_s
        metrics = {
            "step": step + 1,
            **dataclasses.asdict(result),
            "step_s": step_s,
            "tokens_per_s": tokens_per_s,
            "mfu": None if peak_tokens_per_s is None else tokens_per_s / peak_tokens_per_s,
            "exposed_share": None if exposed_us is None else exposed_us * 1e-6 / step_s,
        }
        is_last = step + 1 == config.train.num_steps
        if run.eval_corpus is not None and (is_last or (step + 1) % config.data.eval_every == 0):
            metrics["eval_loss"] = evaluate(run)
        reporter.report(metrics)
        _check_finite(metrics)  # check before a save: no diverged model may replace a good one
        every = config.checkpoint.every_steps
        is_due = bool(every) and (step + 1) % every == 0
        if is_last or is_due or run.requests.is_due or run.requests.stop_signal:
            _save(run, step=step + 1)
        if run.requests.stop_signal:
            break
    return Outcome(metrics=metrics, stop_signal=run.requests.stop_signal)


def _save(run: TrainingRun, *, step: int) -> None:
    output, keep = Path(run.config.output), run.config.checkpoint.keep
    config = dataclasses.asdict(run.config)
    notes = {
        "config": config,
        "num_sequences": run.loader.num_read(step),
        "data": _describe_data(run.loader.corpus),
    }
    save_checkpoint(output / CHECKPOINTS_FOLDER, run.state(), step=step, keep=keep, notes=notes)
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


def _check_resumable(config: RunConfig, path: Path, *, warn: bool) -> Manifest:
    """Return a checkpoint's manifest; ``ValueError`` if this run must not continue from it."""
    if not config.checkpoint.resume:
        raise ValueError(
            f"checkpoint.resume (false) must have an output without checkpoints: {path} is there"
        )
    manifest = on_rank_zero(lambda: read_manifest(path))
    num_read, saved = manifest.notes.get("num_sequences", 0), manifest.notes.get("config", {})
    if type(num_read) is not int or num_read < 0:
        raise ValueError(f"num_sequences ({num_read!r}) of checkpoint {path} must be at least 0")
    if not isinstance(saved, dict):
        raise ValueError(f"config of checkpoint {path} must be a table")
    saved = _flat(cast(dict[str, Any], saved))
    for name, value in _flat(dataclasses.asdict(config)).items():
        before = saved.get(name, value)  # older checkpoints lack newer fields
        if before == value:
            continue
        if name == "optimizer.kind" or (name.startswith("model.") and not name.endswith(_STEERING)):
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
    _check_data(config, manifest, path)
    return manifest


def _check_data(config: RunConfig, manifest: Manifest, path: Path) -> None:
    now = _describe_data(open_corpus(config))
    before = manifest.notes.get("data", now)  # Halley 0.2.0 saved no "data"
    if not isinstance(before, dict):
        raise ValueError(f"data of checkpoint {path} must be a table")
    for name in ("tokenizer", "text"):
        if cast(Table, before).get(f"{name}_checksum") != now[f"{name}_checksum"]:
            key = name if name == "tokenizer" and config.data.tokenizer else "path"
            raise ValueError(
                f"data.{key} ({getattr(config.data, key)!r}) must give the {name} of checkpoint "
                f"{path} from which the run would go on; with another output it starts anew"
            )


def _describe_data(corpus: Corpus) -> Table:
    return {
        "tokenizer_checksum": corpus.tokenizer_checksum,
        "text_checksum": corpus.fingerprint,
    }


def _set_aside(output: Path) -> None:
    # Only the first start moves files: a restart by torchrun resumes, even with --restart.
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    folder = find_free_name(output, "previous")
    folder.mkdir()
    for name in (CHECKPOINTS_FOLDER, CONFIG_FILE, COUNTS_FILE, *REPORT_FILES):
        if os.path.lexists(output / name):
            (output / name).rename(folder / name)
    check_writable(output / CHECKPOINTS_FOLDER)


def _flat(table: dict[str, Any], *, prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            values |= _flat(value, prefix=f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values


def write_json(path: Path, value: object) -> None:
    """Write a JSON file by a rename, so that a crash leaves the old file or the new one."""
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
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
