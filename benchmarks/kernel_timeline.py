"""Check the timeline inside the fused kernels: its shares of kernel times, and its cost.

Times forward and backward of the fused layer without and with records, in alternation. Then records
some passes under the profiler. Prints a JSON line per kernel and one with two verdicts: the shares
of each launch sum to the profiler's time of the kernel within 2 %, and records cost at most 2 %.

    python -m benchmarks.kernel_timeline --nproc 2

Without records the kernels are compiled to the same PTX as kernels without marks, so there is no
cost to measure. Without a GPU, the shares are those of the recorded time, and always sum to 1.
"""

import json
import statistics
import sys
from functools import partial
from typing import Annotated, Any

import torch
from typer import Option, Typer

from halley.cli.bench import DeviceOption, ModelsOption, SamplesOption, TokensOption, layer_cases
from halley.cli.checks import check_samples
from halley.cli.main import main as run_command
from halley.cli.ranks import NprocOption, count_ranks, joined, launch_ranks
from halley.core.timeline import Recorder
from halley.distributed.mesh import ParallelGroups, build_groups
from halley.fused.buffers import Workspaces
from halley.fused.kernels.marks import ProgramRecords
from halley.strategies.base import AbstractStrategy
from halley.strategies.registry import build_strategy
from halley.tools.candidates import compile_ahead
from halley.tools.kernel_timeline import LAUNCH, mean_rows, record_pass
from halley.tools.layer_case import LayerCase, make_tensors, outputs_of
from halley.tools.timer import Row, machine_keys, max_over_ranks, time_interleaved, to_float


MAX_ERROR = 0.02  # of the sum of a launch's shares
MAX_COST = 0.02  # of records, as a fraction of the layer's time
app = Typer(name="benchmarks.kernel_timeline", add_completion=False)


def measure(
    case: LayerCase,
    *,
    groups: ParallelGroups,
    device: torch.device,
    num_samples: int,
    num_recordings: int,
) -> list[Row]:
    """Return a row per kernel and direction: cost of records, and sums of shares; a collective.

    ``sum_min`` and ``sum_max`` are over all recorded launches of all ranks.
    """
    recorder, records = Recorder(device, enabled=False), ProgramRecords(device)
    shared: dict[str, Any] = {"device": device, "recorder": recorder}
    build = partial(build_strategy, "fused", groups.ep, **shared)
    off = build(workspaces=Workspaces(groups.ep, device))
    on = build(workspaces=Workspaces(groups.ep, device, records=records))
    tensors = make_tensors(case, groups, **shared)
    compile_ahead([off, on], tensors)

    def run(strategy: AbstractStrategy) -> None:
        records.clear()  # in both variants, so that only the kernels differ
        outputs_of(strategy, tensors)

    timings = time_interleaved(
        {"off": partial(run, off), "on": partial(run, on)},
        device=device,
        num_samples=num_samples,
        group=groups.ep,
    )
    off_us, on_us = timings["off"].median_us, timings["on"].median_us
    pairs = zip(*(outputs_of(each, tensors) for each in (off, on)), strict=True)
    differs = float(not all(torch.equal(*pair) for pair in pairs))
    (differs,) = max_over_ranks([differs], device=device, group=groups.ep)
    recorded = [row for _ in range(num_recordings) for row in record_pass(on, tensors, records)[0]]
    for strategy in (off, on):
        strategy.release()
    keys = {"model": case.model.name, "num_tokens": case.num_tokens, "bit_equal": not differs}
    keys |= {"off_us": round(off_us, 1), "on_us": round(on_us, 1)}
    keys |= {"cost": round(on_us / off_us - 1, 5)}
    return [keys | summarise_kernel(row, recorded) for row in mean_rows(recorded)]


def summarise_kernel(mean: Row, recorded: list[Row]) -> Row:
    """Return the mean row of a kernel, with sums of shares and launch times of its launches."""
    names = ("kernel", "direction", "num_programs")
    same: list[Any] = [row for row in recorded if all(row[key] == mean[key] for key in names)]
    sums = [sum(row["shares"].values()) for row in same]
    outside_us = [row["shares"][LAUNCH] * row["median_us"] for row in same]
    found: Row = {"launches": len(same)}
    found |= {"sum_min": round(min(sums), 5), "sum_max": round(max(sums), 5)}
    return mean | found | {"launch_and_exit_us": round(statistics.median(outside_us), 3)}


def judge(rows: list[Row]) -> Row:
    """Return whether both bars are met, with the worst values of all rows."""
    sums = [to_float(row[key]) for row in rows for key in ("sum_min", "sum_max")]
    error = max(abs(each - 1) for each in sums)
    cost = max(to_float(row["cost"]) for row in rows)
    return {
        "verdict": {
            "shares": "pass" if error <= MAX_ERROR else "fail",
            "cost": "pass" if cost <= MAX_COST else "fail",
            "bits": "pass" if all(row["bit_equal"] for row in rows) else "fail",
        },
        "worst_error": round(error, 5),
        "worst_cost": cost,
        "most_launch_and_exit_us": max(to_float(row["launch_and_exit_us"]) for row in rows),
    }


@app.command()
def kernel_timeline(
    models: ModelsOption = "default",
    tokens: TokensOption = "default",
    samples: SamplesOption = 21,
    recordings: Annotated[int, Option(help="Recorded passes of each layer.")] = 5,
    nproc: NprocOption = 0,
    device: DeviceOption = "auto",
) -> int:
    """Compare recorded shares with profiled kernel times, and time layers with and without."""
    count_ranks(nproc, device=device)
    cases = layer_cases(models, tokens, dtype="default", device=device)
    check_samples(samples)
    check_samples(recordings, option="recordings")
    launch_ranks(nproc, device=device)
    with joined(device) as (world, _):
        groups = build_groups(0, device_type=world.device.type)
        machine = machine_keys(groups, device=world.device, commit=None)
        rows: list[Row] = []
        for case in cases:
            found = measure(
                case, groups=groups, device=world.device, num_samples=samples,
                num_recordings=recordings,
            )  # fmt: skip
            torch.cuda.empty_cache()  # does nothing without a GPU
            rows += [{"case": "kernel_timeline"} | row | machine for row in found]
            if world.is_first:
                for row in rows[-len(found) :]:
                    sys.stdout.write(json.dumps(row) + "\n")
        if world.is_first:
            sys.stdout.write(json.dumps(judge(rows)) + "\n")
    return 0 if "fail" not in str(judge(rows)["verdict"]) else 1


def main(argv: list[str] | None = None) -> int:
    """Run the command; arguments and exit code as for ``halley.cli.main``."""
    return run_command(argv, commands=app, module="benchmarks.kernel_timeline")


if __name__ == "__main__":
    sys.exit(main())
