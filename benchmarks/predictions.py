"""Compare the predicted times of layers with the committed measurements on GPUs.

    python -m benchmarks.predictions            # every row, then the errors by strategy
    python -m benchmarks.predictions --json     # the errors, as one line of JSON
    python -m benchmarks.predictions --check    # exit status 1 if rows miss the bar

The simulator predicts each row from the `Hardware` record of its GPU, without measured profiles.
docs/predictions.md explains the model and its constants.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from halley.core.models import find_model
from halley.core.types import LayerShape, Task
from halley.cost.hardware import Hardware, Predictor, find_hardware
from halley.cost.simulate import NO_CONTENTION, Contention, simulate
from halley.fused.config import KernelConfig
from halley.strategies.all_to_all import all_to_all_tasks
from halley.strategies.fused import fused_tasks
from halley.strategies.part_orders import PIPELINES, list_tasks
from halley.tools.candidates import chunk_counts


RESULTS = Path(__file__).parent / "results"
MOST_MEDIAN, MOST_WORST = 0.07, 0.20  # the bar for the errors of the test rows
# The constants of the model were fitted to the layers of these models and this number of tokens.
CALIBRATION = ("mixtral-8x7b", "qwen3-30b-a3b"), 2048
# Measured on 2 x H200 with one NCCL channel before lanes were planned: docs/LOG.md, 2026-11-28.
_ONE_CHANNEL = Contention(comm=1.2)
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One measured row beside its prediction."""

    section: str
    workload: str
    strategy: str
    measured_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        return self.predicted_us / self.measured_us - 1.0


def predict_us(row: Row) -> float:
    """Return the predicted us of a result line of the layer benchmark with balanced routing.

    The measured time is that of the fastest setting (chunks, order of parts), and the predicted one
    too. Which setting was measured to be fastest is no input.
    """
    model, predictor = find_model(row["model"]), Predictor(_find_hardware(row))
    if row["skew"] != "balanced" or row["tp_size"] != 1 or row["dtype"] != "bfloat16":
        raise ValueError(f"row ({row}) must have balanced routing, tp_size 1 and dtype bfloat16")
    shape = LayerShape(
        num_tokens=row["num_tokens"],
        hidden_size=model.hidden_size,
        intermediate_size=model.moe.intermediate_size,
        num_experts=model.moe.num_experts,
        top_k=model.moe.top_k,
        ep_size=row["ep_size"],
        activation=model.moe.activation,
    )
    contention = _ONE_CHANNEL if row.get("link") == "channels" else NO_CONTENTION
    return min(
        _simulate_us(tasks, direction=row["direction"], contention=contention)
        for tasks in _list_settings(row, shape, predictor)
    )


def _simulate_us(tasks: list[Task], *, direction: str, contention: Contention) -> float:
    if direction == "forward":
        first = next(i for i, task in enumerate(tasks) if "backward" in task.name)
        tasks = tasks[:first]
    return max(span.end_us for span in simulate(tasks, contention))


def _find_hardware(row: Row) -> Hardware:
    """Return the record of a row's GPU, with the slow link and without the host of a CUDA graph."""
    hardware = find_hardware(row["gpu"])
    if row.get("link") == "channels":
        network = row["link_gb_per_s"] * 1e9
        link = row["all_to_all_gb_per_s"] * 1e9
        hardware = replace(hardware, link_bytes_per_s=link, network_bytes_per_s=network)
    if "graph" in (row["setting"] or ""):
        no_host = {"eager_us": hardware.kernel_us, "read_us": 0.0}
        hardware = replace(hardware, link_latency_us=hardware.kernel_us, **no_host)
    return hardware


