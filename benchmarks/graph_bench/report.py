"""Show the results of the graph benchmark: a chart of exposed communication, and a table."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from halley.cli.bench import format_ms
from halley.tools.charts import LIGHT_GREY, new_figure
from halley.tools.timer import Row, to_float


_BLUE, _RED, _INK = "#0072B2", "#C1121F", "#222222"
_INCHES_PER_BAR = 0.34


def draw_graph_bench(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Draw horizontal bars of the step time, one panel per model and one bar per variant.

    Args:
        rows: result lines; lines without a time are ignored.
        path: the picture.

    Raises:
        ValueError: no line has a time.
    """
    panels: dict[str, list[Mapping[str, object]]] = {}
    for row in rows:
        if row["median_us"]:
            panels.setdefault(str(row["model"]), []).append(row)
    if not panels:
        raise ValueError(f"rows ({len(rows)}) must hold at least one time")
    heights = [len(lines) + 2 for lines in panels.values()]
    figure = new_figure(8.0, _INCHES_PER_BAR * sum(heights) + 0.6)
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (model, lines) in zip(grid, panels.items(), strict=True):
        exposed_ms = [_ms(line["exposed_comm_us"]) for line in lines]
        rest_ms = [
            max(_ms(line["median_us"]) - exposed, 0.0)
            for line, exposed in zip(lines, exposed_ms, strict=True)
        ]
        places = range(len(lines))
        axes.barh(places, rest_ms, color=_BLUE, label="the rest of the step")
        axes.barh(places, exposed_ms, left=rest_ms, color=_RED, label="exposed communication")
        for place, rest, exposed in zip(places, rest_ms, exposed_ms, strict=True):
            text = f" {rest + exposed:.1f}, {exposed:.1f} exposed"
            axes.text(rest + exposed, place, text, va="center", fontsize=8, color=_INK)
        axes.set_yticks(places, [_label(line) for line in lines], fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.25)
        axes.grid(axis="x", color=LIGHT_GREY, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.set_title(_title(model, lines[0]), fontsize=9, loc="left")
    bars, names = grid[0].get_legend_handles_labels()
    figure.legend(bars, names, loc="outside upper right", ncols=2, fontsize=8, frameon=False)
    grid[-1].set_xlabel("ms, forward and backward, slowest rank")
    figure.savefig(path, dpi=150)


def _label(row: Mapping[str, object]) -> str:
    words = [row["variant"], row["setting"], f"({row['inner']})" if row["inner"] else None]
    return " ".join(str(word) for word in words if word)


def _title(model: str, row: Mapping[str, object]) -> str:
    return (
        f"{model}, batch {row['batch_size']}, {row['gate']}, {row['dtype']}; "
        f"{row['num_gpus']} x {row['gpu']}, all-to-all {row['link_gb_per_s']} GB/s"
    )


def _ms(duration_us: object) -> float:
    return to_float(duration_us) / 1e3


def graph_table(rows: list[Row]) -> Table:
    """Return the result lines as a table, times in milliseconds."""
    first = rows[0]
    slow = "" if first["slow_link"] == "none" else f" ({first['slow_link']})"
    table = Table(
        title=f"Forward and backward on {first['num_gpus']} x {first['gpu']}: slowest rank, ms; "
        f"all-to-all {to_float(first['link_gb_per_s']):.1f} GB/s{slow}",
        caption="speed: against the faster of sequential and none; predicted: its ratio to "
        "measured; planned: seconds of the passes, with measuring and without, and of lanes "
        "from the first step to the plan; MiB: ratio to none; error: against none, of the worst of "
        "loss and gradients; = same bits",
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
    parts = " / ".join(str(row[key]) for key in ("optimise_s", "plan_s") if row[key] is not None)
    ratio = row["predicted_over_measured"]
    return [
        *cells,
        format_ms(row["median_us"]),
        format_ms(row["p90_us"]),
        f"{to_float(row['speedup']):.3f}x" if row["speedup"] else "",
        format_ms(row["exposed_comm_us"]),
        format_ms(row["comm_us"]),
        "" if ratio is None else f"{to_float(ratio):.3f}",
        f"{to_float(row['compile_s']):.1f}",
        parts,
        "" if row["peak_over_none"] is None else f"{to_float(row['peak_over_none']):.3f}",
        f"{to_float(row['max_rel_err']):.0e}" + ("=" if row["bit_equal"] else " "),
    ]
