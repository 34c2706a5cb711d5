"""``halley train`` and ``halley export``: train a model, and write its weights as safetensors."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from halley.cli.checks import check_package
from halley.cli.ranks import NprocOption, count_ranks, joined, launch_ranks
from halley.core.config import RunConfig
from halley.core.models import load_config
from halley.core.routing import chunk_sizes, local_experts
from halley.core.sharding import shard_size
from halley.core.types import DTYPES
from halley.ops.expert_gemm import check_alignment
from halley.planner.step_plan import check_strategies
from halley.strategies.registry import PLANNED, STRATEGIES
from halley.train.checkpoint import check_writable
from halley.train.compiled_model import check_passes
from halley.train.hf_export import export_run
from halley.train.step import check_vocabulary, open_corpus, read_placements
from halley.train.trainer import CHECKPOINTS_FOLDER, train


ConfigOption = Annotated[Path | None, typer.Option(help="TOML file with the configuration.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change one key of the configuration, for example --set train.num_steps=100. May be "
        "given several times.",
    ),
]
_StrategyOption = Annotated[
    str | None,
    typer.Option(
        help=f"Strategy that runs the routed experts: {', '.join(STRATEGIES)}, or {PLANNED} for "
        "the predicted fastest one of each layer. Several names, separated by commas, are for one "
        f"MoE layer each. Default: that of the configuration, or else {RunConfig.strategy}."
    ),
]


def run(
    config: ConfigOption = None,
    overrides: SetOption = None,
    data: Annotated[str | None, typer.Option(help="Text file or folder to train on.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder for all files of the run.")] = None,
    strategy: _StrategyOption = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Start at step 0, and move the files of an earlier run in the output folder to "
            "its subfolder previous-1/.",
        ),
    ] = False,
    nproc: NprocOption = 0,
) -> int:
    """Train a Mixture-of-Experts language model on text, one byte per token.

    If the output folder has checkpoints, the run resumes from the newest complete one. After SIGINT
    (Ctrl-C) or SIGTERM, the run finishes the current step, saves a checkpoint and ends. Without
    --data, the text is the source code of the Python standard library.

    The command starts --nproc ranks on this host. Under torchrun it starts none: the process is one
    of torchrun's ranks.
    """
    run_config = read_config(config, overrides, data=data, output=output, strategy=strategy)
    check_config(run_config, nproc=nproc)
    check_writable(Path(run_config.output) / CHECKPOINTS_FOLDER)
    code = launch_ranks(nproc, device=run_config.device)
    if code is not None:
        return code
    with joined(run_config.device) as (world, watchdog):

        def on_step(step: int) -> None:
            if watchdog is not None:
                watchdog.step = step

        outcome = train(run_config, world, on_step=on_step, restart=restart)
        if world.is_first:
            typer.echo(json.dumps(outcome.metrics))
    return 128 + outcome.stop_signal if outcome.stop_signal else 0


def read_config(path: Path | None, overrides: list[str] | None, **options: str | None) -> RunConfig:
    """Return the configuration of a run; ``options`` override ``overrides`` and the file."""
    config = load_config(path, overrides=overrides or [])
    data = options.pop("data", None)
    if data is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=data))
    given = {name: value for name, value in options.items() if value is not None}
    return dataclasses.replace(config, **given)


def check_config(config: RunConfig, *, nproc: int) -> None:
    """Check a configuration before ranks start, so that a mistake gives one message at once.

    Raises:
        ValueError: a value is invalid, the text is missing, or the experts cannot be divided over
            the ranks or the chunks.
    """
    check_strategies(config)
    check_passes(config)
    ep_size = check_groups(config, num_ranks=count_ranks(nproc, device=config.device))
    tp_size = config.expert_tp_size
    placements = read_placements(config, ep_size=ep_size)
    if placements is None:
        num_local = local_experts(config.model.moe.num_experts, ep_size=ep_size, tp_size=tp_size)
    else:
        num_local = min(placement.num_local for placement in placements)
    if config.num_chunks:
        chunk_sizes(num_local, config.num_chunks)
    _check_model(config)
    if config.train.tensorboard:
        check_package("tensorboard", extra="tensorboard", option="train.tensorboard (true)")
    open_corpus(config)


def check_groups(config: RunConfig, *, num_ranks: int) -> int:
    """Return the size of an expert-parallel group.

    Raises:
        ValueError: ``ep_size`` does not divide the number of ranks, or ``expert_tp_size`` does not
            divide ``ep_size``.
    """
    ep_size, tp_size = config.ep_size or num_ranks, config.expert_tp_size
    if num_ranks % ep_size != 0:
        raise ValueError(f"ep_size ({ep_size}) must divide the number of ranks ({num_ranks})")
    if ep_size % tp_size != 0:
        raise ValueError(f"expert_tp_size ({tp_size}) must divide ep_size ({ep_size})")
    return ep_size


def _check_model(config: RunConfig) -> None:
    model, moe, tp_size = config.model, config.model.moe, config.expert_tp_size
    dtype = DTYPES[config.train.dtype]
    check_alignment(model.hidden_size, name="model.hidden_size", dtype=dtype)
    if tp_size > 1 and moe.expert_bias:
        raise ValueError(
            f"model.moe.expert_bias (true) must be false with expert_tp_size ({tp_size})"
        )
    own_size = shard_size(moe.intermediate_size, tp_size=tp_size)
    check_alignment(own_size, name="model.moe.intermediate_size", dtype=dtype)
    check_vocabulary(config)


def export(
    run: Annotated[Path, typer.Argument(help="Output folder of halley train.")],
    output: Annotated[
        Path, typer.Option(help="Folder for the exported files; it must be empty or not exist.")
    ],
) -> int:
    """Write the newest checkpoint of a run as safetensors with Hugging Face's tensor names.

    Supported model families: mixtral, qwen2_moe, qwen3_moe and olmoe. Runs in one process.
    """
    written = export_run(run, output)
    typer.echo(json.dumps({"output": str(output)} | dataclasses.asdict(written)))
    return 0
