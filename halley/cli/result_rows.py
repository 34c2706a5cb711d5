"""Save and print the result lines of a benchmark, and show its progress."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as ProgressBar
from rich.table import Table

from halley.cli.checks import check_package, check_replaceable, is_chart
from halley.distributed.mesh import World
from halley.tools.results import Row, machine_name, results_path, write_rows
from halley.tools.timer import Progress


_LINE_INTERVAL_S = 10.0


def check_output(
    output: Path | None, *, case: str, device: torch.device, num_ranks: int, has_chart: bool
) -> None:
    """Check that result lines, and the chart if there is one, can be written into a folder.

    Args:
        output: the folder; None to write no file.
        case: the value of the key "case" of the lines, which is also the name of the file.
        device, num_ranks: name the subfolder.
        has_chart: whether the benchmark also draws a chart.

    Raises:
        ValueError: the folder is not writable, a file in it is not of Halley, or matplotlib is
            missing.
    """
    if output is None:
        return
    if has_chart:
        check_package("matplotlib", extra="plot", option=f"output ({output})")
    path = results_path(output, {"gpu": machine_name(device), "num_gpus": num_ranks, "case": case})
    check_replaceable(path, option="output", is_own=_is_row, what="result lines of halley bench")
    if has_chart:
        picture = path.with_suffix(".png")
        check_replaceable(picture, option="output", is_own=is_chart, what="a chart of Halley's")


@contextmanager
def saved_rows(world: World, output: Path | None) -> Iterator[Callable[[list[Row]], None]]:
    """Yield a function that saves the result lines so far, so that an interrupt loses one case.

    Without a folder, the lines are printed if an error or an interrupt ends the block.

    Args:
        world: only its first rank writes and prints.
        output: folder of the results of all machines; None to write no file.
    """
    rows: list[Row] = []

    def save(found: list[Row]) -> None:
        rows[:] = found
        if output is not None and world.is_first and found:
            write_rows(found, output)

    try:
        yield save
    except BaseException:
        if output is None and world.is_first:
            for row in rows:
                typer.echo(json.dumps(row))
        raise


def print_rows(table: Table, rows: list[Row], *, width: int = 140) -> None:
    """Print a table of result lines, then the lines as JSON.

    Args:
        table: the same lines for people.
        rows: the result lines.
        width: characters per line of the table if standard output is not a terminal.
    """
    Console(width=None if Console().is_terminal else width).print(table)
    for row in rows:
        typer.echo(json.dumps(row))


def layer_table(rows: list[Row]) -> Table:
    """Return a table of result lines of the layer benchmark, with times in microseconds."""
    gpu, count = rows[0]["gpu"], rows[0]["num_gpus"]
    table = Table(
        title=f"MoE layer on {count} x {gpu}: slowest rank, us",
        caption="routing +N: placed experts, N spare per rank; /N: N ranks share an expert; "
        "floor: lower bound (GEMMs or wire alone); hidden: (unfused - fused) / wire; "
        "error: of the worst tensor; = same bits",
    )
    for name in ("model", "tokens", "routing", "pass", "strategy"):
        table.add_column(name, no_wrap=True)
    for name in ("median", "p90", "floor", "/ floor", "exposed", "hidden", "MiB", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        median, bound = row["median_us"], row["floor_us"]
        table.add_row(
            str(row["model"]),
            str(row["num_tokens"]),
            _routing(row),
            "fwd" if row["direction"] == "forward" else "fwd+bwd",
            f"{row['strategy']} {row['setting'] or ''}".strip(),
            format_number(median) if median else "[red]wrong",
            format_number(row["p90_us"]),
            format_number(bound),
            f"{to_float(median) / to_float(bound):.2f}" if median else "",
            format_number(row["exposed_comm_us"]),
            "" if row.get("hidden") is None else f"{to_float(row['hidden']):.0%}",
            format_number(row["peak_mib"]),
            f"{to_float(row['max_rel_err']):.0e}" + ("=" if row["bit_equal"] else " "),
        )
    return table


def _routing(row: Row) -> str:
    """Return the load, spare experts and ranks per expert, for example "zipf:1.2 +1 /2"."""
    placed = "" if row.get("spare") is None else f" +{row['spare']}"
    shared = "" if row["tp_size"] == 1 else f" /{row['tp_size']}"
    return f"{row['skew']}{placed}{shared}"


def format_ms(duration_us: object) -> str:
    """Return microseconds as milliseconds with two digits; "" for None."""
    return "" if duration_us is None else f"{to_float(duration_us) / 1e3:.2f}"


def format_number(value: object) -> str:
    """Return a number without decimals, with commas between thousands; "" for None."""
    return "" if value is None else f"{to_float(value):,.0f}"


def to_float(value: object) -> float:
    """Return a value of a result line as a float; it must be a number."""
    assert isinstance(value, int | float)
    return float(value)


def _is_row(head: bytes) -> bool:
    return head.startswith(b"{") and b'"case": ' in head


@contextmanager
def step_progress(world: World) -> Iterator[Progress]:
    """Show the progress of the first rank as ``shown_progress`` does; ignore the other ranks."""
    if not world.is_first:
        yield lambda text, done, total: None
        return
    with shown_progress() as update:
        yield update


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Yield a function that shows a text, the steps done and the total; a total of 0 is unknown.

    Only calls of that function redraw the bar, between samples. A thread that redraws it would hold
    the global interpreter lock while a sample is timed.
    """
    console = Console(stderr=True)
    if not console.is_interactive:  # a file, a pipe or a terminal that cannot move its cursor
        yield line_progress()
        return
    with ProgressBar(console=console, transient=True, auto_refresh=False) as progress:
        bar = progress.add_task("", total=None)

        def update(text: str, done: int, total: int) -> None:
            size = total or None
            progress.update(bar, description=escape(text), completed=done, total=size, refresh=True)

        yield update


def line_progress(now_s: Callable[[], float] = time.monotonic) -> Progress:
    """Return a function that prints each new text at once, and a repeated one every ten seconds.

    Args:
        now_s: the clock, in seconds.
    """
    texts: set[str] = set()
    next_s = 0.0

    def update(text: str, done: int, total: int) -> None:
        nonlocal next_s
        if text in texts and now_s() < next_s:
            return
        texts.add(text)
        next_s = now_s() + _LINE_INTERVAL_S
        share = f" ({done} of {total})" if total else ""
        sys.stderr.write(f"halley: {text}{share}\n")
        sys.stderr.flush()

    return update
