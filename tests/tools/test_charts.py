"""Charts, whose pixels are read back: lengths, colours and lanes of bars."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from halley.fused.config import TunedConfig, TunedShape
from halley.tools.charts import draw_layer_bench, draw_sweeps, draw_timelines, gains
from tests.core.test_timeline import span


matplotlib = pytest.importorskip("matplotlib")
image = pytest.importorskip("matplotlib.image")

BLUE, ORANGE, RED = (0, 114, 178), (230, 159, 0), (193, 18, 31)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chart.png"


def extent(path: Path, colour: tuple[int, int, int], *, axis: int) -> tuple[int, int]:
    """Return first and last pixel (column: axis 1, row: axis 0) of a colour, outside the legend."""
    pixels = np.round(image.imread(path)[..., :3] * 255).astype(int)
    legend = 75  # pixels at the bottom
    hits: npt.NDArray[np.bool_] = (pixels[:-legend] == colour).all(axis=2)
    found = np.flatnonzero(hits.any(axis=1 - axis))
    assert found.size, f"no pixel of {colour}"
    return int(found[0]), int(found[-1])


def length(ends: tuple[int, int]) -> int:
    return ends[1] - ends[0] + 1


def test_bars_of_a_timeline_are_as_long_as_their_spans(path: Path) -> None:
    spans = [span("experts", 1000, 7000), span("dispatch", 2000, 4000, "comm")]
    draw_timelines({"overlap": spans}, path)
    blue, orange = extent(path, BLUE, axis=1), extent(path, ORANGE, axis=1)
    assert length(blue) / length(orange) == pytest.approx(3.0, rel=0.02)
    assert (orange[0] - blue[0]) / length(blue) == pytest.approx(1 / 6, abs=0.01)
    assert extent(path, BLUE, axis=0)[1] < extent(path, ORANGE, axis=0)[0]  # lanes
    with pytest.raises(AssertionError, match="no pixel"):
        extent(path, RED, axis=1)


def test_exposed_communication_is_red(path: Path) -> None:
    spans = [span("experts", 0, 4000), span("dispatch", 2000, 8000, "comm")]
    draw_timelines({"exposed": spans}, path)
    blue, orange, red = (extent(path, colour, axis=1) for colour in (BLUE, ORANGE, RED))
    assert length(orange) / length(blue) == pytest.approx(0.5, abs=0.02)
    assert length(red) / length(blue) == pytest.approx(1.0, abs=0.02)
    assert red[0] == pytest.approx(blue[1], abs=4)


def test_waits_are_drawn_in_the_lane_of_the_computation(path: Path) -> None:
    spans = [span("layer", 0, 9000), span("dispatch.wait", 3000, 6000, "exposed")]
    draw_timelines({"waits": spans}, path)
    assert extent(path, RED, axis=0) == pytest.approx(extent(path, BLUE, axis=0), abs=3)
    blue, red = extent(path, BLUE, axis=1), extent(path, RED, axis=1)
    assert length(red) / length(blue) == pytest.approx(1 / 3, abs=0.02)


def test_timelines_share_one_time_axis(path: Path) -> None:
    long = [span("experts", 5000, 13000), span("side", 5000, 6000, "compute 7", rank=1)]
    short = [span("dispatch", 0, 2000, "comm"), span("experts", 0, 2000, "copy")]
    draw_timelines({"long": long, "short": short}, path)
    blue, red = extent(path, BLUE, axis=1), extent(path, RED, axis=1)
    assert length(blue) / length(red) == pytest.approx(4.0, rel=0.02)
    assert blue[0] == pytest.approx(red[0], abs=3)


def test_thousands_of_kernels_are_drawn_without_changing_settings(path: Path) -> None:
    before = dict(matplotlib.rcParams)
    kernels = [span("void at::kernel<float>(int)", 10 * n, 10 * n + 8) for n in range(2000)]
    draw_timelines({"kernels": kernels}, path)
    assert dict(matplotlib.rcParams) == before
    assert length(extent(path, BLUE, axis=1)) > 1000


def result(strategy: str, median_us: float | None, **keys: object) -> dict[str, object]:
    of_machine = {"gpu": "NVIDIA H200", "num_gpus": 4, "dtype": "bfloat16"}
    of_case = {"model": "olmoe", "num_tokens": 2048, "ep_size": 4, "tp_size": 1, "skew": "balanced"}
    times = dict.fromkeys(("median_us", "p10_us", "p90_us"), median_us) | {"floor_us": 100.0}
    return of_machine | of_case | times | {"strategy": strategy, "direction": "forward"} | keys


def test_bench_bars_are_as_high_as_the_medians(path: Path) -> None:
    rows = [
        result("sequential", 400.0, p10_us=390.0, p90_us=450.0),
        result("fused", 200.0),
        result("wrong", None),
    ]
    draw_layer_bench(rows, path)
    blue, orange = (extent(path, colour, axis=0) for colour in (BLUE, ORANGE))
    assert length(blue) / length(orange) == pytest.approx(2.0, rel=0.03)
    height = image.imread(path).shape[0]
    more = [row | {"model": "mixtral-8x7b", "direction": "forward_backward"} for row in rows]
    draw_layer_bench([*rows, *more], path)  # one more row of charts
    assert image.imread(path).shape[0] - height == int(2.3 * 150)


def test_chart_of_the_tuner_shows_the_change_of_each_setting(path: Path) -> None:
    shape = TunedShape(hidden_size=32, num_experts=4, top_k=2, dtype="float32", num_tokens=4)
    sweeps = {"up": {"": 200.0, "up.run=2": 190.0, "up.group=16": 210.0}, "down": {"": 190.0}}
    tuned = TunedConfig(
        shape=shape, settings=("up.run=2",), median_us=190.0, default_us=200.0, sweeps=sweeps
    )
    (first, faster), (second, slower) = gains(tuned)
    assert (first, second) == ("up.run=2", "up.group=16")
    assert (faster, slower) == (pytest.approx(-5.0), pytest.approx(5.0))
    draw_sweeps([tuned], path)
    for axis in (0, 1):  # the chosen setting is orange
        assert extent(path, ORANGE, axis=axis)[1] < extent(path, BLUE, axis=axis)[0]


def test_nothing_to_draw_is_an_error() -> None:
    unused = Path("unused.png")
    with pytest.raises(ValueError, match=r"timelines\['fused'\] \(0 spans\) must hold"):
        draw_timelines({"fused": []}, unused)
    with pytest.raises(ValueError, match=r"rows \(none of forward, forward_backward\) must hold"):
        draw_layer_bench([result("fused", None)], unused)
    with pytest.raises(ValueError, match=r"rows \(of 8 strategies\) must be of at most 7"):
        draw_layer_bench([result(f"strategy {n}", 1.0) for n in range(8)], unused)
    with pytest.raises(ValueError, match=r"found \(no sweeps\) must hold at least one layer"):
        draw_sweeps([], unused)
