"""Write the tables of benchmarks/results into README.md, docs/results.md and docs/multinode.md.

python benchmarks/tables.py            # rewrites all
"""

import json
import math
import sys
from itertools import groupby
from pathlib import Path


ROOT = Path(__file__).parents[1]
START, END = "<!-- results: made by benchmarks/tables.py -->", "<!-- end of results -->"
STRATEGIES = ("sequential", "chunked", "unfused", "fused")
HEADER = (
    "| model | tokens a rank | direction | lower bound | "
    f"{' | '.join(STRATEGIES)} | fused / bound |",
    "|---|---|---|---|---|---|---|---|---|",
)
DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}
README_TOKENS = 8192
Row = dict


def read_rows() -> list[list[Row]]:
    """Return the rows of each machine's result file of the layer benchmark."""
    paths = sorted(ROOT.glob("benchmarks/results/*/layer*.jsonl"))
    paths = [path for path in paths if path.stem in ("layer", "layer-chunked")]
    return [
        [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
        for path in paths
    ]


def layer_table(rows: list[Row]) -> list[str]:
    """Return the Markdown lines of all rows: every model, token count, direction and strategy."""
    lines = [f"{_title(rows[0])}:", "", *HEADER]
    for (model, num_tokens, direction), group in groupby(rows, key=_workload):
        times = {row["strategy"]: row for row in group}
        bound_us = times["sequential"]["floor_us"]
        cells = [f"{bound_us / 1e3:.2f}", *(_cell(times.get(name)) for name in STRATEGIES)]
        fused = times.get("fused", {}).get("median_us")
        cells.append(f"{fused / bound_us:.2f}" if fused else "-")
        lines.append(f"| {model} | {num_tokens} | {DIRECTIONS[direction]} | {' | '.join(cells)} |")
    return lines


def headline_table(rows: list[Row]) -> list[str]:
    """Return the Markdown lines of the README: forward + backward, with the speedups."""
    lines = [
        f"{_title(rows[0])}, forward + backward, {README_TOKENS} tokens a rank:",
        "",
        "| model | lower bound | `sequential` | `fused` | times as fast |",
        "|---|---|---|---|---|",
    ]
    gains: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
    for (model, num_tokens, direction), group in groupby(rows, key=_workload):
        times = {row["strategy"]: row for row in group}
        plain, fused = times["sequential"], times["fused"]
        gain = plain["median_us"] / fused["median_us"]
        gains[direction].append(gain)
        if direction == "forward_backward" and num_tokens == README_TOKENS:
            cells = [f"{plain['floor_us'] / 1e3:.2f}", _cell(plain), _cell(fused), f"{gain:.2f}"]
            lines.append(f"| {model} | {' | '.join(cells)} |")
    forward, both = (math.prod(each) ** (1 / len(each)) for each in gains.values())
    (others,) = {row["num_tokens"] for row in rows} - {README_TOKENS}
    return [
        *lines,
        "",
        f"Over these layers and those with {others} tokens, `fused` is {forward:.2f} times as fast",
        f"as `sequential` forward and {both:.2f} times forward + backward (geometric mean). The",
        "lower bound is the two grouped GEMMs alone, or the wire alone where that takes longer.",
    ]


def nodes_table(path: Path) -> list[str]:
    """Return the Markdown lines of a result file of strategies across nodes of one rank each."""
    rows = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
    first = rows[0]
    lines = [
        f"{_title(first)}, two nodes of one GPU, {first['link_gb_per_s']:.0f} GB/s each way:",
        "",
        "| model | tokens a rank | direction | lower bound | sequential | chunked | deduplicated | "
        "times as fast | deduplicated / bound |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    gains: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
    bounds: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
    for (model, num_tokens, direction), group in groupby(rows, key=_workload):
        times = {row["strategy"]: row for row in group}
        found, bound_us = times["deduplicated"], times["deduplicated"]["floor_us"]
        others = [times[name]["median_us"] for name in ("sequential", "chunked")]
        gains[direction].append(min(others) / found["median_us"])
        bounds[direction].append(found["median_us"] / bound_us)
        names = ("sequential", "chunked", "deduplicated")
        cells = [f"{bound_us / 1e3:.2f}", *(_cell(times[name]) for name in names)]
        cells += [f"{each[direction][-1]:.2f}" for each in (gains, bounds)]
        lines.append(f"| {model} | {num_tokens} | {DIRECTIONS[direction]} | {' | '.join(cells)} |")
    means = [math.prod(each) ** (1 / len(each)) for each in (*gains.values(), *bounds.values())]
    return [
        *lines,
        "",
        f"Geometric means: `deduplicated` is {means[0]:.2f} times as fast as the faster of the "
        f"other two forward,",
        f"and {means[1]:.2f} times forward + backward. It takes {means[2]:.2f} and {means[3]:.2f} "
        "times the lower bound:",
        "the larger of the GEMMs alone and of the rows on the wire alone.",
    ]


def moe_perf_table(paths: list[Path]) -> list[str]:
    """Return the Markdown lines of result files of ``benchmarks/moe_perf.py``."""
    lines = [
        "Milliseconds of a layer with router and shared expert, and the published times on 8 H100:",
        "",
        "| GPUs | layer | strategy | forward | backward | TFLOP/s | over published |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in paths:
        for row in map(json.loads, path.read_text(encoding="ascii").splitlines()):
            times = [f"{row[key] / 1e3:.2f}" for key in ("forward_us", "backward_us")]
            cells = [f"{row['num_gpus']} x {row['gpu']}", row["model"], row["strategy"], *times]
            cells += [f"{row['tflops']:.0f}", f"{row['over_published']:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def graph_table(path: Path) -> list[str]:
    """Return the Markdown lines of a result file of the graph benchmark."""
    rows = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
    first = rows[0]
    lines = [
        f"Milliseconds of forward and backward on {first['num_gpus']} x {first['gpu']} with one "
        f"NCCL channel ({first['link_gb_per_s']:.0f} GB/s out of each GPU), {first['num_tokens']} "
        f"tokens a rank, torch {first['torch']}, {first['date']}:",
        "",
        "| model | variant | step | exposed communication |",
        "|---|---|---|---|",
    ]
    for row in rows:
        times = [_milliseconds(row[key]) for key in ("median_us", "exposed_comm_us")]
        cells = [row["model"], row["variant"], *times]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def render(document: str, tables: list[str], *, name: str) -> str:
    """Return a document with the lines between its markers replaced.

    Raises:
        ValueError: the document lacks the markers.
    """
    if START not in document or END not in document:
        raise ValueError(f"{name} must have the markers {START} and {END}")
    before, _, rest = document.partition(START)
    after = rest.partition(END)[2]
    return "\n".join([before + START, "", *tables, "", END]) + after


def documents() -> dict[Path, str]:
    """Return the text of each document, with its tables made from the results."""
    machines, results = read_rows(), ROOT / "benchmarks/results"
    tables = {
        ROOT / "README.md": headline_table(max(machines, key=lambda rows: rows[0]["date"])),
        ROOT / "docs" / "results.md": [
            *(line for rows in machines for line in [*layer_table(rows), ""]),
            *graph_table(results / "h200x2/graph-channels-fitted.jsonl"),
            "",
            *moe_perf_table(sorted(results.glob("*/moe_perf.jsonl"))),
        ],
        ROOT / "docs" / "multinode.md": nodes_table(results / "h200x2/layer-nodes-graph.jsonl"),
    }
    return {
        path: render(path.read_text(encoding="utf-8"), lines, name=path.name)
        for path, lines in tables.items()
    }


def _title(row: Row) -> str:
    return (
        f"Milliseconds of one MoE layer on {row['num_gpus']} x {row['gpu']} ({row['dtype']}, "
        f"ep_size {row['ep_size']}, {row['skew']} routing, torch {row['torch']}, {row['date']})"
    )


def _workload(row: Row) -> tuple[str, int, str]:
    return row["model"], row["num_tokens"], row["direction"]


def _milliseconds(duration_us: float | None) -> str:
    return "-" if duration_us is None else f"{duration_us / 1e3:.1f}"


def _cell(row: Row | None) -> str:
    if row is None or row["median_us"] is None:
        return "-"
    return f"{row['median_us'] / 1e3:.2f}" + (f" ({row['setting']})" if row["setting"] else "")


def main() -> None:
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    main()
