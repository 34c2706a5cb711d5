"""Report the steps of a run: progress bar or log lines, JSON lines, TensorBoard, and W&B."""

import dataclasses
import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from halley.core.config import RunConfig
from halley.core.validation import read_text
from halley.distributed.peers import on_rank_zero


METRICS_FILE = "metrics.jsonl"
DISCARDED_FILE = "metrics.discarded.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
WANDB_FOLDER = "wandb"
REPORT_FILES = (METRICS_FILE, DISCARDED_FILE, TENSORBOARD_FOLDER, WANDB_FOLDER)
_RUN_ID_FILE = "halley-run-id"  # in WANDB_FOLDER
Metrics = dict[str, float | int | None]  # metrics of one step by name; "step" counts from 1


@final
class Reporter:
    """Reports the metrics of each step to the console and to files, on rank 0 only.

    ``metrics`` is the path of ``metrics.jsonl``; None on other ranks. All ranks create a Reporter
    together, and all raise the error if a file or a package is missing.
    """

    def __init__(
        self, config: RunConfig, *, console: Console, metrics: Path | None, first_step: int = 0
    ) -> None:
        self._config = config
        self._console = console
        self._progress: Progress | None = None
        self._board = self._wandb_run = self._metrics = None
        on_rank_zero(lambda: None if metrics is None else self._open(metrics, first_step))

    def _open(self, metrics: Path, first_step: int) -> None:
        self._metrics = metrics.open("a", encoding="ascii")
        if self._config.train.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(
                str(metrics.parent / TENSORBOARD_FOLDER), purge_step=first_step + 1
            )
        if self._config.train.wandb:
            import wandb

            try:
                self._wandb_run = wandb.init(
                    project=os.environ.get("WANDB_PROJECT", "halley"),
                    name=metrics.parent.resolve().name,
                    dir=metrics.parent,
                    config=dataclasses.asdict(self._config),
                    id=_wandb_run_id(metrics.parent / WANDB_FOLDER),
                    resume="allow",
                )
            except wandb.Error as error:
                raise RuntimeError(f"train.wandb (true): wandb cannot start: {error}") from error
            # The count that W&B keeps only grows, but a resumed run repeats steps.
            self._wandb_run.define_metric("*", step_metric="step")

    def report(self, metrics: Metrics) -> None:
        """Write a step's metrics to files; update the progress bar or, if due, log a line."""
        if self._metrics is None:
            return
        try:
            self._metrics.write(to_json(metrics) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise RuntimeError(
                f"{self._metrics.name} cannot be written: {error.strerror}; the checkpoints of "
                "earlier steps stay"
            ) from error
        step = int(metrics["step"] or 0)
        if self._board is not None:
            for name, value in metrics.items():
                if value is not None:
                    self._board.add_scalar(name, value, step)
        if self._wandb_run is not None:
            self._wandb_run.log({k: v for k, v in metrics.items() if v is not None})
        if self._progress is not None:
            # This text is shorter than a log line, to fit next to the bar in 80 columns.
            mfu = "" if metrics["mfu"] is None else f"mfu {_share(metrics['mfu'])}  "
            text = (
                f"loss {metrics['loss']:.3f}  {(metrics['tokens_per_s'] or 0) / 1e3:,.1f}k tok/s  "
                f"{mfu}exposed {_share(metrics['exposed_share'])}"
            )
            self._progress.update(self._bar, completed=step, description=text)
        elif step % self._config.train.log_every == 0 or step == self._config.train.num_steps:
            say(self._console, f"step {step}/{self._config.train.num_steps}  {describe(metrics)}")
        if "eval_loss" in metrics:
            text = (
                f"step {step}/{self._config.train.num_steps}  eval_loss {metrics['eval_loss']:.4f}"
            )
            say(self._console, text)

    @contextmanager
    def running(self, first_step: int) -> Iterator[None]:
        """In the block, show a progress bar if the console is a terminal; then close all files."""
        if self._metrics is None:
            yield
            return
        try:
            with ExitStack() as stack:
                if self._wandb_run is not None:
                    stack.enter_context(self._wandb_run)  # an error marks the run as failed
                if self._console.is_terminal:
                    count, text = "{task.completed}/{task.total}", "{task.description}"
                    columns = (BarColumn(bar_width=12), TextColumn(count), TimeRemainingColumn())
                    progress = Progress(*columns, TextColumn(text), console=self._console)
                    self._progress = stack.enter_context(progress)
                    num_steps = self._config.train.num_steps
                    self._bar = progress.add_task("", total=num_steps, completed=first_step)
                yield
        finally:
            self._progress = None
            self._metrics.close()
            if self._board is not None:
                self._board.close()


def to_json(metrics: Metrics) -> str:
    """Return metrics as one line of JSON, with null for NaN and infinity, which JSON lacks."""
    finite = {
        name: value if value is not None and math.isfinite(value) else None
        for name, value in metrics.items()
    }
    return json.dumps(finite, allow_nan=False)


def _wandb_run_id(folder: Path) -> str:
    """Return the id of a run, which all its starts share, from a file that the first one writes."""
    file = folder / _RUN_ID_FILE
    if not file.exists():
        folder.mkdir(exist_ok=True)
        file.write_text(secrets.token_hex(8), encoding="ascii")
    return read_text(file, what="run id", max_bytes=64)


def say(console: Console, text: str) -> None:
    """Print one line to a rich console, without wrapping or markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def describe(metrics: Metrics) -> str:
    """Return a step's log line: loss, tokens/s, MFU unless None, share of exposed communication."""
    parts = [f"loss {metrics['loss']:.4f}", f"{metrics['tokens_per_s']:,.0f} tokens/s"]
    if metrics["mfu"] is not None:  # MFU is None on CPUs, whose peak FLOP/s is unknown
        parts.append(f"mfu {_share(metrics['mfu'], digits=1)}")
    parts.append(f"exposed communication {_share(metrics['exposed_share'], digits=1)}")
    return "  ".join(parts)


def _share(value: float | int | None, *, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def drop_later_steps(path: Path, *, step: int) -> None:
    """Move lines of steps after ``step`` from a metrics file to ``metrics.discarded.jsonl``.

    A resumed run repeats these steps. Lines that a crash truncated are moved too.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if _is_up_to(line, step=step)]
    dropped = [line for line in lines if not _is_up_to(line, step=step)]
    if not dropped:
        return
    with path.with_name(DISCARDED_FILE).open("ab") as file:
        file.writelines(dropped)
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_bytes(b"".join(kept))
    os.replace(draft, path)  # a rename is atomic: a crash leaves the old file or the new one


def _is_up_to(line: bytes, *, step: int) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    number = entry.get("step") if isinstance(entry, dict) else None
    return line.endswith(b"\n") and isinstance(number, int) and number <= step
