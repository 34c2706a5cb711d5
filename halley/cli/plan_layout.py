"""``halley plan layout``: compare ways to spread a model over a cluster."""

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from halley.cli.checks import MAX_PLANNED_RANKS, check_range
from halley.core.models import find_model
from halley.core.validation import check_choice
from halley.cost.hardware import KNOWN, find_hardware


if TYPE_CHECKING:
    from halley.planner.cluster import Layout

_NUM_SHOWN, _NUM_TOO_LARGE = 12, 3  # rows of the table, and more of layouts that do not fit


_DeviceOption = Annotated[
    str, Option(help=f"GPU of the cluster: {', '.join(each.name.split()[-1] for each in KNOWN)}.")
]
_WhatIfOption = Annotated[
    list[str] | None,
    Option(
        help="Compare with another cluster: link=GB/s out of a GPU inside a node, or network=GB/s. "
        "May be given several times."
    ),
]
_ShardOption = Annotated[
    str,
    Option(
        help="States that copies of a weight divide among them: none (halley train), optimizer "
        "(ZeRO-1) or all (FSDP, ZeRO-3)."
    ),
]


def layout(
    model: Annotated[str, Option(help="Name, config.json or sizes (E=8,K=2,D=64,F=128).")],
    nodes: Annotated[int, Option(help="Nodes of the cluster.")],
    ranks_per_node: Annotated[int, Option(help="GPUs of a node.")] = 8,
    device: _DeviceOption = "H100",
    network: Annotated[
        float, Option(help="Bandwidth of the network out of each GPU, in GB/s.")
    ] = 50.0,
    what_if: _WhatIfOption = None,
    tokens: Annotated[int, Option(help="Tokens of a GPU in one microbatch.")] = 8192,
    microbatches: Annotated[int, Option(help="Microbatches of a step.")] = 1,
    seq_len: Annotated[int, Option(help="Tokens of a sequence.")] = 4096,
    shard: _ShardOption = "all",
) -> int:
    """Compare ways to spread a model over a cluster, by predicted time of a training step.

    A layout is a number of ranks that hold all experts, a strategy, and whether blocks are computed
    again in backward. Routing is balanced, weights are bfloat16, the optimizer is AdamW. Prints the
    fastest layouts, reasons, then one JSON line per layout.
    """
    # Imported here, because the planner imports Triton, which other commands do not need.
    from halley.moe.memory_estimate import Shard
    from halley.planner.cluster import Cluster, explain, plan_layouts

    config, hardware = find_model(model), find_hardware(device)
    check_range(nodes, 1, MAX_PLANNED_RANKS, option="nodes")
    check_range(ranks_per_node, 1, MAX_PLANNED_RANKS // nodes, option="ranks_per_node")
    check_range(tokens, 1, 2**24, option="tokens")
    check_range(microbatches, 1, 2**16, option="microbatches")
    check_range(seq_len, 1, 2**24, option="seq_len")
    check_choice(shard, get_args(Shard), name="shard")
    hardware = dataclasses.replace(hardware, network_bytes_per_s=_read_rate(network, "network"))
    changes = _read_changes(what_if or [])
    options: dict[str, Any] = {"num_tokens": tokens, "num_microbatches": microbatches}
    options |= {"seq_len": seq_len, "shard": shard}

    def plan(changes: dict[str, float]) -> "list[Layout]":
        changed = dataclasses.replace(hardware, **changes)
        cluster = Cluster(hardware=changed, num_nodes=nodes, ranks_per_node=ranks_per_node)
        return plan_layouts(config, cluster, **options)

    layouts = plan({})
    title = f"{model} on {nodes} x {ranks_per_node} {device}, {network:g} GB/s, {tokens:,} tokens"
    text = explain(layouts)
    if what_if:
        others = plan(changes)
        ratio = others[0].step_us / layouts[0].step_us
        text += f"\nWith {', '.join(what_if)} GB/s: {explain(others)}"
        text += f" The fastest layout then takes {ratio:.2f} times as long."
    _show(layouts, title=title, text=text)
    return 0


def _show(layouts: "list[Layout]", *, title: str, text: str) -> None:
    console = Console(stderr=True)
    too_large = [each for each in layouts[_NUM_SHOWN:] if not each.fits]
    console.print(_make_table(layouts[:_NUM_SHOWN] + too_large[:_NUM_TOO_LARGE], title=title))
    console.print(text, highlight=False, soft_wrap=True)
    for each in layouts:
        typer.echo(json.dumps(dataclasses.asdict(each)))


def _make_table(layouts: "list[Layout]", *, title: str) -> Table:
    from halley.planner.cluster import describe

    table = Table("layout", title=title, caption="predicted; ms of a step, GB of a GPU")
    names = ("copies", "step", "exposed", "%", "tokens/s a GPU")
    kinds = ("weights", "gradients", "optimizer", "saved", "buffers", "peak")
    for name in (*names, *kinds, "fits"):
        table.add_column(name, justify="right")
    for each in layouts:
        share = f"{100 * each.exposed_us / each.step_us:.0f}"
        times = [f"{us / 1e3:,.1f}" for us in (each.step_us, each.exposed_us)]
        sizes = [f"{getattr(each.memory, kind) / 1e9:,.1f}" for kind in kinds]
        cells = [f"{each.num_copies:,}", *times, share, f"{each.tokens_per_s:,.0f}", *sizes]
        table.add_row(describe(each), *cells, "yes" if each.fits else "no")
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
