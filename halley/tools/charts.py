"""Draws timelines and results of the layer bench as pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from halley.core.timeline import Interval, Span, innermost, subtract, union
from halley.tools.tracing import exposed_comm_us


if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which every kind of eye can tell apart: https://jfly.uni-koeln.de/color/
_STRATEGY_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")


@dataclass(frozen=True, kw_only=True)
class _Style:
    meaning: str
    fill: str
    edge: str = "white"
    hatch: str = ""


_STYLES = {
    "compute": _Style(meaning="computation", fill="#0072B2"),
    "comm": _Style(meaning="communication, hidden", fill="#E69F00"),
    "exposed": _Style(
        meaning="communication, exposed", fill="#FBE3E4", edge="#C1121F", hatch="/////"
    ),
    "copy": _Style(meaning="copies", fill="#56B4E9"),
    "other": _Style(meaning="other work", fill="#CFCFCF"),
}
_Row = Mapping[str, object]
_INK, _GREY = "#222222", "#777777"
_FONT_PT = 9.0
_LANE_INCHES = 0.32
_RANK_GAP = 0.45  # in lanes
_BAR_HEIGHT = 0.8  # of a lane
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


@dataclass(frozen=True, kw_only=True)
class _Lane:
    label: str
    y: float
    bars: list[Span]


@dataclass(frozen=True, kw_only=True)
class _Panel:
    title: str
    lanes: list[_Lane]
    length_us: float
    exposed_us: float

    @property
    def height(self) -> float:
        return self.lanes[-1].y + 1.0


def draw_timeline(spans: Sequence[Span], path: str | Path, *, title: str) -> None:
    """Draw one timeline as a PNG, a lane for each stream of each rank.

    Args:
        spans: recorded, traced or simulated.
        path: of the picture.
        title: of the picture.

    Raises:
        ValueError: there is no span.
    """
    draw_timelines({title: spans}, path)


def draw_timelines(timelines: Mapping[str, Sequence[Span]], path: str | Path) -> None:
    """Draw timelines one above another on one time axis, so that the eye compares their lengths.

    Waits stand in the lane of the computation that they hold up. Timelines that mark no waits show
    as exposed the communication that no computation of its rank covers.

    Args:
        timelines: spans by title; each timeline is moved to start at zero.
        path: of the picture.

    Raises:
        ValueError: there is no timeline, or one has no span.
    """
    if not timelines:
        raise ValueError("timelines (none) must hold at least one")
    panels = [_lay_out(title, spans) for title, spans in timelines.items()]
    height = sum(panel.height * _LANE_INCHES + 0.4 for panel in panels) + 0.8
    figure = _new_figure(12.0, height)
    ratios = [panel.height for panel in panels]
    grid = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=ratios)
    longest_ms = max(panel.length_us for panel in panels) / 1e3
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        axes.set_xlim(0.0, longest_ms * 1.005 or 1.0)
        _draw_panel(axes, panel)
    grid[-1, 0].set_xlabel("time (ms)", fontsize=_FONT_PT, color=_INK)
    bars = [bar for panel in panels for lane in panel.lanes for bar in lane.bars]
    _draw_kind_legend(figure, {_kind(bar.stream) for bar in bars})
    # Only a figure that has been laid out knows whether a label fits in its bar.
    figure.draw_without_rendering()
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        _label_bars(axes, panel)
    figure.savefig(path, dpi=150)


def draw_layer_bench(rows: Sequence[Mapping[str, object]], path: str | Path) -> None:
    """Draw results of the layer bench as a PNG: a row of bars for each model.

    A bar is the median of one strategy with the 10th and 90th percentiles. Above it stand the
    median and the floor's share in it, the floor being the time that no implementation can beat.
    Where a case was run twice, the last result counts.

    Args:
        rows: result lines; other directions than forward and forward_backward are left out, and
            lines without a time, whose values were wrong.
        path: of the picture.

    Raises:
        ValueError: no row is left to draw, one lacks a number, or there are too many strategies.
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
    figure = _new_figure(12.0, 2.3 * len(models) + 1.0)
    grid = figure.subplots(len(models), len(directions), squeeze=False)
    for axes_row, model in zip(grid, models, strict=True):
        for axes, direction in zip(axes_row, directions, strict=True):
            chosen = [r for r in rows if r["model"] == model and r["direction"] == direction]
            _draw_bars(axes, chosen, strategies=strategies, varying=varying)
            axes.set_title(
                f"{model}, {_DIRECTIONS[direction]}", loc="left", fontsize=_FONT_PT + 1, color=_INK
            )
        axes_row[0].set_ylabel("ms", fontsize=_FONT_PT, color=_INK)
    fixed = {key: rows[0].get(key) for key in _CASE_WORDS if key not in varying}
    figure.suptitle(_describe(fixed, separator=", "), fontsize=_FONT_PT + 2, color=_INK)
    _draw_strategy_legend(figure, strategies)
    figure.savefig(path, dpi=150)


