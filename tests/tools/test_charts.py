"""Charts, whose pixels are read back: lengths, colours and lanes of bars."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from halley.tools.bar_charts import draw_layer_bench
from halley.tools.timeline_chart import draw_timelines
from tests.tools.spans import span


matplotlib = pytest.importorskip("matplotlib")
image = pytest.importorskip("matplotlib.image")

BLUE, ORANGE, RED = (0, 114, 178), (230, 159, 0), (193, 18, 31)


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


def test_bars_of_a_timeline_are_as_long_as_their_spans(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    draw_timelines(
        {"overlap": [span("experts", 1000, 7000), span("dispatch", 2000, 4000, "comm")]}, path
    )
    blue, orange = extent(path, BLUE, axis=1), extent(path, ORANGE, axis=1)
    assert length(blue) / length(orange) == pytest.approx(3.0, rel=0.02)
    assert (orange[0] - blue[0]) / length(blue) == pytest.approx(1 / 6, abs=0.01)
    assert extent(path, BLUE, axis=0)[1] < extent(path, ORANGE, axis=0)[0]  # lanes
    with pytest.raises(AssertionError, match="no pixel"):
        extent(path, RED, axis=1)


def test_exposed_communication_is_red(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    draw_timelines(
        {"exposed": [span("experts", 0, 4000), span("dispatch", 2000, 8000, "comm")]}, path
    )
    blue = extent(path, BLUE, axis=1)
    orange, red = extent(path, ORANGE, axis=1), extent(path, RED, axis=1)
    assert length(orange) / length(blue) == pytest.approx(0.5, abs=0.02)
    assert length(red) / length(blue) == pytest.approx(1.0, abs=0.02)
    assert red[0] == pytest.approx(blue[1], abs=4)


def test_waits_are_drawn_in_the_lane_of_the_computation(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    spans = [span("layer", 0, 9000), span("dispatch.wait", 3000, 6000, "exposed")]
    draw_timelines({"waits": spans}, path)
    blue_rows, red_rows = extent(path, BLUE, axis=0), extent(path, RED, axis=0)
    assert red_rows == pytest.approx(blue_rows, abs=3)
    blue, red = extent(path, BLUE, axis=1), extent(path, RED, axis=1)
    assert length(red) / length(blue) == pytest.approx(1 / 3, abs=0.02)


def test_timelines_share_one_time_axis(tmp_path: Path) -> None:
    path = tmp_path / "timelines.png"
    long = [span("experts", 5000, 13000), span("side", 5000, 6000, "compute 7", rank=1)]
    short = [span("dispatch", 0, 2000, "comm"), span("experts", 0, 2000, "copy")]
    draw_timelines({"long": long, "short": short}, path)
    blue, red = extent(path, BLUE, axis=1), extent(path, RED, axis=1)
    assert length(blue) / length(red) == pytest.approx(4.0, rel=0.02)
    assert blue[0] == pytest.approx(red[0], abs=3)


def test_thousands_of_kernels_are_drawn_without_changing_settings(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    kernels = [span("void at::kernel<float>(int)", 10 * n, 10 * n + 8) for n in range(2000)]
    draw_timelines({"kernels": kernels}, tmp_path / "kernels.png")
    assert dict(matplotlib.rcParams) == before
    assert length(extent(tmp_path / "kernels.png", BLUE, axis=1)) > 1000


def test_empty_timeline_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"timelines \(none\) must hold at least one"):
        draw_timelines({}, "unused.png")
    with pytest.raises(ValueError, match=r"timelines\['fused'\] \(0 spans\) must hold"):
        draw_timelines({"fused": []}, "unused.png")


def result(strategy: str, median_us: float, **keys: object) -> dict[str, object]:
    return {
        "case": "layer",
        "model": "olmoe",
        "num_tokens": 2048,
        "ep_size": 4,
        "tp_size": 1,
        "skew": "balanced",
        "dtype": "bfloat16",
        "strategy": strategy,
        "passes": "none",
        "direction": "forward",
        "median_us": median_us,
        "p10_us": None,
        "p90_us": None,
        "floor_us": 100.0,
        "gpu": "NVIDIA H200",
        "num_gpus": 4,
        **keys,
    }


def test_bench_bars_are_as_high_as_the_last_median_of_each_case(tmp_path: Path) -> None:
    rows = [
        result("sequential", 5000.0),
        result("sequential", 400.0, p10_us=390.0, p90_us=450.0),
        result("fused", 200.0),
        result("fused", 9000.0, direction="step"),
        result("wrong", 0.0) | {"median_us": None},
    ]
    draw_layer_bench(rows, tmp_path / "bench.png")
    blue, orange = (extent(tmp_path / "bench.png", c, axis=0) for c in (BLUE, ORANGE))
    assert length(blue) / length(orange) == pytest.approx(2.0, rel=0.03)


def test_bench_draws_every_model_direction_and_load(tmp_path: Path) -> None:
    rows = [
        result(strategy, 100.0 * num_tokens / 1024, model=model, **case)
        for model in ("olmoe", "mixtral-8x7b")
        for num_tokens in (2048, 8192)
        for strategy in ("sequential", "fused")
        for case in (
            {"num_tokens": num_tokens, "direction": "forward", "skew": "zipf"},
            {"num_tokens": num_tokens, "direction": "forward_backward", "passes": "wgrad"},
        )
    ]
    draw_layer_bench(rows, tmp_path / "bench.png")
    height, width = image.imread(tmp_path / "bench.png").shape[:2]
    assert (width, height) == (1800, int((2 * 2.3 + 1.0) * 150))


def test_rows_that_cannot_be_drawn_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"rows \(none of forward, forward_backward\) must hold"):
        draw_layer_bench([result("fused", 1.0, direction="step")], "unused.png")
    with pytest.raises(ValueError, match=r"rows\[...\]\['floor_us'\] \(None\) must be a number"):
        draw_layer_bench([result("fused", 1.0, floor_us=None)], "unused.png")
    many = [result(f"strategy {n}", 1.0) for n in range(8)]
    with pytest.raises(ValueError, match=r"rows \(of 8 strategies\) must be of at most 7"):
        draw_layer_bench(many, "unused.png")
