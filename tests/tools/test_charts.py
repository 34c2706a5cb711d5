"""Charts: positions and colours of the bars that matplotlib is told to draw."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halley.fused.config import TunedConfig, TunedShape
from halley.tools.charts import draw_layer_bench, draw_sweeps, draw_timelines, gains
from tests.core.test_timeline import span


figures = pytest.importorskip("matplotlib.figure")
colours = pytest.importorskip("matplotlib.colors")

BLUE, ORANGE, RED = "#0072B2", "#E69F00", "#FBE3E4"  # the last one fills exposed communication
OUTPUT = Path("unused.png")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved from now on, instead of their files."""
    saved: list[Any] = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, path, dpi: saved.append(self))
    return saved


def bars(axes: Any, colour: str) -> list[tuple[float, ...]]:
    """Return left, right (ms) and middle height of the timeline's bars of a colour, in order."""
    found: list[tuple[float, ...]] = []
    for each in axes.collections:
        fills = [colours.to_hex(fill).upper() for fill in each.get_facecolor()]
        for path in each.get_paths() if colour in fills else []:
            x, y = path.vertices.T
            found.append((round(x.min(), 6), round(x.max(), 6), round(np.mean([y.min(), y.max()]))))
    return sorted(found)


def test_timelines_share_a_time_axis_that_starts_at_zero(drawn: list[Any]) -> None:
    first = [span("experts", 1000, 7000), span("dispatch", 2000, 8000, "comm")]
    second = [span("layer", 0, 9000, rank=1), span("dispatch.wait", 3000, 6000, "exposed", rank=1)]
    kernels = [span("void at::kernel<float>(int)", 10 * n, 10 * n + 8) for n in range(2000)]
    draw_timelines({"overlap": first, "waits": second, "kernels": kernels}, OUTPUT)
    overlap, waits, many = drawn[0].axes
    assert bars(overlap, BLUE) == [(0.0, 6.0, 0)]
    assert bars(overlap, ORANGE) == [(1.0, 6.0, 1)]
    assert bars(overlap, RED) == [(6.0, 7.0, 1)]  # no computation runs beside it
    assert bars(waits, BLUE) == [(0.0, 3.0, 0), (6.0, 9.0, 0)]
    assert bars(waits, RED) == [(3.0, 6.0, 0)]  # in the lane of the computation
    assert len(bars(many, BLUE)) == 2000
    assert overlap.get_xlim() == many.get_xlim()


def result(strategy: str, median_us: float | None, **keys: object) -> dict[str, object]:
    of_machine = {"case": "layer", "gpu": "NVIDIA H200", "num_gpus": 4, "dtype": "bfloat16"}
    of_case = {"model": "olmoe", "num_tokens": 2048, "ep_size": 4, "tp_size": 1, "skew": "balanced"}
    of_case |= {"commit": "<b>", "date": "2026", "strategy": strategy, "direction": "forward"}
    times = dict.fromkeys(("median_us", "p10_us", "p90_us"), median_us) | {"floor_us": 100.0}
    return of_machine | of_case | times | keys


def test_bench_bars_are_as_high_as_the_medians(drawn: list[Any]) -> None:
    rows = [result("sequential", 400.0), result("fused", 200.0), result("wrong", None)]
    more = [row | {"model": "mixtral-8x7b", "direction": "forward_backward"} for row in rows]
    draw_layer_bench([*rows, *more], OUTPUT)
    forward, _, _, backward = drawn[0].axes
    for axes in (forward, backward):
        assert [bar.get_height() for bar in axes.patches] == [0.4, 0.2]


def test_chart_of_the_tuner_shows_the_change_of_each_setting(drawn: list[Any]) -> None:
    shape = TunedShape(hidden_size=32, num_experts=4, top_k=2, dtype="float32", num_tokens=4)
    sweeps = {"up": {"": 200.0, "up.run=2": 190.0, "up.group=16": 210.0}, "down": {"": 190.0}}
    times = {"median_us": 190.0, "default_us": 200.0}
    tuned = TunedConfig(shape=shape, settings=("up.run=2",), sweeps=sweeps, **times)
    (first, faster), (second, slower) = gains(tuned)
    assert (first, second) == ("up.run=2", "up.group=16")
    assert (faster, slower) == (pytest.approx(-5.0), pytest.approx(5.0))
    draw_sweeps([tuned], OUTPUT)
    (points,) = drawn[0].axes[0].collections
    assert points.get_offsets()[:, 0].tolist() == [faster, slower]
    assert [colours.to_hex(fill).upper() for fill in points.get_facecolor()] == [ORANGE, BLUE]


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"timelines\['fused'\] \(0 spans\) must hold"):
        draw_timelines({"fused": []}, OUTPUT)
    with pytest.raises(ValueError, match=r"rows \(none of forward, forward_backward\) must hold"):
        draw_layer_bench([result("fused", None)], OUTPUT)
    with pytest.raises(ValueError, match=r"rows \(of 8 strategies\) must be of at most 7"):
        draw_layer_bench([result(f"strategy {n}", 1.0) for n in range(8)], OUTPUT)
    with pytest.raises(ValueError, match=r"found \(no sweeps\) must hold at least one layer"):
        draw_sweeps([], OUTPUT)
