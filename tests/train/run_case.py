"""A small training run for tests: its model takes a step in milliseconds, on generated text."""

import dataclasses
import json
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from halley.cli.train import read_config
from halley.core.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RouterConfig,
    RunConfig,
    TrainConfig,
)
from halley.distributed.mesh import ParallelGroups, World
from halley.train import trainer as loop
from halley.train.step import TrainingRun, build_run
from tests.moe.model_case import MODELS, destroy
from tests.rank_pool import RunRanks


SMALL = dataclasses.replace(MODELS["softmax"], vocab_size=256)
SIGMOID = dataclasses.replace(
    SMALL,
    moe=MoEConfig(
        num_experts=8,
        top_k=2,
        intermediate_size=8,
        router=RouterConfig(kind="sigmoid", num_groups=4, num_limited_groups=2),
    ),
)
SGD = OptimizerConfig(kind="sgd", learning_rate=0.2, warmup_steps=2, clip_norm=1.0)
ADAMW = OptimizerConfig(learning_rate=1e-2, warmup_steps=2)


# Settings of the command line for a small run, with a checkpoint every third step.
SETTINGS = [
    "model.hidden_size=16", "model.num_layers=2", "model.head_dim=8", "model.moe.num_experts=6",
    "model.moe.intermediate_size=8", "device=cpu", "data.seq_len=16", "train.batch_size=2",
    "optimizer.learning_rate=0.01", "checkpoint.every_steps=3", "checkpoint.keep=100",
]  # fmt: skip


def write_text(folder: Path) -> Path:
    """Write a training text of 8 KiB, in which a rule gives each word, and return its file."""
    words = ["expert", "token", "router", "rank", "gate", "\n"]
    place, text = 1, ""
    while len(text) < 8192:
        place = (5 * place + 3) % 4096
        text += words[place % 7 % len(words)] + " "
    path = folder / "text.txt"
    path.write_text(text[:8192])
    return path


def make_config(
    text: Path,
    *,
    model: ModelConfig = SMALL,
    optimizer: OptimizerConfig = SGD,
    ep_size: int = 0,
    num_steps: int = 20,
    every_steps: int = 0,
    **train: object,
) -> RunConfig:
    """Return the configuration of a small run whose output folder is beside its text."""
    sizes: dict[str, object] = {"num_steps": num_steps, "batch_size": 2, "log_every": 1000}
    return RunConfig(
        model=model,
        output=str(text.parent / "run"),
        ep_size=ep_size,
        device="cpu",
        data=DataConfig(path=str(text), seq_len=16),
        optimizer=optimizer,
        train=TrainConfig(**{**sizes, **train}),  # type: ignore[arg-type]
        checkpoint=CheckpointConfig(every_steps=every_steps, keep=100),
    )


def change_training(config: RunConfig, **changes: Any) -> RunConfig:
    """Return a configuration with other settings in its table ``train``."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def make_world(rank: int = 0, num_ranks: int = 1) -> World:
    """Return the ``World`` of a rank whose process group the test has already created."""
    return World(rank=rank, num_ranks=num_ranks, device=torch.device("cpu"))


def read_settings(folder: Path, *settings: str, name: str = "run") -> RunConfig:
    """Return the configuration that the command line reads from ``SETTINGS`` and more settings."""
    text, output = str(write_text(folder)), str(folder / name)
    return read_config(None, [*SETTINGS, *settings], data=text, output=output)


def command_line(config: RunConfig) -> list[str]:
    """Return the arguments of ``halley`` for a result of ``read_settings``."""
    settings = [*SETTINGS, f"train.num_steps={config.train.num_steps}"]
    paths = [f"--data={config.data.path}", f"--output={config.output}"]
    return ["train", *paths, *(f"--set={setting}" for setting in settings)]


def train_on_ranks(
    rank: int, num_ranks: int, config: RunConfig, signal_at: tuple[int, int] = (-1, 0)
) -> list[int]:
    """Train on the default group, with SIGTERM to one rank before one step; return the steps."""
    groups: list[ParallelGroups] = []

    def build(config: RunConfig, world: World) -> TrainingRun:
        run = build_run(config, world)
        groups.append(run.groups)
        return run

    steps: list[int] = []

    def on_step(step: int) -> None:
        if (rank, step) == signal_at:
            signal.raise_signal(signal.SIGTERM)
        steps.append(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build_run", build)
        loop.train(config, make_world(rank, num_ranks), on_step=on_step)
    destroy(groups[0])
    return steps


@contextmanager
def built(config: RunConfig, *, rank: int = 0, num_ranks: int = 1) -> Iterator[TrainingRun]:
    """Yield the ``TrainingRun`` of a configuration; destroy its process groups afterwards."""
    run = build_run(config, make_world(rank, num_ranks))
    yield run
    if run.groups.mesh is not None:
        destroy(run.groups)


def read_metrics(config: RunConfig) -> list[dict[str, Any]]:
    """Return the rows of the ``metrics.jsonl`` of a run."""
    lines = Path(config.output, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses_of(config: RunConfig) -> list[float]:
    """Return the losses of a run, after a check that each step is there once and in order."""
    rows = read_metrics(config)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def checkpoint_of(config: RunConfig, step: int) -> Path:
    """Return the path of a run's checkpoint, whether it exists or not."""
    return Path(config.output, "checkpoints", f"step-{step:08d}")


def go_on_in_a_copy(
    run_ranks: RunRanks, old: RunConfig, new: RunConfig, num_ranks: int
) -> list[float]:
    """Resume the run ``old`` as ``new`` in a copy of its output folder; return all losses."""
    output = Path(old.output)
    copy = Path(tempfile.mkdtemp(dir=output.parent), "run")
    shutil.copytree(output, copy)
    new = dataclasses.replace(new, output=str(copy))
    run_ranks(train_on_ranks, num_ranks, new)
    return losses_of(new)


def train_here(config: RunConfig) -> list[int]:
    """Train in this process; return the steps taken."""
    steps: list[int] = []
    loop.train(config, make_world(), on_step=steps.append)
    return steps


def truncate(path: Path) -> int:
    """Cut one byte off a tensor file of a checkpoint, and return the size of the rest."""
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    return file.stat().st_size


def make_state(value: int) -> dict[str, Any]:
    """Return a state of nested tensors that depend on ``value``, to save as a checkpoint."""
    return {
        "model": {"weight": torch.full((2, 3), float(value))},
        "optimizer": {"moments": {"0": torch.full((3,), value + 0.5)}},
        "step": torch.tensor(value),
    }


def change_manifest(path: Path, **changes: object) -> None:
    """Change fields of a checkpoint's manifest and give it a right checksum again."""
    table = json.loads((path / "manifest.json").read_text()) | changes
    del table["xxh3_128"]
    text = json.dumps(table, sort_keys=True, separators=(",", ":"))
    table["xxh3_128"] = xxhash.xxh3_128_hexdigest(text.encode())
    (path / "manifest.json").write_text(json.dumps(table))
