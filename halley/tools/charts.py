"""Draw PNG charts of timelines, layer benchmarks and the measurements of ``halley tune``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from halley.core.timeline import Interval, Span, innermost, subtract, union
from halley.tools.timer import Row, to_float
from halley.tools.tracing import exposed_comm_us


if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from halley.fused.config import TunedConfig

INK, GREY, LIGHT_GREY = "#222222", "#777777", "#E6E6E6"
FONT_PT = 9.0

_LANE_INCHES = 0.32
_RANK_GAP = 0.45  # gap between two ranks, in heights of a lane
_BAR_HEIGHT = 0.8  # height of a bar, in heights of a lane
_INCHES_PER_DOT = 0.24

# Grey, and Okabe and Ito's palette for colour-blind readers: https://jfly.uni-koeln.de/color/
_BLUE, _ORANGE = "#0072B2", "#E69F00"
_STRATEGY_COLOURS = (_BLUE, _ORANGE, "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
# Matplotlib's arguments for bars, by kind of stream. The lanes of a rank are in this order.
_STYLES: dict[str, dict[str, Any]] = {
    "compute": {"label": "computation", "facecolor": _BLUE, "edgecolor": "white"},
    "comm": {"label": "communication, hidden", "facecolor": _ORANGE, "edgecolor": "white"},
    "exposed": {
        "label": "communication, exposed", "facecolor": "#FBE3E4", "edgecolor": "#C1121F",
        "hatch": "/////",
    },
    "copy": {"label": "copies", "facecolor": "#56B4E9", "edgecolor": "white"},
    "other": {"label": "other work", "facecolor": "#CFCFCF", "edgecolor": "white"},
}  # fmt: skip
_DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}


@dataclass(frozen=True, kw_only=True)
class _Lane:
    """One line of a drawn timeline: bars that do not overlap, for one stream of one rank."""

    label: str
    y: float
    bars: list[Span]


def draw_timelines(timelines: Mapping[str, Sequence[Span]], path: str | Path) -> None:
    """Draw timelines as a PNG, one above another, on one time axis, with lanes by rank and stream.

    Spans that overlap in a stream other than "compute" get further lanes. Exposed waits are drawn
    in the lane "compute". If a rank has no spans of the stream "exposed", its communication counts
    as exposed while this rank computes nothing. Each timeline is shifted to start at zero. A
    timeline without spans is a ``ValueError``.
    """
    from matplotlib.patches import Patch

    panels = {title: _lay_out(title, spans) for title, spans in timelines.items()}
    ratios = [lanes[-1].y + 1.0 for lanes in panels.values()]
    height = sum(ratio * _LANE_INCHES + 0.4 for ratio in ratios) + 0.8
    figure = new_figure(12.0, height)
    grid = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    bars = [bar for lanes in panels.values() for lane in lanes for bar in lane.bars]
    longest_ms = max(bar.end_us for bar in bars) / 1e3
    for axes, (title, lanes) in zip(grid, panels.items(), strict=True):
        axes.set_xlim(0.0, longest_ms * 1.005 or 1.0)
        axes.set_title(title, loc="left", fontsize=FONT_PT + 2, fontweight="bold", color=INK)
        _draw_lanes(axes, lanes)
        _tell_times(axes, timelines[title])
    grid[-1].set_xlabel("time (ms)", fontsize=FONT_PT, color=INK)
    kinds = {_kind(bar.stream) for bar in bars}
    _draw_legend(figure, [Patch(**style) for kind, style in _STYLES.items() if kind in kinds])
    # Draw labels last: bars have a width in pixels only after matplotlib has laid out the figure.
    figure.draw_without_rendering()
    for axes, lanes in zip(grid, panels.values(), strict=True):
        _label_bars(axes, lanes)
    figure.savefig(path, dpi=150)


def draw_layer_bench(rows: Sequence[Row], path: Path) -> None:
    """Draw result lines of the layer benchmark as a PNG: a row of charts per model.

    A bar is the median of one strategy, with the 10th and 90th percentiles. The label above it
    shows the median, and the lower bound in percent of the median. The result lines differ in
    model, tokens, strategy and direction only. Lines without a time (wrong values) are left out. A
    ``ValueError`` means that no line has a time, or that there are too many strategies.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = [row for row in rows if row["median_us"]]
    if not rows:
        raise ValueError(f"rows (none of {', '.join(_DIRECTIONS)}) must hold at least one time")
    strategies = list(dict.fromkeys(str(row["strategy"]) for row in rows))
    num_strategies, most = len(strategies), len(_STRATEGY_COLOURS)
    if num_strategies > most:
        raise ValueError(f"rows (of {num_strategies} strategies) must be of at most {most}")
    colours = dict(zip(strategies, _STRATEGY_COLOURS, strict=False))
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    figure = new_figure(12.0, 2.3 * len(models) + 1.0)
    grid = figure.subplots(len(models), len(_DIRECTIONS), squeeze=False)
    for axes_row, model in zip(grid, models, strict=True):
        for axes, (direction, words) in zip(axes_row, _DIRECTIONS.items(), strict=True):
            chosen = [r for r in rows if (r["model"], r["direction"]) == (model, direction)]
            _draw_bars(axes, chosen, colours)
            axes.set_title(f"{model}, {words}", loc="left", fontsize=FONT_PT + 1, color=INK)
        axes_row[0].set_ylabel("ms", fontsize=FONT_PT, color=INK)
    title = "{gpu}, {num_gpus} GPUs, ep_size {ep_size}, tp_size {tp_size}, {skew}, {dtype}"
    figure.suptitle(title.format(**rows[0]), fontsize=FONT_PT + 2, color=INK)
    bars = [Patch(label=name, facecolor=colour) for name, colour in colours.items()]
    bound = Line2D([], [], color=INK, linewidth=1.4, label="lower bound, and its share")
    spread = Line2D([], [], color=INK, linewidth=0, marker="|", label="10th to 90th percentile")
    _draw_legend(figure, [*bars, bound, spread])
    figure.savefig(path, dpi=150)


