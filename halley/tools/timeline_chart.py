"""Draw spans of one or several runs as a PNG: one lane per stream and rank."""

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

INK, GREY, LIGHT_GREY = "#222222", "#777777", "#E6E6E6"
FONT_PT = 9.0

_LANE_INCHES = 0.32
_RANK_GAP = 0.45  # in lanes
_BAR_HEIGHT = 0.8  # of a lane


@dataclass(frozen=True, kw_only=True)
class _Style:
    meaning: str
    fill: str
    edge: str = "white"
    hatch: str = ""


# Okabe and Ito's palette for colour-blind readers: https://jfly.uni-koeln.de/color/
_STYLES = {
    "compute": _Style(meaning="computation", fill="#0072B2"),
    "comm": _Style(meaning="communication, hidden", fill="#E69F00"),
    "exposed": _Style(
        meaning="communication, exposed", fill="#FBE3E4", edge="#C1121F", hatch="/////"
    ),
    "copy": _Style(meaning="copies", fill="#56B4E9"),
    "other": _Style(meaning="other work", fill="#CFCFCF"),
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


def draw_timelines(timelines: Mapping[str, Sequence[Span]], path: str | Path) -> None:
    """Draw timelines as a PNG, one above another, on one time axis.

    Exposed waits are drawn in the lane of the computation that they interrupt. If a timeline has no
    spans of the stream "exposed", its communication counts as exposed while no computation of the
    same rank overlaps it.

    Args:
        timelines: spans by title. Each timeline is shifted to start at zero.
        path: the PNG file.

    Raises:
        ValueError: there is no timeline, or a timeline has no span.
    """
    if not timelines:
        raise ValueError("timelines (none) must hold at least one")
    panels = [_lay_out(title, spans) for title, spans in timelines.items()]
    height = sum(panel.height * _LANE_INCHES + 0.4 for panel in panels) + 0.8
    figure = new_figure(12.0, height)
    ratios = [panel.height for panel in panels]
    grid = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=ratios)
    longest_ms = max(panel.length_us for panel in panels) / 1e3
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        axes.set_xlim(0.0, longest_ms * 1.005 or 1.0)
        _draw_panel(axes, panel)
    grid[-1, 0].set_xlabel("time (ms)", fontsize=FONT_PT, color=INK)
    bars = [bar for panel in panels for lane in panel.lanes for bar in lane.bars]
    _draw_kind_legend(figure, {_kind(bar.stream) for bar in bars})
    # The width of a bar in pixels is known only after matplotlib has laid out the figure.
    figure.draw_without_rendering()
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        _label_bars(axes, panel)
    figure.savefig(path, dpi=150)


def new_figure(width: float, height: float) -> "Figure":
    """Return a matplotlib figure without a display; width and height are in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def draw_legend(figure: "Figure", handles: Sequence["Artist"]) -> None:
    """Draw one legend below all axes of a figure."""
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 7),
        frameon=False,
        fontsize=FONT_PT,
        labelcolor=INK,
    )


def strip_axes(axes: "Axes") -> None:
    """Remove the tick marks and the frame of axes, except its line at the bottom."""
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=FONT_PT, labelcolor=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GREY)


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
    """Return the label and the bars of each lane of a rank; bars of one lane do not overlap."""
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
                bars = [piece for bar in bars for piece in _split_exposed(bar, exposed)]
            rows.append((stream if index == 0 else "", bars))
    return rows


def _kind(stream: str) -> str:
    kind = stream.split(" ")[0]
    return kind if kind in _STYLES else "other"


def _split_exposed(comm: Span, exposed: list[Interval]) -> list[Span]:
    """Split a communication span into hidden and exposed pieces."""
    interval = [(comm.start_us, comm.end_us)]
    hidden = subtract(interval, exposed)
    pieces = [(piece, "comm") for piece in hidden]
    pieces += [(piece, "exposed") for piece in subtract(interval, hidden)]
    return [
        replace(comm, stream=stream, start_us=start_us, duration_us=end_us - start_us)
        for (start_us, end_us), stream in pieces
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
    """Strip return type, template arguments and namespaces from the name of a kernel."""
    name = name.removeprefix("void ").split("<")[0].split("(")[0].strip()
    return name.split("::")[-1].removeprefix("gloo:")


def _draw_panel(axes: "Axes", panel: _Panel) -> None:
    # Bars that are narrower than this have no edge, because the edge would cover the bar.
    min_width_us = axes.get_xlim()[1] * 1e3 / 300
    for lane in panel.lanes:
        for kind, style in _STYLES.items():
            bars = [bar for bar in lane.bars if _kind(bar.stream) == kind]
            thin = [_extent_ms(bar) for bar in bars if bar.duration_us < min_width_us]
            wide = [_extent_ms(bar) for bar in bars if bar.duration_us >= min_width_us]
            place = (lane.y - _BAR_HEIGHT / 2, _BAR_HEIGHT)
            thin_fill = style.edge if style.hatch else style.fill
            axes.broken_barh(thin, place, facecolor=thin_fill, linewidth=0, zorder=3)
            boxes = axes.broken_barh(wide, place, facecolor=style.fill, edgecolor=style.edge)
            boxes.set(hatch=style.hatch, linewidth=0.6, zorder=3)
    axes.axvline(panel.length_us / 1e3, color=GREY, linewidth=0.9, linestyle=(0, (2, 2)))
    axes.set_ylim(panel.lanes[-1].y + 0.6, -0.6)
    axes.set_yticks([lane.y for lane in panel.lanes], [lane.label for lane in panel.lanes])
    axes.set_title(panel.title, loc="left", fontsize=FONT_PT + 2, fontweight="bold", color=INK)
    length, exposed = panel.length_us / 1e3, panel.exposed_us / 1e3
    digits = 0 if length >= 100 else 2
    summary = f"{length:.{digits}f} ms, {exposed:.{digits}f} ms of it exposed communication"
    axes.set_title(summary, loc="right", fontsize=FONT_PT, color=INK)
    axes.grid(axis="x", color=LIGHT_GREY, linewidth=0.7)
    strip_axes(axes)


def _extent_ms(bar: Span) -> Interval:
    return (bar.start_us / 1e3, bar.duration_us / 1e3)


def _label_bars(axes: "Axes", panel: _Panel) -> None:
    """Write the name of each span into its bar, if the bar is wide enough."""
    pixels_per_ms = axes.get_window_extent().width / axes.get_xlim()[1]
    for lane in panel.lanes:
        for bar in lane.bars:
            start_ms, duration_ms = _extent_ms(bar)
            width = duration_ms * pixels_per_ms - 4.0
            label = _short_name(bar.name)
            # A cheap test first, because matplotlib is slow to measure thousands of texts.
            if width < 6.0 * len(label):
                continue
            text = axes.text(start_ms + duration_ms / 2, lane.y, label, fontsize=FONT_PT - 1.5)
            colour = "white" if _kind(bar.stream) == "compute" else INK
            text.set(color=colour, ha="center", va="center_baseline", zorder=4)
            text.set_in_layout(False)  # the layout would be computed again for each text
            if text.get_window_extent().width > width:
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
    draw_legend(figure, patches)
