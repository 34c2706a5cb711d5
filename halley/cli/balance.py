"""``halley plan balance``: plan the experts that each rank holds, from the counted loads."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from halley.cli.checks import MAX_PLANNED_RANKS, check_range, check_replaceable
from halley.core.config import ModelConfig
from halley.core.models import find_model
from halley.core.placement import ExpertPlacement, read_counts, save_placements
from halley.planner.expert_balance import max_over_mean, plan_placement, rank_loads


_ITEMSIZE = 2  # bytes of a weight in bfloat16


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Loads of one layer.

    Attributes:
        before: load of each rank without a placement; None if the ranks do not divide the experts.
        after: load of each rank with the placement.
        num_spare: experts that each rank holds beyond an even share.
    """

    before: list[float] | None
    after: list[float]
    num_spare: int


def balance(
    counts: Annotated[
        Path,
        typer.Argument(
            help="The file counts.json that halley train writes: a JSON list with one list per "
            "layer, which holds the number of tokens of each expert."
        ),
    ],
    ranks: Annotated[int, typer.Option(help="Ranks that share the experts (ep_size of the run).")],
    output: Annotated[
        Path, typer.Option(help="File for the placement; an earlier placement is replaced.")
    ],
    spare: Annotated[
        int, typer.Option(help="Most experts that a rank may hold beyond an even share.")
    ] = 1,
    model: Annotated[
        str | None,
        typer.Option(help="Name of the model, to print the memory that the spare experts need."),
    ] = None,
) -> int:
    """Plan the experts that each rank holds, with replicas of the most loaded experts.

    Prints the load of each rank in percent of the mean, without and with the placement, then one
    JSON line. `halley train --set placement=FILE` uses the placement.
    """
    counts_ME = read_counts(counts)
    num_experts = len(counts_ME[0])
    priced = None if model is None else find_model(model)
    if priced is not None and priced.moe.num_experts != num_experts:
        raise ValueError(
            f"model ({priced.name}) must have the experts of the counts ({num_experts}) and has "
            f"{priced.moe.num_experts}"
        )
    check_range(ranks, 1, MAX_PLANNED_RANKS, option="ranks")
    check_replaceable(
        output, option="output", is_own=_is_placement, what="a placement of halley plan balance"
    )
    placements = [plan_placement(each, num_ranks=ranks, spare=spare) for each in counts_ME]
    save_placements(output, placements)
    fewest = -(-num_experts // ranks)
    layers = [
        _Layer(
            before=_plain_loads(counts_E, num_ranks=ranks),
            after=rank_loads(placement, counts_E),
            num_spare=placement.num_local - fewest,
        )
        for counts_E, placement in zip(counts_ME, placements, strict=True)
    ]
    num_bytes = None if priced is None else _expert_bytes(priced)
    Console(stderr=True).print(_table(layers, num_bytes=num_bytes))
    typer.echo(json.dumps(_summary(layers, num_bytes=num_bytes) | {"output": str(output)}))
    return 0


def _is_placement(head: bytes) -> bool:
    return head.startswith(b"{") and b'"num_experts": ' in head


def _plain_loads(counts_E: Sequence[float], *, num_ranks: int) -> list[float] | None:
    if len(counts_E) % num_ranks:
        return None
    return rank_loads(ExpertPlacement.plain(len(counts_E), num_ranks=num_ranks), counts_E)


def _expert_bytes(config: ModelConfig) -> int:
    """Return the bytes of the weights of one expert in bfloat16."""
    moe = config.moe
    up_size = moe.intermediate_size * (2 if moe.activation == "swiglu" else 1)
    num_weights = (up_size + moe.intermediate_size) * config.hidden_size
    num_biases = up_size + config.hidden_size if moe.expert_bias else 0
    return (num_weights + num_biases) * _ITEMSIZE


def _summary(layers: Sequence[_Layer], *, num_bytes: int | None) -> dict[str, object]:
    """Return the keys of the JSON line: figures of all layers together, and of each layer."""
    num_spare = sum(layer.num_spare for layer in layers)
    plain_loads = [layer.before for layer in layers if layer.before is not None]
    return {
        "max_over_mean_before": _overall(plain_loads) if plain_loads else None,
        "max_over_mean_after": _overall([layer.after for layer in layers]),
        "spare_experts_per_rank": num_spare,
        "spare_bytes_per_rank": None if num_bytes is None else num_spare * num_bytes,
        "layers": [
            {
                "max_over_mean_before": layer.before and max_over_mean(layer.before),
                "max_over_mean_after": max_over_mean(layer.after),
                "spare_experts_per_rank": layer.num_spare,
            }
            for layer in layers
        ],
    }


def _overall(loads_MW: Sequence[Sequence[float]]) -> float:
    """Return the sum over layers of the largest load, over the sum over layers of the mean."""
    total = math.fsum(math.fsum(loads) for loads in loads_MW)
    return sum(max(loads) for loads in loads_MW) * len(loads_MW[0]) / total


def _table(layers: Sequence[_Layer], *, num_bytes: int | None) -> Table:
    num_spare = sum(layer.num_spare for layer in layers)
    price = f"{num_spare} spare experts a rank in {len(layers)} layers"
    if num_bytes is not None:
        price += f": {num_spare * num_bytes / 2**20:,.0f} MiB of weights in bfloat16"
    table = Table(title="load of each rank, % of the mean", caption=price)
    for name in ("layer", "before", "max / mean", "after", "max / mean", "spare"):
        table.add_column(name, justify="left" if name in ("before", "after") else "right")
    for index, layer in enumerate(layers):
        table.add_row(
            str(index),
            "" if layer.before is None else _percents(layer.before),
            "" if layer.before is None else f"{max_over_mean(layer.before):.2f}",
            _percents(layer.after),
            f"{max_over_mean(layer.after):.2f}",
            str(layer.num_spare),
        )
    return table


def _percents(loads: Sequence[float]) -> str:
    mean = math.fsum(loads) / len(loads)
    return " ".join(f"{100 * load / mean:.0f}" for load in loads)
