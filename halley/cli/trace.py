"""``halley trace``: profile training steps and show the time of each part of a step."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from halley.cli.bench import StrategiesOption, split_strategy_names
from halley.cli.checks import check_chart, check_replaceable, check_samples
from halley.cli.ranks import NprocOption, joined, launch_ranks
from halley.cli.result_rows import format_ms, step_progress, to_float
from halley.cli.train import ConfigOption, SetOption, check_config, read_config
from halley.core.timeline import write_chrome_trace
from halley.tools.timeline_chart import draw_timelines
from halley.train.compare import EXPOSED, OTHER, STEP, StepProfile, compare_strategies


_PICTURE = "timeline.png"
# The parts of a step, in the order in which they run.
_PARTS = {
    "attention": "attention with its norm",
    "ffn": "routers, norms, shared experts",
    "route": "sort, counts, gather of tokens",
    "route.wait": "wait: counts of all ranks",
    "dispatch.wait": "wait: dispatch",
    "experts": "experts",
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


def trace(
    config: ConfigOption = None,
    overrides: SetOption = None,
    strategies: StrategiesOption = "sequential,chunked",
    steps: Annotated[int, typer.Option(help="Timed steps of each strategy.")] = 11,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the traces and the chart; default: trace/ in the output folder of the "
            "configuration."
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Text file or folder to train on; default as for train.")
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
    """Return a table of the time of each part of a step, one column per strategy.

    Args:
        profiles: for each strategy, the microseconds of each part; None for an unknown time. The
            row "speed" is relative to the first strategy.
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
