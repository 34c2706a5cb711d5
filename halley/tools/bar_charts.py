"""Draw results of the layer benchmark as bars, and results of the tuner as dots."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halley.tools.timeline_chart import (
    FONT_PT,
    GREY,
    INK,
    LIGHT_GREY,
    draw_legend,
    new_figure,
    strip_axes,
)


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from halley.fused.config import TunedConfig

# Okabe and Ito's palette for colour-blind readers: https://jfly.uni-koeln.de/color/
_BLUE, _ORANGE = "#0072B2", "#E69F00"
_STRATEGY_COLOURS = (_BLUE, _ORANGE, "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
_INCHES_PER_LINE = 0.24

_Row = Mapping[str, object]
_DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}
_CASE_WORDS = {
    "num_tokens": "{} tokens a rank",
    "gpu": "{}",
    "num_gpus": "{} GPUs",
    "ep_size": "ep_size {}",
    "tp_size": "tp_size {}",
    "skew": "{}",
    "dtype": "{}",
}


def draw_layer_bench(rows: Sequence[Mapping[str, object]], path: str | Path) -> None:
    """Draw results of the layer benchmark as a PNG, with one row of charts per model.

    A bar is the median of one strategy, with the 10th and 90th percentiles. The label above it
    shows the median, and the lower bound in percent of the median. If a case was run twice, the
    last result is drawn.

    Args:
        rows: result lines. Lines without a time (wrong values) and lines of other directions than
            forward and forward_backward are ignored.
        path: the PNG file.

    Raises:
        ValueError: no line is left to draw, a line lacks a number, or there are too many
            strategies.
    """
    rows = [row for row in rows if row["direction"] in _DIRECTIONS and row["median_us"]]
    if not rows:
        raise ValueError(f"rows (none of {', '.join(_DIRECTIONS)}) must hold at least one time")
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    directions = [name for name in _DIRECTIONS if any(row["direction"] == name for row in rows)]
    strategies = list(dict.fromkeys(_strategy_label(row) for row in rows))
    if len(strategies) > len(_STRATEGY_COLOURS):
        raise ValueError(
            f"rows (of {len(strategies)} strategies) must be of at most {len(_STRATEGY_COLOURS)}"
        )
    varying = [key for key in _CASE_WORDS if len({row.get(key) for row in rows}) > 1]
    if "num_tokens" not in varying:
        varying.insert(0, "num_tokens")
    figure = new_figure(12.0, 2.3 * len(models) + 1.0)
    grid = figure.subplots(len(models), len(directions), squeeze=False)
    for axes_row, model in zip(grid, models, strict=True):
        for axes, direction in zip(axes_row, directions, strict=True):
            chosen = [r for r in rows if r["model"] == model and r["direction"] == direction]
            _draw_bars(axes, chosen, strategies=strategies, varying=varying)
            axes.set_title(
                f"{model}, {_DIRECTIONS[direction]}", loc="left", fontsize=FONT_PT + 1, color=INK
            )
        axes_row[0].set_ylabel("ms", fontsize=FONT_PT, color=INK)
    fixed = {key: rows[0].get(key) for key in _CASE_WORDS if key not in varying}
    figure.suptitle(_describe(fixed, separator=", "), fontsize=FONT_PT + 2, color=INK)
    _draw_strategy_legend(figure, strategies)
    figure.savefig(path, dpi=150)


def draw_sweeps(found: "Sequence[TunedConfig]", path: Path) -> None:
    """Draw the change of the time by each kernel setting: one panel per layer, one dot per setting.

    Args:
        found: the layers of a ``ConfigTable``.
        path: the PNG file.

    Raises:
        ValueError: no setting was measured.
    """
    panels = [(each, gains(each)) for each in found]
    panels = [(each, lines) for each, lines in panels if lines]
    if not panels:
        raise ValueError("found (no sweeps) must hold at least one layer that was tuned")
    heights = [len(lines) + 2 for _, lines in panels]
    figure = new_figure(8.0, _INCHES_PER_LINE * sum(heights))
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (tuned, lines) in zip(grid, panels, strict=True):
        labels = [label for label, _ in lines]
        percents = [percent for _, percent in lines]
        is_chosen = [set(label.split()) <= set(tuned.settings) for label in labels]
        colours = [_ORANGE if chosen else _BLUE for chosen in is_chosen]
        axes.axvline(0.0, color=GREY, linewidth=0.8)
        axes.scatter(percents, range(len(lines)), c=colours, s=22, zorder=3)
        axes.set_yticks(range(len(lines)), labels, fontsize=7)
        axes.invert_yaxis()
        axes.grid(axis="x", color=LIGHT_GREY, linewidth=0.7)
        shape = tuned.shape
        axes.set_title(
            f"hidden {shape.hidden_size}, {shape.num_experts} experts, top-k {shape.top_k}, "
            f"{shape.num_tokens} tokens: {tuned.default_us:.0f} us, tuned {tuned.median_us:.0f} us",
            fontsize=9,
            loc="left",
        )
    grid[-1].set_xlabel("forward and backward, % more than without the setting (orange: chosen)")
    figure.savefig(path, dpi=150)


def gains(tuned: "TunedConfig") -> list[tuple[str, float]]:
    """Return each measured setting, and the change of the time in percent; below 0 is faster."""
    return [
        (setting, 100.0 * (duration_us / sweep[""] - 1.0))
        for sweep in tuned.sweeps.values()
        for setting, duration_us in sweep.items()
        if setting
    ]


def _draw_bars(
    axes: "Axes", rows: list[_Row], *, strategies: list[str], varying: list[str]
) -> None:
    by_case: dict[str, dict[str, _Row]] = {}
    for row in sorted(rows, key=lambda row: _number(row, "num_tokens")):
        case = _describe({key: row.get(key) for key in varying}, separator="\n")
        by_case.setdefault(case, {})[_strategy_label(row)] = row
    width = 0.84 / len(strategies)
    for group, by_strategy in enumerate(by_case.values()):
        for label, row in by_strategy.items():
            index = strategies.index(label)
            x = group + (index - (len(strategies) - 1) / 2) * width
            _draw_bar(axes, row, x=x, width=width, index=index)
    axes.set_xlim(-0.5, max(len(by_case), 1) - 0.5)
    axes.set_xticks(range(len(by_case)), list(by_case))
    axes.margins(y=0.16)
    axes.grid(axis="y", color=LIGHT_GREY, linewidth=0.7)
    strip_axes(axes)


def _draw_bar(axes: "Axes", row: _Row, *, x: float, width: float, index: int) -> None:
    median_ms = _number(row, "median_us") / 1e3
    bound_ms = _number(row, "floor_us") / 1e3
    top_ms = median_ms
    axes.bar(x, median_ms, width * 0.92, color=_STRATEGY_COLOURS[index], zorder=2)
    if row.get("p10_us") is not None and row.get("p90_us") is not None:
        low_ms, top_ms = _number(row, "p10_us") / 1e3, _number(row, "p90_us") / 1e3
        axes.vlines(x, low_ms, top_ms, color=INK, linewidth=1.2, zorder=4)
    axes.hlines(bound_ms, x - width / 2, x + width / 2, color=INK, linewidth=1.4, zorder=3)
    label = f"{median_ms:#.3g}\n{bound_ms / median_ms:.0%}"
    tip = (x, max(top_ms, bound_ms))
    text = axes.annotate(label, tip, xytext=(0, 2), textcoords="offset points", ha="center")
    text.set(color=INK, fontsize=FONT_PT - 2, linespacing=0.95)


def _draw_strategy_legend(figure: "Figure", strategies: list[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bars = [
        Patch(label=label, facecolor=colour)
        for label, colour in zip(strategies, _STRATEGY_COLOURS, strict=False)
    ]
    bound = Line2D([], [], color=INK, linewidth=1.4, label="lower bound, and its share")
    spread = Line2D([], [], color=INK, linewidth=0, marker="|", label="10th to 90th percentile")
    draw_legend(figure, [*bars, bound, spread])


def _strategy_label(row: _Row) -> str:
    passes = row.get("passes") or "none"
    return str(row["strategy"]) if passes == "none" else f"{row['strategy']}, {passes}"


def _describe(case: _Row, *, separator: str) -> str:
    """Return the keys of a case as text, for example "NVIDIA H200, 4 GPUs, ep_size 4"."""
    return separator.join(
        words.format(case[key]) for key, words in _CASE_WORDS.items() if case.get(key) is not None
    )


def _number(row: _Row, key: str) -> float:
    value = row.get(key)
    if not isinstance(value, int | float):
        raise ValueError(f"rows[...][{key!r}] ({value!r}) must be a number")
    return float(value)
