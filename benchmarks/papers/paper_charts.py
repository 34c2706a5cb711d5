"""Charts of published and simulated values, one for each figure."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib import rc_context
from matplotlib.axes import Axes

from benchmarks.papers.paper_values import Value


_MOST_BARS = 12  # more published values than this are drawn as points
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "papers", "font.size": 8}


def by_figure(values: Sequence[Value]) -> dict[str, list[Value]]:
    groups: dict[str, list[Value]] = {}
    for value in values:
        groups.setdefault(value.figure, []).append(value)
    return groups


def draw_all(values: Sequence[Value], folder: Path) -> None:
    """Draw a chart of each figure with several values into ``folder``, as papers-NAME.svg."""
    for figure, group in by_figure(values).items():
        if len(group) == 1:
            continue
        name = re.sub(r"\W+", "-", figure.partition(" (")[0].lower())
        times = [value for value in group if value.published is None]
        draw = _draw_lines if times else _draw_points if len(group) > _MOST_BARS else _draw_bars
        with rc_context(_STYLE):
            picture, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
            draw(axes, times or group)
            axes.set_title(figure)
            picture.savefig(folder / f"papers-{name}.svg", metadata={"Date": None})
            plt.close(picture)


def _draw_points(axes: Axes, values: Sequence[Value]) -> None:
    """Draw simulated over published values; calibration values are hollow."""
    for system in dict.fromkeys(value.system for value in values):
        mine = [value for value in values if value.system == system]
        color = axes.plot([], [], "o", label=system)[0].get_color()
        for is_fitted in (True, False):
            points = [(v.published, v.simulated) for v in mine if v.is_fitted == is_fitted]
            fill = "none" if is_fitted else color
            axes.plot(*zip(*points, strict=True), "o", color=color, mfc=fill, ms=4) if points else 0
    ends = [min(v.published or 0 for v in values), max(v.published or 0 for v in values)]
    axes.plot(ends, ends, "k-", linewidth=0.5)
    axes.set(xscale="log", yscale="log", xlabel="paper", ylabel="simulated")
    axes.legend()


def _draw_bars(axes: Axes, values: Sequence[Value]) -> None:
    places = range(len(values))
    axes.barh([-at for at in places], [v.published or 0 for v in values], -0.4, align="edge")
    axes.barh([-at for at in places], [v.simulated for v in values], 0.4, align="edge")
    names = [f"{value.cell}, {value.system}" for value in values]
    axes.set_yticks([-at for at in places], names)
    axes.legend(["paper", "simulated"])


def _draw_lines(axes: Axes, values: Sequence[Value]) -> None:
    """Draw simulated times; the paper shows no numbers for them."""
    for system in dict.fromkeys(value.system for value in values):
        mine = [value for value in values if value.system == system]
        axes.plot([v.cell for v in mine], [v.simulated for v in mine], "o-", ms=4, label=system)
    axes.set(ylabel="ms, simulated", ylim=(0, None))
    axes.legend()