def draw_sweeps(found: "Sequence[TunedConfig]", path: Path) -> None:
    """Draw a PNG with a panel per layer: by how many % each measured setting changes the time.

    A ``ValueError`` means that no setting was measured.
    """
    panels = [(each, lines) for each in found if (lines := gains(each))]
    if not panels:
        raise ValueError("found (no sweeps) must hold at least one layer that was tuned")
    heights = [len(lines) + 2 for _, lines in panels]
    figure = new_figure(8.0, _INCHES_PER_DOT * sum(heights))
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (tuned, lines) in zip(grid, panels, strict=True):
        labels, percents = zip(*lines, strict=True)
        chosen = set(tuned.settings)
        colours = [_ORANGE if chosen.issuperset(label.split()) else _BLUE for label in labels]
        axes.axvline(0.0, color=GREY, linewidth=0.8)
        axes.scatter(percents, range(len(lines)), c=colours, s=22, zorder=3)
        axes.set_yticks(range(len(lines)), labels, fontsize=7)
        axes.invert_yaxis()
        axes.grid(axis="x", color=LIGHT_GREY, linewidth=0.7)
        shape, times = tuned.shape, f"{tuned.default_us:.0f} us, tuned {tuned.median_us:.0f} us"
        title = f"hidden {shape.hidden_size}, {shape.num_experts} experts, top-k {shape.top_k}, "
        axes.set_title(f"{title}{shape.num_tokens} tokens: {times}", fontsize=9, loc="left")
    grid[-1].set_xlabel("forward and backward, % more than without the setting (orange: chosen)")
    figure.savefig(path, dpi=150)


def gains(tuned: "TunedConfig") -> list[tuple[str, float]]:
    """Return (setting, % by which it is slower than the best settings found before it) pairs."""
    return [
        (setting, 100.0 * (duration_us / sweep[""] - 1.0))
        for sweep in tuned.sweeps.values()
        for setting, duration_us in sweep.items()
        if setting
    ]


