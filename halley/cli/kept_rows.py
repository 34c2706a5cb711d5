"""Keep result lines as they are measured, so that an interrupt loses no more than one case."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import typer

from halley.cli.checks import check_package
from halley.cli.path_checks import check_replaceable, is_chart
from halley.distributed.world import World
from halley.tools.results import Row, machine_name, results_path, write_rows


def check_output(
    output: Path | None, *, case: str, device: torch.device, num_ranks: int, has_chart: bool
) -> None:
    """Check that result lines, and a chart if there is one, can be written into a folder.

    Args:
        output: the folder; None for no files.
        case: name of the lines.
        device, num_ranks: where they are measured, which names the folder below.

    Raises:
        ValueError: the folder is not writable, a file there holds something else than such lines
            or such a chart, or there is no matplotlib for it.
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
def kept_rows(world: World, output: Path | None) -> Iterator[Callable[[list[Row]], None]]:
    """Yield the function that takes all lines so far; each call writes them to the file.

    Without a folder they are printed where the work is cut short, by an error or an interrupt.

    Args:
        world: the first rank writes.
        output: folder of the results of all machines.
    """
    rows: list[Row] = []

    def keep(found: list[Row]) -> None:
        rows[:] = found
        if output is not None and world.is_first and found:
            write_rows(found, output)

    try:
        yield keep
    except BaseException:
        if output is None and world.is_first:
            for row in rows:
                typer.echo(json.dumps(row))
        raise


def _is_row(head: bytes) -> bool:
    return head.startswith(b"{") and b'"case": ' in head
