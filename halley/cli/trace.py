"""``halley trace``: profile training steps and show how long each part of a step takes."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from halley.cli.checks import (
    check_package,
    check_picture,
    check_replaceable,
    check_samples,
    split_names,
)
from halley.cli.ranks import joined, launch_ranks
from halley.cli.result_rows import format_ms, step_progress, to_float
from halley.cli.train import ConfigOption, NprocOption, SetOption, check_config, read_config
from halley.core.timeline import write_chrome_trace
from halley.strategies.registry import check_strategy
from halley.tools.timeline_chart import draw_timelines
from halley.train.compare import EXPOSED, OTHER, STEP, StepProfile, compare_strategies


_PICTURE = "timeline.png"
# The parts of a step, in the order in which they run.
_PARTS = {
    "attention": "attention with its norm",
    "ffn": "routers, norms, shared experts",
    "route": "sort, counts, gather of tokens",
    "route.wait": "wait: counts of all ranks",
    "dispatch.wait": "wait: tokens to their experts",
    "experts": "experts",
    "combine.wait": "wait: results back",
    "restore": "weighted sum",
    "forward": "embedding and head",
    "loss": "loss",
    "backward": "backward",
    "combine.backward.wait": "wait: gradients to the experts",
    "dispatch.backward.wait": "wait: gradients back",
    "replicas.wait": "wait: gradients of replicas",
    "gradients.wait": "wait: sum of gradients",
    "optimizer": "clipping and optimizer",
    OTHER: "other",
}


def trace(
    config: ConfigOption = None,
    overrides: SetOption = None,
    strategies: Annotated[
        str, typer.Option(help="Strategies to compare, comma-separated.")
    ] = "sequential,chunked",
    steps: Annotated[int, typer.Option(help="Timed steps of each strategy.")] = 11,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for traces and picture; default: trace/ in the run's output."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="File or folder of text; default as for halley train.")
    ] = None,
    nproc: NprocOption = 0,
) -> int:
    """Profile training steps with each strategy, and draw one step of each.

    Prints a table of the time of each part of a step, then one JSON line. Writes one Chrome trace
    per strategy (for ui.perfetto.dev) and one picture of all. Replaces earlier ones.
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
    code = launch_ranks(nproc, device=run_config.device)
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
            Console().print(_step_table(parts_us))
            typer.echo(f"timelines: {folder / _PICTURE}")
            typer.echo(f"traces:    {folder}/trace-*.json.gz (ui.perfetto.dev opens them)")
            typer.echo(json.dumps(parts_us))
    return 0


def _step_table(profiles: Mapping[str, Mapping[str, float | None]]) -> Table:
    """Return the time of each part of a step in milliseconds, one column per strategy.

    Args:
        profiles: ``StepProfile.parts_us`` by strategy, with None for an unknown time. The row
            "speed" is relative to the first strategy.
    """
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


def _write(profiles: dict[str, StepProfile], folder: Path) -> None:
    for name, profile in profiles.items():
        write_chrome_trace(profile.spans, folder / _trace_name(name))
    draw_timelines({name: p.spans for name, p in profiles.items()}, folder / _PICTURE)


def _trace_name(strategy: str) -> str:
    return f"trace-{strategy}.json.gz"


def _is_gzip(head: bytes) -> bool:
    return head.startswith(b"\x1f\x8b")