def new_figure(width: float, height: float) -> "Figure":
    """Return a matplotlib figure that needs no display; width and height are in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _draw_legend(figure: "Figure", handles: Sequence["Artist"]) -> None:
    style = {"frameon": False, "fontsize": FONT_PT, "labelcolor": INK}
    ncols = min(len(handles), 7)
    figure.legend(handles=handles, loc="outside lower center", ncols=ncols, **style)


def _style_axes(axes: "Axes", *, grid: Literal["x", "y"]) -> None:
    axes.grid(axis=grid, color=LIGHT_GREY, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=FONT_PT, labelcolor=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GREY)


def _lay_out(title: str, spans: Sequence[Span]) -> list[_Lane]:
    if not spans:
        raise ValueError(f"timelines[{title!r}] (0 spans) must hold at least one")
    zero_us = min(span.start_us for span in spans)
    spans = [replace(span, start_us=span.start_us - zero_us) for span in spans]
    ranks = sorted({span.rank for span in spans})
    lanes: list[_Lane] = []
    for place, rank in enumerate(ranks):
        of_rank = [span for span in spans if span.rank == rank]
        for index, (stream, bars) in enumerate(_rows_of_rank(of_rank)):
            label = f"rank {rank}   {stream}" if index == 0 and len(ranks) > 1 else stream
            lanes.append(_Lane(label=label, y=len(lanes) + place * _RANK_GAP, bars=bars))
    return lanes


def _rows_of_rank(spans: list[Span]) -> list[tuple[str, list[Span]]]:
    """Return (label, bars) of a rank's lanes; only a stream's first lane has a label."""
    by_stream: dict[str, list[Span]] = {}
    for span in spans:
        stream = "compute" if span.stream == "exposed" else span.stream
        by_stream.setdefault(stream, []).append(span)
    exposed = union(span for span in spans if span.stream == "exposed")
    if not exposed:
        compute = union(span for span in spans if span.stream.startswith("compute"))
        exposed = subtract(union(by_stream.get("comm", [])), compute)

    order = list(_STYLES)
    rows: list[tuple[str, list[Span]]] = []
    for stream in sorted(by_stream, key=lambda name: (order.index(_kind(name)), len(name), name)):
        if _kind(stream) == "compute":
            rows.append((stream, innermost(by_stream[stream])))
            continue
        lanes: list[list[Span]] = []
        for span in sorted(by_stream[stream], key=lambda span: span.start_us):
            free = [lane for lane in lanes if lane[-1].end_us <= span.start_us]
            if free:
                free[0].append(span)
            else:
                lanes.append([span])
        for index, bars in enumerate(lanes):
            if stream == "comm":
                bars = [piece for bar in bars for piece in _split_exposed(bar, exposed)]
            rows.append((stream if index == 0 else "", bars))
    return rows


def _kind(stream: str) -> str:
    kind = stream.split(" ")[0]
    return kind if kind in _STYLES else "other"


def _split_exposed(comm: Span, exposed: list[Interval]) -> list[Span]:
    interval = [(comm.start_us, comm.end_us)]
    hidden = subtract(interval, exposed)
    return [
        replace(comm, stream=stream, start_us=start_us, duration_us=end_us - start_us)
        for stream, pieces in (("comm", hidden), ("exposed", subtract(interval, hidden)))
        for start_us, end_us in pieces
    ]


def _draw_lanes(axes: "Axes", lanes: list[_Lane]) -> None:
    # Bars that are shorter than this time get no edge, because the edge would cover the bar.
    min_width_us = axes.get_xlim()[1] * 1e3 / 300
    for lane in lanes:
        for kind, style in _STYLES.items():
            bars = [bar for bar in lane.bars if _kind(bar.stream) == kind]
            thin = [_extent_ms(bar) for bar in bars if bar.duration_us < min_width_us]
            wide = [_extent_ms(bar) for bar in bars if bar.duration_us >= min_width_us]
            place = (lane.y - _BAR_HEIGHT / 2, _BAR_HEIGHT)
            thin_fill = style["edgecolor" if "hatch" in style else "facecolor"]
            axes.broken_barh(thin, place, facecolor=thin_fill, linewidth=0, zorder=3)
            axes.broken_barh(wide, place, linewidth=0.6, zorder=3, **style)
    axes.set_ylim(lanes[-1].y + 0.6, -0.6)
    axes.set_yticks([lane.y for lane in lanes], [lane.label for lane in lanes])
    _style_axes(axes, grid="x")


def _tell_times(axes: "Axes", spans: Sequence[Span]) -> None:
    """Mark the end of a timeline; write its length and the longest exposed time of a rank."""
    length = (max(span.end_us for span in spans) - min(span.start_us for span in spans)) / 1e3
    ranks = {span.rank for span in spans}
    by_rank = [[span for span in spans if span.rank == rank] for rank in ranks]
    exposed = max(map(exposed_comm_us, by_rank)) / 1e3
    axes.axvline(length, color=GREY, linewidth=0.9, linestyle=(0, (2, 2)))
    digits = 0 if length >= 100 else 2
    summary = f"{length:.{digits}f} ms, {exposed:.{digits}f} ms of it exposed communication"
    axes.set_title(summary, loc="right", fontsize=FONT_PT, color=INK)


def _extent_ms(bar: Span) -> Interval:
    return (bar.start_us / 1e3, bar.duration_us / 1e3)


def _label_bars(axes: "Axes", lanes: list[_Lane]) -> None:
    pixels_per_ms = axes.get_window_extent().width / axes.get_xlim()[1]
    for bar, y in ((bar, lane.y) for lane in lanes for bar in lane.bars):
        start_ms, duration_ms = _extent_ms(bar)
        width = duration_ms * pixels_per_ms - 4.0
        # "void at::native::add<float>(int)" becomes "add", "gloo:all_to_all" becomes "all_to_all".
        label = bar.name.removeprefix("void ").split("<")[0].split("(")[0].strip()
        label = label.split("::")[-1].removeprefix("gloo:")
        if width < 6.0 * len(label):  # likely too long; to measure a text is slow
            continue
        text = axes.text(start_ms + duration_ms / 2, y, label, fontsize=FONT_PT - 1.5)
        colour = "white" if _kind(bar.stream) == "compute" else INK
        text.set(color=colour, ha="center", va="center_baseline", zorder=4)
        text.set_in_layout(False)  # else matplotlib lays out the figure again for each text
        if text.get_window_extent().width > width:
            text.remove()
        elif bar.stream == "exposed":
            fill = _STYLES["exposed"]["facecolor"]
            text.set_bbox({"facecolor": fill, "edgecolor": "none", "pad": 1.0})


def _draw_bars(axes: "Axes", rows: list[Row], colours: Mapping[str, str]) -> None:
    """Draw a group of bars per number of tokens: medians by strategy, percentiles, lower bounds."""
    width = 0.84 / len(colours)
    sizes = sorted({to_float(row["num_tokens"]) for row in rows})
    keys = ("median_us", "p10_us", "p90_us", "floor_us")
    for row in rows:
        index = list(colours).index(str(row["strategy"]))
        group = sizes.index(to_float(row["num_tokens"]))
        x = group + (index - (len(colours) - 1) / 2) * width
        median_ms, low_ms, top_ms, bound_ms = (to_float(row[key]) / 1e3 for key in keys)
        axes.bar(x, median_ms, width * 0.92, color=colours[str(row["strategy"])], zorder=2)
        axes.vlines(x, low_ms, top_ms, color=INK, linewidth=1.2, zorder=4)
        axes.hlines(bound_ms, x - width / 2, x + width / 2, color=INK, linewidth=1.4, zorder=3)
        label = f"{median_ms:#.3g}\n{bound_ms / median_ms:.0%}"
        tip = (x, max(top_ms, bound_ms))
        text = axes.annotate(label, tip, xytext=(0, 2), textcoords="offset points", ha="center")
        text.set(color=INK, fontsize=FONT_PT - 2, linespacing=0.95)
    axes.set_xlim(-0.5, max(len(sizes), 1) - 0.5)
    axes.set_xticks(range(len(sizes)), [f"{size:.0f} tokens a rank" for size in sizes])
    axes.margins(y=0.16)
    _style_axes(axes, grid="y")
