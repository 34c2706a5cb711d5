"""``halley plan``: what would be done to hide communication, and what that would bring."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from halley.cli.balance import balance
from halley.cli.train import ConfigOption, SetOption, read_config
from halley.core.routing import local_experts
from halley.cost.hardware import Hardware, find_hardware


if TYPE_CHECKING:
    from halley.compiler import OrderReport

app = typer.Typer(help="Plan without ranks and without a GPU.", no_args_is_help=True)
app.command("balance")(balance)
_DIRECTIONS = ("forward", "backward")


@app.command()
def graph(
    config: ConfigOption = None,
    overrides: SetOption = None,
    passes: Annotated[str, typer.Option(help="wgrad, partition or both.")] = "both",
    ranks: Annotated[int, typer.Option(help="Ranks of the run.")] = 8,
    device: Annotated[str, typer.Option(help="A device with known figures.")] = "NVIDIA H200",
    link: Annotated[float, typer.Option(help="GB/s out of each device; 0 is the device's.")] = 0.0,
    num_parts: Annotated[int, typer.Option(help="Parts of the batch; 0 chooses.")] = 0,
    memory_margin: Annotated[float, typer.Option(help="How much memory may rise.")] = 0.02,
    explain: Annotated[bool, typer.Option(help="Say why ranges stay whole.")] = False,
) -> int:
    """Show what the compiler's passes do to a model's graphs, and the times they predict.

    Prints what runs behind each all-to-all and which ranges run in parts, then one JSON line.
    """
    # Only here: with torch's compiler comes Triton, before it is known how kernels are to run.
    from halley.perf.graph_plan import plan_graphs

    run_config = read_config(config, overrides)
    if passes not in ("wgrad", "partition", "both"):
        raise ValueError(f"passes ({passes}) must be one of wgrad, partition, both")
    if ranks < 2:
        raise ValueError(f"ranks ({ranks}) must be at least 2: one rank has no all-to-alls")
    ep_size = run_config.ep_size or ranks
    if ep_size < 2 or ranks % ep_size:
        raise ValueError(f"ep_size ({ep_size}) must divide the number of ranks ({ranks}), above 1")
    local_experts(run_config.model.moe.num_experts, ep_size=ep_size)
    reports = plan_graphs(
        run_config,
        passes=passes,
        num_ranks=ranks,
        hardware=_hardware(device, link),
        num_parts=num_parts,
        memory_margin=memory_margin,
    )
    console = Console(stderr=True)
    for direction, report in zip(_DIRECTIONS, reports, strict=False):
        console.print(_table(direction, report))
        if explain:
            for reason in report.skipped:
                console.print(f"- {reason}", highlight=False, soft_wrap=True)
    found = zip(_DIRECTIONS, map(dataclasses.asdict, reports), strict=False)
    typer.echo(json.dumps(dict(found)))
    return 0


def _hardware(device: str, link: float) -> Hardware:
    hardware = find_hardware(device)
    if link < 0.0:
        raise ValueError(f"link ({link}) must be positive, or 0 for the device's own")
    return dataclasses.replace(hardware, link_bytes_per_s=link * 1e9) if link else hardware


def _table(direction: str, report: "OrderReport") -> Table:
    """Return ranges in parts and what runs behind all-to-alls, times in milliseconds."""
    before, after = report.time_before, report.time_after
    table = Table(
        title=f"{direction}: {before.makespan_us / 1e3:.2f} ms -> {after.makespan_us / 1e3:.2f} ms",
        caption=(
            f"exposed communication {before.exposed_us / 1e3:.2f} ms -> "
            f"{after.exposed_us / 1e3:.2f} ms, predicted; live bytes "
            f"{report.peak_before / 2**20:,.0f} MiB -> {report.peak_after / 2**20:,.0f} MiB"
        ),
    )
    table.add_column("what", no_wrap=True)
    table.add_column("becomes")
    for each in report.ranges:
        gain = f"{each.before_us / 1e3:.2f} ms -> {each.after_us / 1e3:.2f} ms"
        table.add_row(f"{each.first} to {each.last}", f"{each.num_parts} parts, {gain}")
    for exchange, products in report.windows.items():
        table.add_row(exchange, f"behind it {', '.join(products) or 'no product'}")
    return table
