"""Draw the README's headline picture from the committed results of the layer benchmark.

``python docs/figures/headline.py [path]`` writes the picture beside this file, or to ``path``.
"""

import json
import math
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200x4" / "layer.jsonl"
NUM_TOKENS, DIRECTION = 8192, "forward_backward"
COLORS = {"sequential": "#E69F00", "fused": "#0072B2"}
LABELS = {
    "sequential": "NCCL all-to-all + torch grouped GEMM",
    "fused": "Halley, communication fused into the GEMMs",
}


def read_times() -> tuple[dict[str, dict[str, float]], dict]:
    """Return time over lower bound by model and strategy, and one row for its machine."""
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="ascii").splitlines()]
    ratios: dict[str, dict[str, float]] = {}
    for row in rows:
        chosen = row["num_tokens"] == NUM_TOKENS and row["direction"] == DIRECTION
        if chosen and row["strategy"] in COLORS:
            by_strategy = ratios.setdefault(row["model"], {})
            by_strategy[row["strategy"]] = row["median_us"] / row["floor_us"]
    return ratios, rows[0]


def draw(path: Path) -> None:
    """Draw one pair of bars for each model."""
    ratios, row = read_times()
    figure = Figure(figsize=(8.0, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for at, (strategy, color) in enumerate(COLORS.items()):
        heights = [by_strategy[strategy] for by_strategy in ratios.values()]
        places = [index + 0.38 * (at - 0.5) for index in range(len(heights))]
        bars = axes.bar(places, heights, 0.36, color=color, label=LABELS[strategy])
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=1)
    axes.axhline(1, color="#222222", linewidth=1, label="lower bound: the longer of GEMMs and wire")
    axes.set_xticks(range(len(ratios)), list(ratios), fontsize=9)
    axes.set_ylabel("time / lower bound", fontsize=9)
    axes.set_ylim(0, 1.2 * max(max(each.values()) for each in ratios.values()))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    speedups = [each["sequential"] / each["fused"] for each in ratios.values()]
    mean = math.prod(speedups) ** (1 / len(speedups))
    axes.set_title(
        f"MoE layer, forward + backward, {NUM_TOKENS} tokens a rank, {row['num_gpus']} x "
        f"{row['gpu']}: {mean:.2f} times as fast (geometric mean)",
        fontsize=10,
    )
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
