"""Draws what the benchmark of graphs measured: steps, and what of them is exposed communication."""

from collections.abc import Mapping, Sequence
from pathlib import Path


_BLUE, _RED, _INK = "#0072B2", "#C1121F", "#222222"
_INCHES_A_BAR = 0.34


def draw_graph_bench(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Draw a panel for each model: variants downwards, milliseconds to the right.

    Args:
        rows: result lines; those without a time are left out.
        path: of the picture; the ending says which kind.

    Raises:
        ValueError: no line has a time.
    """
    panels: dict[str, list[Mapping[str, object]]] = {}
    for row in rows:
        if row["median_us"]:
            panels.setdefault(str(row["model"]), []).append(row)
    if not panels:
        raise ValueError(f"rows ({len(rows)}) must hold at least one time")
    # A figure of its own, which no display must show.
    from matplotlib.figure import Figure

    heights = [len(lines) + 2 for lines in panels.values()]
    figure = Figure((8.0, _INCHES_A_BAR * sum(heights) + 0.6), layout="constrained")
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
        axes.grid(axis="x", color="#E6E6E6", linewidth=0.7)
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
    assert isinstance(duration_us, int | float)
    return duration_us / 1e3
