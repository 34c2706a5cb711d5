"""``halley trace``: where the time of a training step goes."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from halley.cli.bars import step_progress
from halley.cli.checks import check_package, check_samples, split_names
from halley.cli.path_checks import check_picture, check_replaceable
from halley.cli.ranks import hand_to_ranks, joined
from halley.cli.tables import step_table
from halley.cli.train import ConfigOption, NprocOption, SetOption, check_config, read_config
from halley.core.timeline import write_chrome_trace
from halley.strategies.registry import check_strategy
from halley.tools.charts import draw_timelines
from halley.train.compare import EXPOSED, StepProfile, compare_strategies


_PICTURE = "timeline.png"


def trace(
    config: ConfigOption = None,
    overrides: SetOption = None,
    strategies: Annotated[str, typer.Option(help="Strategies to compare.")] = "sequential,chunked",
    steps: Annotated[int, typer.Option(help="Counted steps of each strategy.")] = 11,
    output: Annotated[Path | None, typer.Option(help="Folder; default <output>/trace.")] = None,
    data: Annotated[str | None, typer.Option(help="A file or folder of text.")] = None,
    nproc: NprocOption = 0,
) -> int:
    """Profile training steps with each strategy and draw one of them.

    Prints a table of a step's time by part, then one JSON line; writes a Chrome trace for each
    strategy (open it in Perfetto) and one picture of all, in place of earlier ones.
    """
    run_config = read_config(config, overrides, data=data)
    names = split_names(strategies, option="strategies")
    check_samples(steps, option="steps")
    for name in names:
        check_strategy(name)
        check_config(dataclasses.replace(run_config, strategy=name), nproc=nproc)
    check_package("matplotlib", extra="plot", option="halley trace")
    folder = output or Path(run_config.output) / "trace"
    check_picture(folder / _PICTURE, option="output")
    for name in names:
        path = folder / _trace_name(name)
        check_replaceable(path, option="output", is_own=_is_gzip, what="a trace of Halley's")
    code = hand_to_ranks(nproc, device=run_config.device)
    if code is not None:
        return code

    with joined(run_config.device) as (world, _):
        with step_progress(world) as on_progress:
            profiles = compare_strategies(
                run_config,
                names,
                world,
                num_steps=steps,
                on_progress=lambda done, total: on_progress("measuring steps", done, total),
            )
        if world.is_first:
            _write(profiles, folder)
            parts_us = {name: {EXPOSED: None, **each.parts_us} for name, each in profiles.items()}
            Console().print(step_table(parts_us))
            typer.echo(f"timelines: {folder / _PICTURE}")
            typer.echo(f"traces:    {folder}/trace-*.json.gz (ui.perfetto.dev opens them)")
            typer.echo(json.dumps(parts_us))
    return 0


def _write(profiles: dict[str, StepProfile], folder: Path) -> None:
    for name, profile in profiles.items():
        write_chrome_trace(profile.spans, folder / _trace_name(name))
    draw_timelines({name: p.spans for name, p in profiles.items()}, folder / _PICTURE)


def _trace_name(strategy: str) -> str:
    return f"trace-{strategy}.json.gz"


def _is_gzip(head: bytes) -> bool:
    return head.startswith(b"\x1f\x8b")
