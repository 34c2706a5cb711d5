"""The chart of the graph benchmark: lengths of the bars in pixels."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.graph_bench.report import draw_graph_bench
from halley.tools.results import Row


image = pytest.importorskip("matplotlib.image")
BLUE, RED = (0, 114, 178), (193, 18, 31)


def _row(variant: str, median_us: float | None) -> Row:
    return {
        "model": "gpt2-tiny-moe",
        "variant": variant,
        "setting": None,
        "inner": "eager",
        "median_us": median_us,
        "exposed_comm_us": 2000.0,
        "batch_size": 6,
        "gate": "switch",
        "dtype": "float32",
        "num_gpus": 2,
        "gpu": "cpu",
        "link_gb_per_s": 1.0,
    }


def test_red_share_of_a_bar_is_exposed_communication(tmp_path: Path) -> None:
    path = tmp_path / "graph.png"
    draw_graph_bench([_row("none", 8000.0), _row("failed", None)], path)
    pixels = np.round(image.imread(path)[..., :3] * 255).astype(int)
    blue, red = ((pixels == c).all(axis=2).sum(axis=1).max() for c in (BLUE, RED))
    assert red / blue == pytest.approx(1 / 3, rel=0.02)


def test_chart_without_a_time_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows \(1\) must hold at least one time"):
        draw_graph_bench([_row("failed", None)], tmp_path / "graph.png")
