"""``halley plan balance``: plan which experts each rank holds, from counted tokens per expert."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from halley.cli.checks import MAX_PLANNED_RANKS, check_range, check_replaceable
from halley.core.config import ModelConfig
from halley.core.models import find_model
from halley.core.placement import ExpertPlacement, read_counts, save_placements
from halley.planner.expert_balance import max_over_mean, plan_placement, rank_loads


def balance(
    counts: Annotated[
        Path,
        Argument(
            help="The file counts.json that halley train writes: a JSON list with one list per "
            "layer, which holds the number of tokens of each expert."
        ),
    ],
    ranks: Annotated[int, Option(help="Ranks that share the experts (ep_size of the run).")],
    output: Annotated[Path, Option(help="File for the placement; replaces an earlier one.")],
    spare: Annotated[int, Option(help="Most experts a rank may hold beyond an even share.")] = 1,
    model: Annotated[
        str | None,
        Option(help="Name of the model, to print the memory that the spare experts need."),
    ] = None,
) -> int:
    """Plan which experts each rank holds, some of them on several ranks; write the plan to a file.

    Prints the load of each rank in percent of the mean, without and with the placement, then one
    JSON line. `halley train --set placement=FILE` uses the placement.
    """
    counts_ME = read_counts(counts)
    num_experts = len(counts_ME[0])
    priced = None if model is None else find_model(model)
    if priced is not None and priced.moe.num_experts != num_experts:
        rule = f"have the experts of the counts ({num_experts})"
        raise ValueError(f"model ({priced.name}) must {rule} and has {priced.moe.num_experts}")
    check_range(ranks, 1, MAX_PLANNED_RANKS, option="ranks")
    what = "a placement of halley plan balance"
    check_replaceable(output, option="output", what=what, start=b"{", inside=b'"num_experts": ')
    placements = [plan_placement(each, num_ranks=ranks, spare=spare) for each in counts_ME]
    save_placements(output, placements)
    table, summary = _compare_loads(counts_ME, placements, num_ranks=ranks, model=priced)
    Console(stderr=True).print(table)
    typer.echo(json.dumps(summary | {"output": str(output)}))
    return 0


def _compare_loads(
    counts_ME: Sequence[Sequence[float]],
    placements: Sequence[ExpertPlacement],
    *,
    num_ranks: int,
    model: ModelConfig | None,
) -> tuple[Table, dict[str, object]]:
    num_experts = len(counts_ME[0])
    before_MW: list[list[float]] = []  # stays empty unless W divides E
    if num_experts % num_ranks == 0:
        plain = ExpertPlacement.plain(num_experts, num_ranks=num_ranks)
        before_MW = [rank_loads(plain, counts_E) for counts_E in counts_ME]
    pairs = zip(placements, counts_ME, strict=True)
    after_MW = [rank_loads(placement, counts_E) for placement, counts_E in pairs]
    fewest = -(-num_experts // num_ranks)
    spare_M = [placement.num_local - fewest for placement in placements]
    num_spare, num_bytes = sum(spare_M), None
    caption = f"{num_spare} spare experts a rank in {len(placements)} layers"
    if model is not None:
        num_bytes = num_spare * _expert_bytes(model)
        caption += f": {num_bytes / 2**20:,.0f} MiB of weights in bfloat16"
    table = Table(title="load of each rank, % of the mean", caption=caption)
    for name in ("layer", "before", "max / mean", "after", "max / mean", "spare"):
        table.add_column(name, justify="left" if name in ("before", "after") else "right")
    keys = ("max_over_mean_before", "max_over_mean_after", "spare_experts_per_rank")
    layers: list[dict[str, object]] = []
    for index, (after, spare) in enumerate(zip(after_MW, spare_M, strict=True)):
        before = before_MW[index] if before_MW else None
        ratios = [loads and max_over_mean(loads) for loads in (before, after)]
        cells = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        table.add_row(
            str(index), _percents(before), cells[0], _percents(after), cells[1], str(spare)
        )
        layers.append(dict(zip(keys, (*ratios, spare), strict=True)))
    overall = (_overall(before_MW), _overall(after_MW), num_spare)
    summary = dict(zip(keys, overall, strict=True))
    return table, {**summary, "spare_bytes_per_rank": num_bytes, "layers": layers}


def _expert_bytes(config: ModelConfig) -> int:
    """Return the bytes of the weights and biases of one expert in bfloat16."""
    moe = config.moe
    up_size = moe.intermediate_size * (2 if moe.activation == "swiglu" else 1)
    num_weights = (up_size + moe.intermediate_size) * config.hidden_size
    num_biases = up_size + config.hidden_size if moe.expert_bias else 0
    return 2 * (num_weights + num_biases)


def _overall(loads_MW: Sequence[Sequence[float]]) -> float | None:
    """Return (sum of layers' largest rank loads) / (sum of mean loads); None without loads."""
    if not loads_MW:
        return None
    total = math.fsum(math.fsum(loads) for loads in loads_MW)
    return sum(max(loads) for loads in loads_MW) * len(loads_MW[0]) / total


def _percents(loads: Sequence[float] | None) -> str:
    if loads is None:
        return ""
    mean = math.fsum(loads) / len(loads)
    return " ".join(f"{100 * load / mean:.0f}" for load in loads)
