"""``halley train``, ``trace`` and ``export``: train, profile steps, and write safetensors."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from halley.cli.bench import StrategiesOption, format_ms, split_strategy_names
from halley.cli.checks import check_chart, check_replaceable, check_samples
from halley.cli.ranks import NprocOption, count_ranks, joined, launch_ranks, step_progress
from halley.core.config import RunConfig
from halley.core.models import load_config
from halley.core.routing import chunk_sizes, shard_size
from halley.core.timeline import write_chrome_trace
from halley.core.types import DTYPES, local_experts
from halley.core.validation import check_package
from halley.ops.expert_rows import check_alignment
from halley.planner.step_plan import check_strategies
from halley.strategies.registry import PLANNED, STRATEGIES
from halley.tools.charts import draw_timelines
from halley.tools.timer import to_float
from halley.train.compare import EXPOSED, OTHER, STEP, compare_strategies
from halley.train.data import open_corpus, open_eval_corpus
from halley.train.step import check_passes, read_placements


_PICTURE = "timeline.png"
# Labels of the rows of ``_step_table`` by span name, in roughly the order of a step. Spans with
# other names have no row.
_PARTS = {
    "attention": "attention with its norm",
    "ffn": "routers, norms, shared experts",
    "route": "sort, counts, gather of tokens",
    "route.wait": "wait: counts of all ranks",
    "dispatch.wait": "wait: dispatch",
    "experts": "experts",
    "fused_experts": "fused experts, with dispatch and combine",
    "combine.wait": "wait: combine",
    "restore": "weighted sum",
    "forward": "embedding and head",
    "loss": "loss",
    "backward": "backward",
    "combine.backward.wait": "wait: backward of combine",
    "dispatch.backward.wait": "wait: backward of dispatch",
    "replicas.wait": "wait: gradients of replicas",
    "gradients.wait": "wait: all-reduce of gradients",
    "optimizer": "clipping and optimizer",
    OTHER: "other",
}

ConfigOption = Annotated[Path | None, Option(help="TOML file with the configuration.")]
SetOption = Annotated[
    list[str] | None,
    Option(
        "--set",
        help="Change one key of the configuration, for example --set train.num_steps=100. May be "
        "given several times.",
    ),
]


def run(
    config: ConfigOption = None,
    overrides: SetOption = None,
    data: Annotated[
        str | None,
        Option(
            help="File or folder to train on: text, .jsonl, .parquet, or a folder that halley "
            "tokenize wrote."
        ),
    ] = None,
    output: Annotated[str | None, Option(help="Folder for all files of the run.")] = None,
    strategy: Annotated[
        str | None,
        Option(
            help=f"Strategy that runs the routed experts: {', '.join(STRATEGIES)}, or {PLANNED} "
            "for the predicted fastest one of each layer. Several names, separated by commas, are "
            "for one MoE layer each. Default: that of the configuration, or else "
            f"{RunConfig.strategy}."
        ),
    ] = None,
    restart: Annotated[
        bool,
        Option(
            "--restart",
            help="Start at step 0, and move the files of an earlier run in the output folder to "
            "its subfolder previous-1/.",
        ),
    ] = False,
    nproc: NprocOption = 0,
) -> int:
    """Train a Mixture-of-Experts language model on text, one byte per token or by a tokenizer.

    If the output folder has checkpoints, the run resumes from the newest complete one. After SIGINT
    (Ctrl-C) or SIGTERM, the run finishes the current step, saves a checkpoint and ends. Without
    --data, the text is the source code of the Python standard library. The keys data.tokenizer and
    data.eval_path set a tokenizer and a text for the evaluation loss.

    The command starts --nproc ranks on this host. Under torchrun it starts none: the process is one
    of torchrun's ranks.
    """
    # Imported here: these modules import torch.distributed.checkpoint, which takes a second.
    from halley.train.checkpoint import check_writable
    from halley.train.progress import to_json
    from halley.train.trainer import CHECKPOINTS_FOLDER, train

    run_config = read_config(config, overrides, data=data, output=output, strategy=strategy)
    check_config(run_config, nproc=nproc)
    check_writable(Path(run_config.output) / CHECKPOINTS_FOLDER)
    launch_ranks(nproc, device=run_config.device)
    with joined(run_config.device) as (world, watchdog):

        def on_step(step: int) -> None:
            if watchdog is not None:
                watchdog.step = step

        outcome = train(run_config, world, on_step=on_step, restart=restart)
        if world.is_first:
            typer.echo(to_json(outcome.metrics))
    return 128 + outcome.stop_signal if outcome.stop_signal else 0


def read_config(path: Path | None, overrides: list[str] | None, **options: str | None) -> RunConfig:
    """Return a run's configuration: a file, changed by ``overrides``, then by given ``options``."""
    config = load_config(path, overrides=overrides or [])
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if "data" in given:
        given["data"] = dataclasses.replace(config.data, path=given["data"])
    return dataclasses.replace(config, **given)