def _list_settings(row: Row, shape: LayerShape, predictor: Predictor) -> Iterator[list[Task]]:
    """Yield the tasks of the strategy of a row with each setting that the benchmark tries."""
    kernels = partial(fused_tasks, chunk_columns=KernelConfig().chunk_columns)
    strategy, _, suffix = row["strategy"].partition(":")
    if strategy in ("unfused", "fused"):
        yield kernels(shape, predictor, fused=strategy == "fused")
    elif strategy == "sequential":
        yield all_to_all_tasks(shape, predictor, num_chunks=1)
    elif strategy == "chunked":
        for num_chunks in chunk_counts(shape.num_experts // shape.ep_size):
            yield all_to_all_tasks(shape, predictor, num_chunks=num_chunks)
    else:
        for pipeline in PIPELINES:
            yield list_tasks(
                shape, predictor, num_nodes=row["num_nodes"], inner=partial(kernels, fused=True),
                pipeline=pipeline, wire_dtype="float8" if suffix == "float8" else "",
            )  # fmt: skip


def compare() -> Iterator[Comparison]:
    """Yield a comparison for each committed row; the section names the set that it belongs to."""
    models, num_tokens = CALIBRATION
    for row in _read("h200x4/layer-chunked.jsonl"):
        fitted = row["model"] in models and row["num_tokens"] == num_tokens
        yield _compare_layer(row, section="calibration" if fitted else "test")
    for row in _read("h100-80gb-hbm3x4/layer.jsonl"):
        yield _compare_layer(row, section="another GPU")
    for row in _read("h200x4/layer.jsonl"):
        yield _compare_layer(row, section="later run")
    for row in _read("h200x2/layer-nodes-graph.jsonl"):
        yield _compare_layer(row, section="slow link")
    for row in _read("h200x4/plain_layer.jsonl"):
        if row["strategy"] == "sequential":
            yield _compare_layer(row, section="earlier run")
    for path in sorted((RESULTS / "h200x2").glob("graph-*.jsonl")):
        for row in _read(f"h200x2/{path.name}"):
            if row["median_us"] and row["predicted_us"]:
                yield Comparison(
                    section="compiled steps, predictions of the files",
                    workload=f"{row['model']} {path.stem}",
                    strategy=row["variant"],
                    measured_us=row["median_us"],
                    predicted_us=row["predicted_us"],
                )


def _compare_layer(row: Row, *, section: str) -> Comparison:
    return Comparison(
        section=section,
        workload=f"{row['model']} {row['num_tokens']} {row['direction']}",
        strategy=row["strategy"],
        measured_us=row["median_us"],
        predicted_us=predict_us(row),
    )


def _read(name: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="ascii").splitlines()]


def summarise(rows: list[Comparison]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the number of rows, median and worst error of each section, by strategy and "all"."""
    errors: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        section = errors.setdefault(row.section, {})
        for name in (row.strategy, "all"):
            section.setdefault(name, []).append(abs(row.error))
    return {
        section: {
            name: {
                "rows": len(found),
                "median": round(median(found), 4),
                "worst": round(max(found), 4),
            }
            for name, found in by_name.items()
        }
        for section, by_name in errors.items()
    }


def _format(rows: list[Comparison], summary: dict[str, dict[str, dict[str, float]]]) -> str:
    lines: list[str] = []
    for section, by_name in summary.items():
        lines.append(f"{section:42} {'strategy':10}  measured predicted  error")
        for row in rows:
            if row.section == section:
                times = f"{row.measured_us:9.0f} {row.predicted_us:9.0f} {row.error:+6.1%}"
                lines.append(f"  {row.workload:40} {row.strategy:10} {times}")
        for name, found in sorted(by_name.items(), key=lambda item: item[0] == "all"):
            errors = f"median {found['median']:.1%}, worst {found['worst']:.1%}"
            lines.append(f"  {name} ({found['rows']} rows): {errors}")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="compare predicted with measured times")
    parser.add_argument("--json", action="store_true", help="print the errors as one JSON line")
    parser.add_argument(
        "--check",
        action="store_true",
        help="fail if test rows, or those of another GPU, miss the bar",
    )
    options = parser.parse_args()
    rows = list(compare())
    summary = summarise(rows)
    sys.stdout.write(f"{json.dumps(summary)}\n" if options.json else _format(rows, summary))
    bar = f"median at most {MOST_MEDIAN:.0%}, worst at most {MOST_WORST:.0%}"
    for section in ("test", "another GPU") if options.check else ():
        errors = summary[section]["all"]
        if errors["median"] > MOST_MEDIAN or errors["worst"] > MOST_WORST:
            sys.stderr.write(f"the rows of section {section} miss the bar: {bar}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