def _new_figure(width: float, height: float) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _lay_out(title: str, spans: Sequence[Span]) -> _Panel:
    if not spans:
        raise ValueError(f"timelines[{title!r}] (0 spans) must hold at least one")
    zero_us = min(span.start_us for span in spans)
    spans = [replace(span, start_us=span.start_us - zero_us) for span in spans]
    ranks = sorted({span.rank for span in spans})
    lanes: list[_Lane] = []
    exposed_us = 0.0
    y = 0.0
    for rank in ranks:
        of_rank = [span for span in spans if span.rank == rank]
        exposed_us = max(exposed_us, exposed_comm_us(of_rank))
        for index, (stream, bars) in enumerate(_rows_of_rank(of_rank)):
            label = f"rank {rank}   {stream}" if index == 0 and len(ranks) > 1 else stream
            lanes.append(_Lane(label=label, y=y, bars=bars))
            y += 1.0
        y += _RANK_GAP
    length_us = max(span.end_us for span in spans)
    return _Panel(title=title, lanes=lanes, length_us=length_us, exposed_us=exposed_us)


def _rows_of_rank(spans: list[Span]) -> list[tuple[str, list[Span]]]:
    """Return stream and bars of each lane of a rank; bars of one lane are disjoint."""
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
        for index, bars in enumerate(_disjoint_rows(by_stream[stream])):
            if stream == "comm":
                bars = [piece for bar in bars for piece in _split(bar, exposed)]
            rows.append((stream if index == 0 else "", bars))
    return rows


def _kind(stream: str) -> str:
    kind = stream.split(" ")[0]
    return kind if kind in _STYLES else "other"


def _split(comm: Span, exposed: list[Interval]) -> list[Span]:
    whole = [(comm.start_us, comm.end_us)]
    hidden = subtract(whole, exposed)
    parts = [(part, "comm") for part in hidden]
    parts += [(part, "exposed") for part in subtract(whole, hidden)]
    return [
        replace(comm, stream=stream, start_us=start_us, duration_us=end_us - start_us)
        for (start_us, end_us), stream in parts
    ]


def _disjoint_rows(spans: list[Span]) -> list[list[Span]]:
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start_us):
        for row in rows:
            if row[-1].end_us <= span.start_us:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


def _short_name(name: str) -> str:
    """Return what a reader needs of a C++ kernel's or a collective's name."""
    name = name.removeprefix("void ").split("<")[0].split("(")[0].strip()
    return name.split("::")[-1].removeprefix("gloo:")


def _draw_panel(axes: "Axes", panel: _Panel) -> None:
    hair_us = axes.get_xlim()[1] * 1e3 / 300  # the edge of a bar as thin as this would hide it
    for lane in panel.lanes:
        for kind, style in _STYLES.items():
            bars = [bar for bar in lane.bars if _kind(bar.stream) == kind]
            thin = [_extent_ms(bar) for bar in bars if bar.duration_us < hair_us]
            wide = [_extent_ms(bar) for bar in bars if bar.duration_us >= hair_us]
            place = (lane.y - _BAR_HEIGHT / 2, _BAR_HEIGHT)
            thin_fill = style.edge if style.hatch else style.fill
            axes.broken_barh(thin, place, facecolor=thin_fill, linewidth=0, zorder=3)
            boxes = axes.broken_barh(wide, place, facecolor=style.fill, edgecolor=style.edge)
            boxes.set(hatch=style.hatch, linewidth=0.6, zorder=3)
    axes.axvline(panel.length_us / 1e3, color=_GREY, linewidth=0.9, linestyle=(0, (2, 2)))
    axes.set_ylim(panel.lanes[-1].y + 0.6, -0.6)
    axes.set_yticks([lane.y for lane in panel.lanes], [lane.label for lane in panel.lanes])
    axes.set_title(panel.title, loc="left", fontsize=_FONT_PT + 2, fontweight="bold", color=_INK)
    length, exposed = panel.length_us / 1e3, panel.exposed_us / 1e3
    digits = 0 if length >= 100 else 2
    summary = f"{length:.{digits}f} ms, {exposed:.{digits}f} ms of it exposed communication"
    axes.set_title(summary, loc="right", fontsize=_FONT_PT, color=_INK)
    axes.grid(axis="x", color="#E6E6E6", linewidth=0.7)
    _strip(axes)


