"""``halley plan layout``: compare ways to spread a model's experts over a cluster."""

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from halley.cli.checks import MAX_PLANNED_RANKS, check_range
from halley.core.models import find_model
from halley.cost.hardware import KNOWN, find_hardware


if TYPE_CHECKING:
    from halley.planner.cluster import Layout

_NUM_SHOWN = 12  # rows of the table


def layout(
    model: Annotated[str, Option(help="Name, config.json or sizes (E=8,K=2,D=64,F=128).")],
    nodes: Annotated[int, Option(help="Nodes of the cluster.")],
    ranks_per_node: Annotated[int, Option(help="GPUs of a node.")] = 8,
    device: Annotated[
        str,
        Option(help=f"GPU of the cluster: {', '.join(each.name.split()[-1] for each in KNOWN)}."),
    ] = "H100",
    network: Annotated[
        float, Option(help="Bandwidth of the network out of each GPU, in GB/s.")
    ] = 50.0,
    what_if: Annotated[
        list[str] | None,
        Option(
            help="Compare with another cluster: link=GB/s out of a GPU inside a node, or "
            "network=GB/s. May be given several times."
        ),
    ] = None,
    tokens: Annotated[int, Option(help="Tokens of a GPU in one microbatch.")] = 8192,
    microbatches: Annotated[
        int, Option(help="Microbatches of a step, which reduces gradients once.")
    ] = 1,
) -> int:
    """Compare ways to spread a model's experts over a cluster, by predicted time of an MoE layer.

    A layer means forward and backward in bfloat16 with balanced routing, without attention and
    shared experts. Prints the fastest layouts, the reason, then one JSON line per layout.
    """
    # Imported here, because the planner imports Triton, which other commands do not need.
    from halley.planner.cluster import Cluster, explain, plan_layouts

    config, hardware = find_model(model), find_hardware(device)
    check_range(nodes, 1, MAX_PLANNED_RANKS, option="nodes")
    check_range(ranks_per_node, 1, MAX_PLANNED_RANKS // nodes, option="ranks_per_node")
    check_range(tokens, 1, 2**24, option="tokens")
    check_range(microbatches, 1, 2**16, option="microbatches")
    hardware = dataclasses.replace(hardware, network_bytes_per_s=_read_rate(network, "network"))
    changes = _read_changes(what_if or [])
    options = {"num_tokens": tokens, "num_microbatches": microbatches}

    def plan(changes: dict[str, float]) -> "list[Layout]":
        changed = dataclasses.replace(hardware, **changes)
        cluster = Cluster(hardware=changed, num_nodes=nodes, ranks_per_node=ranks_per_node)
        return plan_layouts(config, cluster, **options)

    layouts = plan({})
    console = Console(stderr=True)
    title = f"{model} on {nodes} x {ranks_per_node} {device}, {network:g} GB/s, {tokens:,} tokens"
    console.print(_make_table(layouts[:_NUM_SHOWN], title=title))
    console.print(explain(layouts), highlight=False, soft_wrap=True)
    if what_if:
        others = plan(changes)
        text = f"With {', '.join(what_if)} GB/s: {explain(others)}"
        ratio = others[0].layer_us / layouts[0].layer_us
        text += f" The fastest layout then takes {ratio:.2f} times as long."
        console.print(text, highlight=False, soft_wrap=True)
    for each in layouts:
        typer.echo(json.dumps(dataclasses.asdict(each)))
    return 0


def _make_table(layouts: "list[Layout]", *, title: str) -> Table:
    from halley.planner.cluster import describe

    table = Table("layout", title=title, caption="predicted; ms of one layer, GB of all experts")
    for name in ("layer", "computes", "exposed", "reduces", "GB a GPU", "fits"):
        table.add_column(name, justify="right")
    for each in layouts:
        times = (each.layer_us, each.compute_us, each.exposed_us, each.reduce_us)
        cells = [f"{us / 1e3:.2f}" for us in times]
        fits = "yes" if each.fits else "no"
        table.add_row(describe(each), *cells, f"{each.expert_bytes / 1e9:,.1f}", fits)
    return table


def _read_changes(texts: list[str]) -> dict[str, float]:
    """Return fields of ``Hardware`` and values in bytes/s, from texts such as "link=25" (GB/s)."""
    changes: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        field = f"{name}_bytes_per_s"
        if name not in ("link", "network") or field in changes:
            raise ValueError(f"what_if ({text}) must be link=GB/s or network=GB/s, each once")
        changes[field] = _read_rate(value, f"what_if {name}")
    return changes


def _read_rate(value: float | str, name: str) -> float:
    """Convert a rate from GB/s to bytes/s; ``ValueError`` below 0.001 GB/s or if not finite."""
    try:
        rate = float(value)
    except ValueError:
        rate = math.nan
    if not 0.001 <= rate < math.inf:
        shown = value if isinstance(value, str) else f"{value:g}"
        raise ValueError(f"{name} ({shown}) must be at least 0.001 GB/s and finite")
    return rate * 1e9
