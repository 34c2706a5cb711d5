"""Write the tables of benchmarks/results into README.md, between its markers.

python benchmarks/tables.py            # rewrite README.md
"""

import json
import sys
from itertools import groupby
from pathlib import Path


ROOT = Path(__file__).parents[1]
START, END = "<!-- results: made by benchmarks/tables.py -->", "<!-- end of results -->"
STRATEGIES = ("sequential", "chunked", "unfused", "fused")
HEADER = (
    f"| model | tokens a rank | pass | floor | {' | '.join(STRATEGIES)} | fused / floor |",
    "|---|---|---|---|---|---|---|---|---|",
)
PASSES = {"forward": "forward", "forward_backward": "forward + backward"}


def layer_table(path: Path) -> list[str]:
    """Return the lines of a Markdown table of one result file of the layer benchmark."""
    rows = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
    first = rows[0]
    lines = [
        f"Milliseconds of one MoE layer on {first['num_gpus']} x {first['gpu']} "
        f"({first['dtype']}, ep_size {first['ep_size']}, {first['skew']} routing, "
        f"torch {first['torch']}, {first['date']}):",
        "",
        *HEADER,
    ]

    def workload(row: dict) -> tuple[str, int, str]:
        return row["model"], row["num_tokens"], row["direction"]

    for (model, num_tokens, direction), group in groupby(rows, key=workload):
        times = {row["strategy"]: row for row in group}
        floor_us = times["sequential"]["floor_us"]
        cells = [f"{floor_us / 1e3:.2f}", *(cell(times.get(name)) for name in STRATEGIES)]
        fused = times.get("fused", {}).get("median_us")
        cells.append(f"{fused / floor_us:.2f}" if fused else "-")
        lines.append(f"| {model} | {num_tokens} | {PASSES[direction]} | {' | '.join(cells)} |")
    return lines


def cell(row: dict | None) -> str:
    """Return a measurement as text."""
    if row is None or row["median_us"] is None:
        return "-"
    return f"{row['median_us'] / 1e3:.2f}" + (f" ({row['setting']})" if row["setting"] else "")


def render(readme: str, tables: list[str]) -> str:
    """Return the README with its tables replaced.

    Raises:
        ValueError: the README lacks the markers.
    """
    if START not in readme or END not in readme:
        raise ValueError(f"README.md must have the markers {START} and {END}")
    before, _, rest = readme.partition(START)
    after = rest.partition(END)[2]
    return "\n".join([before + START, "", *tables, "", END]) + after


def main() -> None:
    tables: list[str] = []
    for path in sorted(ROOT.glob("benchmarks/results/*/layer.jsonl")):
        tables += ["", *layer_table(path)] if tables else layer_table(path)
    readme = ROOT / "README.md"
    readme.write_text(render(readme.read_text(encoding="utf-8"), tables), encoding="utf-8")
    sys.stdout.write(f"wrote {readme}\n")


if __name__ == "__main__":
    main()