def _extent_ms(bar: Span) -> Interval:
    return (bar.start_us / 1e3, bar.duration_us / 1e3)


def _strip(axes: "Axes") -> None:
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=_FONT_PT, labelcolor=_INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GREY)


def _label_bars(axes: "Axes", panel: _Panel) -> None:
    pixels_per_ms = axes.get_window_extent().width / axes.get_xlim()[1]
    for lane in panel.lanes:
        for bar in lane.bars:
            start_ms, duration_ms = _extent_ms(bar)
            room = duration_ms * pixels_per_ms - 4.0
            label = _short_name(bar.name)
            if room < 6.0 * len(label):  # spares measuring thousands of kernels
                continue
            text = axes.text(start_ms + duration_ms / 2, lane.y, label, fontsize=_FONT_PT - 1.5)
            colour = "white" if _kind(bar.stream) == "compute" else _INK
            text.set(color=colour, ha="center", va="center_baseline", zorder=4)
            text.set_in_layout(False)
            if text.get_window_extent().width > room:
                text.remove()
            elif bar.stream == "exposed":
                fill = _STYLES["exposed"].fill
                text.set_bbox({"facecolor": fill, "edgecolor": "none", "pad": 1.0})


def _draw_kind_legend(figure: "Figure", kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    styles = [style for kind, style in _STYLES.items() if kind in kinds]
    patches = [
        Patch(label=s.meaning, facecolor=s.fill, edgecolor=s.edge, hatch=s.hatch) for s in styles
    ]
    _draw_legend(figure, patches)


def _draw_legend(figure: "Figure", handles: Sequence["Artist"]) -> None:
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 7),
        frameon=False,
        fontsize=_FONT_PT,
        labelcolor=_INK,
    )


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
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)
    _strip(axes)


def _draw_bar(axes: "Axes", row: _Row, *, x: float, width: float, index: int) -> None:
    median_ms = _number(row, "median_us") / 1e3
    floor_ms = _number(row, "floor_us") / 1e3
    top_ms = median_ms
    axes.bar(x, median_ms, width * 0.92, color=_STRATEGY_COLOURS[index], zorder=2)
    if row.get("p10_us") is not None and row.get("p90_us") is not None:
        low_ms, top_ms = _number(row, "p10_us") / 1e3, _number(row, "p90_us") / 1e3
        axes.vlines(x, low_ms, top_ms, color=_INK, linewidth=1.2, zorder=4)
    axes.hlines(floor_ms, x - width / 2, x + width / 2, color=_INK, linewidth=1.4, zorder=3)
    label = f"{median_ms:#.3g}\n{floor_ms / median_ms:.0%}"
    tip = (x, max(top_ms, floor_ms))
    text = axes.annotate(label, tip, xytext=(0, 2), textcoords="offset points", ha="center")
    text.set(color=_INK, fontsize=_FONT_PT - 2, linespacing=0.95)


def _draw_strategy_legend(figure: "Figure", strategies: list[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bars = [
        Patch(label=label, facecolor=colour)
        for label, colour in zip(strategies, _STRATEGY_COLOURS, strict=False)
    ]
    floor = Line2D([], [], color=_INK, linewidth=1.4, label="floor, and share of it")
    spread = Line2D([], [], color=_INK, linewidth=0, marker="|", label="10th to 90th percentile")
    _draw_legend(figure, [*bars, floor, spread])


def _strategy_label(row: _Row) -> str:
    passes = row.get("passes") or "none"
    return str(row["strategy"]) if passes == "none" else f"{row['strategy']}, {passes}"


def _describe(case: _Row, *, separator: str) -> str:
    """Return a case as a reader says it: ``NVIDIA H200, 4 GPUs, ep_size 4, balanced``."""
    return separator.join(
        words.format(case[key]) for key, words in _CASE_WORDS.items() if case.get(key) is not None
    )


def _number(row: _Row, key: str) -> float:
    value = row.get(key)
    if not isinstance(value, int | float):
        raise ValueError(f"rows[...][{key!r}] ({value!r}) must be a number")
    return float(value)
