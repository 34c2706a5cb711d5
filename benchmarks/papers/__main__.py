"""Print simulated figures of the COMET and Lancet papers beside the published values.

python -m benchmarks.papers            # tables, charts in docs/figures, and the bars
python -m benchmarks.papers --check    # exit code 1 if a bar is missed
python -m benchmarks.papers --fit      # fit the constants of the MoE systems again
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import mean

from benchmarks.papers import lancet_model, layer_figures
from benchmarks.papers.paper_charts import by_figure, draw_all
from benchmarks.papers.paper_values import TIE_MS, Value


ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "papers.md"
START, END = "<!-- made by python -m benchmarks.papers --write -->", "<!-- end of tables -->"
MOST_ERROR, LEAST_RANKED = 0.15, 0.90
_FIGURE_9, _MOE_PART, _ARTIFACT = "COMET figure 9", "COMET MoE layers", "COMET artifact"
_MANY = 10  # figures with more values have one line with the mean error
_OWN = ("COMET", "Lancet", "RAF")  # systems that a table need not name beside the cell
_BARS = (  # figures whose values, except fitted ones, must be within ``MOST_ERROR``
    "COMET speed-up",
    "COMET figure 11",
    "Lancet figures 11 and 12",
    "Lancet figure 13",
)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Agreement of simulated and published orders of systems in the cells of a figure."""

    num_pairs: int  # without ties
    num_right: int
    num_equal: int  # pairs whose published values differ by at most the limit of a tie
    num_cells: int
    num_whole: int  # cells with all pairs right
    num_first: int  # cells with the right fastest system


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of the reproduction: value, limit, and whether the value meets it."""

    name: str
    value: float
    limit: str
    is_met: bool


def rank(values: Sequence[Value], *, tie: float) -> Ranking:
    """Compare every pair of systems in every cell; all values must be published.

    Published values that differ by at most ``tie`` are not compared. Equal simulated values are
    wrong.
    """
    cells: dict[str, list[tuple[float, float]]] = {}  # (published, simulated) of each system
    for value in values:
        pair = (value.published or 0.0, value.simulated)
        cells.setdefault(value.cell, []).append(pair)
    results = [
        [
            (old - other_old) * (new - other_new) > 0
            for (old, new), (other_old, other_new) in combinations(cell, 2)
            if abs(old - other_old) > tie
        ]
        for cell in cells.values()
    ]
    num_pairs = sum(len(cell) for cell in results)
    return Ranking(
        num_pairs=num_pairs,
        num_right=sum(map(sum, results)),
        num_equal=sum(math.comb(len(cell), 2) for cell in cells.values()) - num_pairs,
        num_cells=len(cells),
        num_whole=sum(map(all, results)),
        num_first=sum(min(cell)[1] == min(new for _, new in cell) for cell in cells.values()),
    )


def find_rankings(values: Sequence[Value]) -> dict[str, Ranking]:
    """Return the rankings of the test cells of the figures with times of several systems."""
    limits = {_FIGURE_9: TIE_MS, _ARTIFACT: 0.0}
    return {
        name: rank(
            [v for v in values if v.figure.startswith(name) and not v.is_fitted],
            tie=tie,
        )
        for name, tie in limits.items()
    }


def find_bars(values: Sequence[Value]) -> list[Bar]:
    rankings = find_rankings(values)
    shares = {
        f"{name}, pairs of systems in the right order": each.num_right / each.num_pairs
        for name, each in rankings.items()
    }
    whole = rankings[_FIGURE_9].num_whole / rankings[_FIGURE_9].num_cells
    shares[f"{_FIGURE_9}, cells with the whole order right"] = whole
    limit = f">= {LEAST_RANKED:.0%}"
    bars = [
        Bar(name=name, value=share, limit=limit, is_met=share >= LEAST_RANKED)
        for name, share in shares.items()
    ]
    for value in values:
        if value.figure.startswith(_BARS) and value.error is not None and "most" not in value.cell:
            bars.append(
                Bar(
                    name=f"{value.figure}, {value.cell}, {value.system}, error",
                    value=value.error,
                    limit=f"within {MOST_ERROR:.0%}",
                    is_met=abs(value.error) <= MOST_ERROR,
                )
            )
    return bars


def ranking_table(values: Sequence[Value]) -> list[str]:
    lines = ["| test cells of | pairs right | ties | whole order right | fastest right |"]
    lines.append("|---|---|---|---|---|")
    for name, each in find_rankings(values).items():
        pairs = f"{each.num_right} of {each.num_pairs} ({each.num_right / each.num_pairs:.1%})"
        whole, first = (f"{n} of {each.num_cells}" for n in (each.num_whole, each.num_first))
        lines.append(f"| {name} | {pairs} | {each.num_equal} | {whole} | {first} |")
    return lines


def tables(values: Sequence[Value]) -> list[str]:
    """Return Markdown lines: rankings, mean errors of large figures, and values of small ones."""
    lines = ranking_table(values)
    lines += ["", "| figure | calibration values | mean error | test values | mean error |"]
    lines.append("|---|---|---|---|---|")
    small = []
    for figure, group in by_figure(values).items():
        known = [value for value in group if value.error is not None]
        if len(known) > _MANY:
            cells = []
            for is_fitted in (True, False):
                errors = [abs(v.error or 0.0) for v in known if v.is_fitted == is_fitted]
                cells += [f"{len(errors)}", f"{mean(errors):.1%}" if errors else "-"]
            lines.append(f"| {figure} | {' | '.join(cells)} |")
        elif known:
            texts = [
                f"{v.cell if v.system in _OWN else v.system} {v.published:g}, {v.simulated:.2f}, "
                f"{v.error:+.1%}{' (calibration)' if v.is_fitted else ''}"
                for v in known
            ]
            small.append(f"| {figure} | {'; '.join(texts)} |")
    return [*lines, "", "| figure | paper, simulated, error |", "|---|---|", *small]


def _numbers(value: Value) -> str:
    if value.published is None or value.error is None:
        return f"- | {value.simulated:.2f} | -"
    return f"{value.published:g} | {value.simulated:.2f} | {value.error:+.1%}"


def report(values: Sequence[Value], bars: Sequence[Bar]) -> list[str]:
    """Return lines of text: each figure, the rankings and the bars."""
    lines = []
    for figure, group in by_figure(values).items():
        lines += ["", figure, f"{'cell':28}{'system':18}{'paper | simulated | error':>32}"]
        for value in group:
            mark = "  calibration" if value.is_fitted else ""
            lines.append(f"{value.cell:28}{value.system:18}{_numbers(value):>32}{mark}")
    names = ", ".join(layer_figures.CALIBRATION)
    lines += ["", f"calibration cells of figure 9: {names}", "", *ranking_table(values), ""]
    for bar in bars:
        met = "met" if bar.is_met else "MISSED"
        lines.append(f"{met:8}{bar.value:+7.1%}  {bar.limit:12}{bar.name}")
    return lines


def write_document(values: Sequence[Value]) -> None:
    """Write the tables between the markers of docs/papers.md."""
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    text = "\n".join([before + START, "", *tables(values), "", END]) + after
    DOCUMENT.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Simulate the figures of two papers.")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, no tables")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--write", action="store_true", help="rewrite the tables of the document")
    parser.add_argument("--no-charts", action="store_true", help="draw no charts")
    parser.add_argument("--fit", action="store_true", help="print newly fitted constants, and stop")
    options = parser.parse_args(arguments)
    if options.fit:
        sys.stdout.write(f"{layer_figures.fit()}\n")
        return 0
    values = [*layer_figures.all_values(), *lancet_model.all_values()]
    bars = find_bars(values)
    if options.json:
        rankings = {name: asdict(each) for name, each in find_rankings(values).items()}
        result = {
            "values": [asdict(value) for value in values],
            "rankings": rankings,
            "bars": [asdict(bar) for bar in bars],
            "all_met": all(bar.is_met for bar in bars),
        }
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        sys.stdout.write("\n".join(report(values, bars)) + "\n")
    if not options.no_charts:
        draw_all(values, ROOT / "docs" / "figures")
    if options.write:
        write_document(values)
    return int(options.check and not all(bar.is_met for bar in bars))


if __name__ == "__main__":
    sys.exit(main())
