"""Sketch the work of one rank in a fused and in an unfused call, not to scale.

``python docs/figures/fused_timeline.py [path]`` writes beside this file, or to ``path``.
"""

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch


# Colours, sizes and fonts are those of halley/tools/charts.py.
INK, GREY = "#222222", "#777777"
FONT_PT = 9.0
FILLS = {
    "publish, count, place": "#CFCFCF",
    "fetch": "#E69F00",
    "multiply": "#0072B2",
    "combine": "#009E73",
    "sum": "#CC79A7",
}
WHITE_TEXT = ("multiply", "combine")

Bar = tuple[float, float, str, str]  # start, end, key of FILLS, text
Lanes = dict[str, list[Bar]]

FUSED: Lanes = {
    "link": [
        (0.4, 1.2, "publish, count, place", ""),
        (2.2, 6.0, "fetch", "rows of other ranks"),
        (10.0, 11.6, "combine", "sums 0"),
        (11.9, 13.5, "combine", "sums 1"),
        (13.8, 15.4, "combine", "sums 2"),
        (15.7, 17.0, "combine", "sums 3"),
    ],
    "CTAs that move rows,\none on each SM": [
        (0.0, 2.0, "publish, count, place", "plan"),
        (2.0, 6.1, "fetch", "own rows, others"),
        (10.0, 11.6, "combine", "chunk 0"),
        (11.6, 11.9, "sum", ""),
        (11.9, 13.5, "combine", "chunk 1"),
        (13.5, 13.8, "sum", ""),
        (13.8, 15.4, "combine", "chunk 2"),
        (15.4, 15.7, "sum", ""),
        (15.7, 17.0, "combine", "chunk 3"),
        (17.0, 17.8, "sum", "sum"),
    ],
    "CTAs that multiply,\none on each SM": [
        (2.4, 8.0, "multiply", "first GEMM: tile by tile, as rows arrive"),
        (8.0, 15.8, "multiply", "second GEMM: columns of chunk 0, 1, 2, 3"),
    ],
}
UNFUSED: Lanes = {
    "link": [
        (0.4, 1.2, "publish, count, place", ""),
        (2.2, 6.0, "fetch", "rows of other ranks"),
        (18.4, 22.0, "combine", "sums 0 to 3"),
    ],
    "all CTAs": [
        (0.0, 2.0, "publish, count, place", "plan"),
        (2.0, 6.0, "fetch", "fetch"),
        (6.0, 11.2, "multiply", "first GEMM"),
        (11.2, 18.4, "multiply", "second GEMM"),
        (18.4, 22.0, "combine", "combine"),
        (22.0, 23.4, "sum", "sum"),
    ],
}
FUSED_LAUNCHES = {0.0: "plan", 2.0: "fetch + first GEMM", 8.0: "second GEMM + combine", 17.8: ""}
UNFUSED_LAUNCHES = dict.fromkeys((0.0, 2.0, 6.0, 11.2, 18.4, 23.4), "")


def draw_lanes(axes: Axes, lanes: Lanes, launches: dict[float, str], *, title: str) -> None:
    """Draw one panel: one lane per group of CTAs, dotted lines where launches begin and end."""
    for y, bars in enumerate(lanes.values()):
        for start, end, what, text in bars:
            place = (y - 0.4, 0.8)
            axes.broken_barh([(start, end - start)], place, facecolor=FILLS[what], edgecolor="w")
            colour = "white" if what in WHITE_TEXT else INK
            label = axes.text((start + end) / 2, y, text, fontsize=FONT_PT - 1.5, color=colour)
            label.set(ha="center", va="center_baseline")
    for start, name in launches.items():
        axes.axvline(start, color=GREY, linewidth=0.9, linestyle=(0, (2, 2)), zorder=0)
        axes.text(start + 0.05, -0.5, name, fontsize=FONT_PT - 1, color=INK, va="bottom")
    axes.set_ylim(len(lanes) - 0.4, -0.95)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_title(title, loc="left", fontsize=FONT_PT + 2, fontweight="bold", color=INK)
    axes.tick_params(length=0, labelsize=FONT_PT, labelcolor=INK)
    axes.set_xticks([])
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def draw(path: Path) -> None:
    """Draw both forms above each other, with one time axis."""
    figure = Figure(figsize=(12.0, 4.9), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[len(FUSED), len(UNFUSED)])
    upper.set_xlim(-0.05, 23.6)
    draw_lanes(upper, FUSED, FUSED_LAUNCHES, title="fused: two launches share each SM")
    draw_lanes(
        lower, UNFUSED, UNFUSED_LAUNCHES, title="unfused: the same launches one after another"
    )
    lower.set_xlabel(
        "time, not to scale: a sketch of one rank, not a measurement", fontsize=FONT_PT, color=INK
    )
    patches = [Patch(label=what, facecolor=fill) for what, fill in FILLS.items()]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=len(patches),
        frameon=False,
        fontsize=FONT_PT,
        labelcolor=INK,
    )
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