def check_config(config: RunConfig, *, nproc: int) -> None:
    """Raise ``ValueError``, before ranks start, if a run's settings or its text are invalid."""
    check_strategies(config)
    check_passes(config)
    num_ranks = count_ranks(nproc, device=config.device)
    ep_size = check_groups(config, num_ranks=num_ranks)
    tp_size = config.expert_tp_size
    placements = read_placements(config, ep_size=ep_size)
    if placements is None:
        num_local = local_experts(config.model.moe.num_experts, ep_size=ep_size, tp_size=tp_size)
    else:
        num_local = min(placement.num_local for placement in placements)
    if config.num_chunks:
        chunk_sizes(num_local, config.num_chunks)
    model, dtype = config.model, DTYPES[config.train.dtype]
    check_alignment(model.hidden_size, name="model.hidden_size", dtype=dtype)
    if tp_size > 1 and model.moe.expert_bias:
        rule = f"false with expert_tp_size ({tp_size})"
        raise ValueError(f"model.moe.expert_bias (true) must be {rule}")
    own_size = shard_size(model.moe.intermediate_size, tp_size=tp_size)
    check_alignment(own_size, name="model.moe.intermediate_size", dtype=dtype)
    if config.train.tensorboard:
        check_package("tensorboard", extra="tensorboard", option="train.tensorboard (true)")
    if config.train.wandb:
        check_package("wandb", extra="wandb", option="train.wandb (true)")
    open_eval_corpus(config, open_corpus(config), num_ranks=num_ranks)


def check_groups(config: RunConfig, *, num_ranks: int) -> int:
    """Return the expert-parallel size; ``ValueError`` if the group sizes do not divide evenly."""
    ep_size, tp_size = config.ep_size or num_ranks, config.expert_tp_size
    if num_ranks % ep_size != 0:
        raise ValueError(f"ep_size ({ep_size}) must divide the number of ranks ({num_ranks})")
    if ep_size % tp_size != 0:
        raise ValueError(f"expert_tp_size ({tp_size}) must divide ep_size ({ep_size})")
    return ep_size


def export(
    run: Annotated[Path, Argument(help="Output folder of halley train.")],
    output: Annotated[
        Path, Option(help="Folder for the exported files; it must be empty or not exist.")
    ],
) -> int:
    """Write the newest checkpoint of a run as safetensors with Hugging Face's tensor names.

    Supported model families: mixtral, qwen2_moe, qwen3_moe and olmoe. Runs in one process.
    """
    from halley.train.hf_export import export_run

    written = export_run(run, output)
    typer.echo(json.dumps({"output": str(output)} | dataclasses.asdict(written)))
    return 0


def trace(
    config: ConfigOption = None,
    overrides: SetOption = None,
    strategies: StrategiesOption = "sequential,chunked",
    steps: Annotated[int, Option(help="Timed steps of each strategy.")] = 11,
    output: Annotated[
        Path | None,
        Option(
            help="Folder for the traces and the chart; default: trace/ in the output folder of the "
            "configuration."
        ),
    ] = None,
    data: Annotated[
        str | None, Option(help="Text file or folder to train on; default as for train.")
    ] = None,
    nproc: NprocOption = 0,
) -> int:
    """Profile training steps with each strategy, and draw one step of each.

    Prints a table with the time of each part of a step, then one JSON line. Writes one Chrome trace
    per strategy (open it in ui.perfetto.dev) and one chart of all strategies. Earlier traces and
    charts in the folder are replaced.
    """
    run_config = read_config(config, overrides, data=data)
    names = split_strategy_names(strategies)
    check_samples(steps, option="steps")
    for name in names:
        check_config(dataclasses.replace(run_config, strategy=name), nproc=nproc)
    folder = output or Path(run_config.output) / "trace"
    check_chart(folder / _PICTURE, option="output")
    paths = {name: folder / f"trace-{name}.json.gz" for name in names}
    for path in paths.values():
        check_replaceable(path, option="output", what="a trace of Halley's", start=b"\x1f\x8b")
    launch_ranks(nproc, device=run_config.device)

    with joined(run_config.device) as (world, _), step_progress(world) as on_progress:
        profiles = compare_strategies(
            run_config, names, world, num_steps=steps,
            on_progress=lambda done, total: on_progress("measuring steps", done, total),
        )  # fmt: skip
    if world.is_first:
        for name, path in paths.items():
            write_chrome_trace(profiles[name].spans, path)
        draw_timelines({name: each.spans for name, each in profiles.items()}, folder / _PICTURE)
        parts_us = {name: {EXPOSED: None, **each.parts_us} for name, each in profiles.items()}
        Console().print(_step_table(parts_us))
        typer.echo(f"timelines: {folder / _PICTURE}")
        typer.echo(f"traces:    {folder}/trace-*.json.gz (ui.perfetto.dev opens them)")
        typer.echo(json.dumps(parts_us))
    return 0


def _step_table(profiles: Mapping[str, Mapping[str, float | None]]) -> Table:
    table = Table(title="A training step by part: mean of ranks, median of steps, ms")
    table.add_column("part")
    for name in profiles:
        table.add_column(name, justify="right")
    for part, text in _PARTS.items():
        if any(part in parts_us for parts_us in profiles.values()):
            cells = [format_ms(parts_us.get(part, 0.0)) for parts_us in profiles.values()]
            table.add_row(text, *cells, style="red" if part.endswith(".wait") else None)
    table.add_section()
    for part, text in ((STEP, "whole step"), (EXPOSED, "exposed communication")):
        table.add_row(text, *(format_ms(p[part]) for p in profiles.values()), style="bold")
    steps_us = [to_float(parts_us[STEP]) for parts_us in profiles.values()]
    table.add_row("speed", *(f"{steps_us[0] / us:.2f}x" for us in steps_us), style="bold")
    return table
