"""Tables for people: how measurements and parts of a step look on a terminal."""

from collections.abc import Mapping

from rich.table import Table

from halley.tools.results import Row
from halley.train.compare import EXPOSED, OTHER, STEP


# What each part of a step holds, in the order in which it runs.
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


def layer_table(rows: list[Row]) -> Table:
    """Return the result lines of the layer benchmark, one row each, times in microseconds."""
    gpu, count = rows[0]["gpu"], rows[0]["num_gpus"]
    table = Table(
        title=f"MoE layer on {count} x {gpu}: slowest rank, us",
        caption="routing +N: experts placed by it, N spare a rank; /N: ranks an expert; floor: the "
        "bare GEMMs or the wire; hidden: gained over unfused, of the wire's time; error: of the "
        "worst tensor; = same bits",
    )
    for name in ("model", "tokens", "routing", "pass", "strategy"):
        table.add_column(name, no_wrap=True)
    for name in ("median", "p90", "floor", "/ floor", "exposed", "hidden", "MiB", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        setting = f" {row['setting']}" if row["setting"] else ""
        median, floor = row["median_us"], row["floor_us"]
        table.add_row(
            str(row["model"]),
            str(row["num_tokens"]),
            _routing(row),
            "fwd" if row["direction"] == "forward" else "fwd+bwd",
            f"{row['strategy']}{setting}",
            _number(median) if median else "[red]wrong",
            _number(row["p90_us"]),
            _number(floor),
            f"{_float(median) / _float(floor):.2f}" if median else "",
            _number(row["exposed_comm_us"]),
            "" if row.get("hidden") is None else f"{_float(row['hidden']):.0%}",
            _number(row["peak_mib"]),
            f"{_float(row['max_rel_err']):.0e}" + ("=" if row["bit_equal"] else " "),
        )
    return table


def _routing(row: Row) -> str:
    """Return the load of a layer, and how experts and links differ from the plain ones."""
    placed = "" if row.get("spare") is None else f" +{row['spare']}"
    shared = "" if row["tp_size"] == 1 else f" /{row['tp_size']}"
    link = f" {row['link_gb_per_s']:g} GB/s" if row.get("link_gb_per_s") else ""
    return f"{row['skew']}{placed}{shared}{link}"


def model_table(rows: list[Row]) -> Table:
    """Return the result lines of the model benchmark, one row each, times in milliseconds.

    Speed is relative to the first strategy of the same model, layers and tokens.
    """
    gpu, count = rows[0]["gpu"], rows[0]["num_gpus"]
    table = Table(
        title=f"Training step on {count} x {gpu}: slowest rank, ms",
        caption="floor: the MoE layers' bare GEMMs or wire; error: of loss and gradient norms",
    )
    for name in ("model", "layers", "tokens", "strategy"):
        table.add_column(name, no_wrap=True)
    has_mfu = any(row["mfu"] is not None for row in rows)  # not on CPUs
    names = ["median", "p90", "speed", "floor", "exposed", "tokens/s", "MiB", "error"]
    names[6:6] = ["MFU"] if has_mfu else []
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    firsts: dict[object, object] = {}
    for row in rows:
        setting = f" {row['setting']}" if row["setting"] else ""
        median, mfu = row["median_us"], row["mfu"]
        first = firsts.setdefault((row["model"], row["num_layers"], row["num_tokens"]), median)
        table.add_row(
            str(row["model"]),
            str(row["num_layers"]),
            str(row["num_tokens"]),
            f"{row['strategy']}{setting}",
            _ms(median) if median else "[red]wrong",
            _ms(row["p90_us"]),
            f"{_float(first) / _float(median):.2f}x" if median and first else "",
            _ms(row["floor_us"]),
            _ms(row["exposed_comm_us"]),
            _number(row["tokens_per_s"]),
            *(["" if mfu is None else f"{_float(mfu):.1%}"] if has_mfu else []),
            _number(row["peak_mib"]),
            f"{_float(row['max_rel_err']):.0e}",
        )
    return table


def graph_table(rows: list[Row]) -> Table:
    """Return the result lines of the benchmark of graphs, one row each, times in milliseconds."""
    first = rows[0]
    slow = "" if first["slow_link"] == "none" else f" ({first['slow_link']})"
    table = Table(
        title=f"Forward and backward on {first['num_gpus']} x {first['gpu']}: slowest rank, ms; "
        f"all-to-all {_float(first['link_gb_per_s']):.1f} GB/s{slow}",
        caption="speed: against the faster of sequential and none; predicted: its ratio to "
        "measured; planned: seconds of the passes, with measuring and without; MiB: ratio to none; "
        "error: against none, of the worst of loss and gradients; = same bits",
    )
    for name in ("model", "variant", "inner"):
        table.add_column(name, no_wrap=True)
    names = ("median", "p90", "speed", "exposed", "comm", "predicted", "compiled", "planned")
    for name in (*names, "MiB", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_graph_cells(row))
    return table


def _graph_cells(row: Row) -> list[str]:
    variant = f"{row['variant']} {row['setting'] or ''}".strip()
    cells = [str(row["model"]), variant, str(row["inner"] or "")]
    if not row["median_us"]:
        return [*cells, "[red]failed"]
    parts = "" if row["optimise_s"] is None else f"{row['optimise_s']} / {row['plan_s']}"
    ratio = row["predicted_over_measured"]
    return [
        *cells,
        _ms(row["median_us"]),
        _ms(row["p90_us"]),
        f"{_float(row['speedup']):.3f}x" if row["speedup"] else "",
        _ms(row["exposed_comm_us"]),
        _ms(row["comm_us"]),
        "" if ratio is None else f"{_float(ratio):.3f}",
        f"{_float(row['compile_s']):.1f}",
        parts,
        "" if row["peak_over_none"] is None else f"{_float(row['peak_over_none']):.3f}",
        f"{_float(row['max_rel_err']):.0e}" + ("=" if row["bit_equal"] else " "),
    ]


def step_table(profiles: Mapping[str, Mapping[str, float | None]]) -> Table:
    """Return a step's time by part, one column a strategy, in milliseconds.

    Args:
        profiles: ``StepProfile.parts_us`` by strategy, None for what is unknown; speed is relative
            to the first.
    """
    table = Table(title="A training step by part: mean of ranks, median of steps, ms")
    table.add_column("part")
    for name in profiles:
        table.add_column(name, justify="right")
    for part, text in _PARTS.items():
        if any(part in parts_us for parts_us in profiles.values()):
            cells = [_ms(parts_us.get(part, 0.0)) for parts_us in profiles.values()]
            table.add_row(text, *cells, style="red" if part.endswith(".wait") else None)
    table.add_section()
    for part, text in ((STEP, "whole step"), (EXPOSED, "exposed communication")):
        table.add_row(text, *(_ms(p[part]) for p in profiles.values()), style="bold")
    steps_us = [_float(parts_us[STEP]) for parts_us in profiles.values()]
    table.add_row("speed", *(f"{steps_us[0] / us:.2f}x" for us in steps_us), style="bold")
    return table


def _ms(duration_us: object) -> str:
    return "" if duration_us is None else f"{_float(duration_us) / 1e3:.2f}"


def _number(value: object) -> str:
    return "" if value is None else f"{_float(value):,.0f}"


def _float(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
