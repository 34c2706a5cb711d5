"""``halley plan layout``: compare ways to spread a model's experts over a cluster."""

import dataclasses
import json
import math
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from halley.cli.checks import MAX_PLANNED_RANKS, check_range
from halley.core.models import find_model
from halley.cost.hardware import find_hardware


_NUM_SHOWN = 12  # rows of the table


def layout(
    model: Annotated[str, Option(help="Name, config.json or sizes (E=8,K=2,D=64,F=128).")],
    nodes: Annotated[int, Option(help="Nodes of the cluster.")],
    ranks_per_node: Annotated[int, Option(help="GPUs of a node.")] = 8,
    device: Annotated[
        str, Option(help="GPU of the cluster; Halley must know its rates.")
    ] = "NVIDIA H100",
    network: Annotated[
        float, Option(help="Bandwidth of the network out of each GPU, in GB/s.")
    ] = 50.0,
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
    from halley.planner.cluster import Cluster, describe, explain, plan_layouts

    config, hardware = find_model(model), find_hardware(device)
    check_range(nodes, 1, MAX_PLANNED_RANKS, option="nodes")
    check_range(ranks_per_node, 1, MAX_PLANNED_RANKS // nodes, option="ranks_per_node")
    check_range(tokens, 1, 2**24, option="tokens")
    check_range(microbatches, 1, 2**16, option="microbatches")
    if not 0.001 <= network < math.inf:
        raise ValueError(f"network ({network:g}) must be at least 0.001 GB/s and finite")
    hardware = dataclasses.replace(hardware, network_bytes_per_s=network * 1e9)
    cluster = Cluster(hardware=hardware, num_nodes=nodes, ranks_per_node=ranks_per_node)
    options = {"num_tokens": tokens, "num_microbatches": microbatches}
    layouts = plan_layouts(config, cluster, **options)
    title = f"{model} on {nodes} x {ranks_per_node} {device}, {network:g} GB/s, {tokens:,} tokens"
    table = Table("layout", title=title, caption="predicted; ms of one layer, GB of all experts")
    for name in ("layer", "computes", "exposed", "reduces", "GB a GPU", "fits"):
        table.add_column(name, justify="right")
    for each in layouts[:_NUM_SHOWN]:
        times = (each.layer_us, each.compute_us, each.exposed_us, each.reduce_us)
        cells = [f"{us / 1e3:.2f}" for us in times]
        fits = "yes" if each.fits else "no"
        table.add_row(describe(each), *cells, f"{each.expert_bytes / 1e9:,.1f}", fits)
    console = Console(stderr=True)
    console.print(table)
    console.print(explain(layouts), highlight=False, soft_wrap=True)
    for each in layouts:
        typer.echo(json.dumps(dataclasses.asdict(each)))
    return 0
