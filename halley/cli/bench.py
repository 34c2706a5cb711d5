"""``halley bench layer``: measure the MoE layers of named models, print and save result lines."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from halley.cli.checks import (
    CHART,
    check_replaceable,
    check_samples,
    check_seed,
    rank_memory_bytes,
    read_dtype,
    split_integers,
    split_names,
)
from halley.cli.ranks import NprocOption, count_ranks, joined, launch_ranks, step_progress
from halley.core.models import find_model
from halley.core.timeline import write_chrome_trace
from halley.core.validation import check_package
from halley.distributed.mesh import World, build_groups, pick_device
from halley.strategies.registry import STRATEGIES, check_strategy
from halley.tools.candidates import check_memory
from halley.tools.charts import draw_layer_bench
from halley.tools.layer_bench import measure_layers
from halley.tools.layer_case import LayerCase
from halley.tools.report import read_results, read_trace, write_report
from halley.tools.skew import parse_load
from halley.tools.timer import Row, machine_name, results_path, to_float, write_rows


app = typer.Typer(help="Measure MoE layers.", no_args_is_help=True)

_BENCH_MODELS = "mixtral-8x7b,phi-3.5-moe,qwen2-moe,qwen3-30b-a3b,deepseek-v3"
_CAPTURED = ("fused", "unfused", "deduplicated", "hierarchical")
_PLAIN_CASE = "layer"  # the "case" of result lines that has a chart; other cases add a suffix

OutputOption = Annotated[
    Path | None,
    Option(help="Folder for results; those of this benchmark, device and ranks are replaced."),
]
ModelsOption = Annotated[
    str,
    Option(
        help="Models, comma-separated: name, config.json or sizes such as E=8,K=2,D=64,F=128; "
        "'default' depends on the device."
    ),
]
TokensOption = Annotated[
    str, Option(help="Tokens per rank, comma-separated; 'default' depends on the device.")
]
StrategiesOption = Annotated[
    str, Option(help=f"Strategies to compare, comma-separated, out of: {', '.join(STRATEGIES)}.")
]
DtypeOption = Annotated[
    str, Option(help="bfloat16, float16, float32 or default (bfloat16 on GPUs, else float32).")
]
SamplesOption = Annotated[int, Option(help="Timed runs of each variant.")]
SeedOption = Annotated[int, Option(help="Seed of the random tensors.")]
CommitOption = Annotated[
    str | None, Option(help="Git commit to write into result lines; default: the checkout's.")
]
DeviceOption = Annotated[str, Option(help="cpu or cuda; auto is cuda if there is a GPU, else cpu.")]

_SkewOption = Annotated[
    str,
    Option(
        help="Loads to measure, comma-separated, out of: balanced; std:X, shares of the "
        "experts with standard deviation X; cv:X, shares with standard deviation X times their "
        "mean; zipf:X, shares proportional to 1 / (index of the expert) ^ X; one-hot, one "
        "expert that every token chooses."
    ),
]
_TpSizeOption = Annotated[
    str, Option(help="Ranks that share each expert (tensor parallelism), comma-separated.")
]
_MaxLoadOption = Annotated[
    float,
    Option(
        help="Also measure unfused, fused and strategies across nodes as CUDA graphs, with "
        "buffers for this multiple of the balanced load; 0: off."
    ),
]
_SpareOption = Annotated[
    int | None,
    Option(
        help="Plan a placement with replicas for the load, in which a rank holds at most this "
        "many experts beyond an even share; default: no replicas."
    ),
]


@app.command("layer")
def layer(
    models: ModelsOption = "default",
    tokens: TokensOption = "default",
    strategies: StrategiesOption = "sequential,chunked",
    skew: _SkewOption = "balanced",
    tp_size: _TpSizeOption = "1",
    max_load: _MaxLoadOption = 0,
    spare: _SpareOption = None,
    dtype: DtypeOption = "default",
    samples: SamplesOption = 11,
    seed: SeedOption = 0,
    output: OutputOption = None,
    commit: CommitOption = None,
    nproc: NprocOption = 0,
    device: DeviceOption = "auto",
) -> int:
    """Measure MoE layers with each strategy: forward, and forward with backward.

    Measures every combination of the options that take comma-separated lists. Prints a table, then
    one JSON line per measurement.
    """
    num_ranks = count_ranks(nproc, device=device)
    cases = layer_cases(
        models, tokens, skew=skew, dtype=dtype, seed=seed, spare=spare, device=device
    )
    names = split_strategy_names(strategies)
    check_samples(samples)
    _check_graphs(max_load, names, device=device)
    tp_sizes = split_integers(tp_size, option="tp_size")
    memory_bytes = rank_memory_bytes(num_ranks, device=device)
    for size in tp_sizes:
        check_memory(cases, ep_size=num_ranks, memory_bytes=memory_bytes, tp_size=size)
    case_name = _case_name(cases, names, tp_sizes, max_load)
    has_chart = case_name == _PLAIN_CASE
    where = {"device": device, "num_ranks": num_ranks}
    check_output(output, case=case_name, has_chart=has_chart, **where)
    launch_ranks(nproc, device=device)

    with (
        joined(device) as (world, _),
        saved_rows(world, output) as save,
        step_progress(world) as on_progress,
    ):
        rows: list[Row] = []
        for size in tp_sizes:
            rows += measure_layers(
                cases, names, groups=build_groups(0, device_type=world.device.type, tp_size=size),
                device=world.device, num_samples=samples, commit=commit, max_load=max_load,
                case_name=case_name, on_progress=on_progress,
                on_rows=lambda found, before=tuple(rows): save([*before, *found]),
            )  # fmt: skip
    if world.is_first:
        if output is not None and has_chart:
            draw_layer_bench(rows, results_path(output, rows[0]).with_suffix(".png"))
        print_rows(layer_table(rows), rows)
    return 0


@app.command("kernels")
def kernels(
    models: ModelsOption = "default",
    tokens: TokensOption = "default",
    dtype: DtypeOption = "default",
    seed: SeedOption = 0,
    output: Annotated[
        Path, Option(help="Folder for traces and result lines; earlier ones are replaced.")
    ] = Path("kernels"),
    commit: CommitOption = None,
    nproc: NprocOption = 0,
    device: DeviceOption = "auto",
) -> int:
    """Record when each CTA of strategy fused fetches, waits, multiplies and combines.

    Records a forward and a backward pass of a layer. Prints a table, then one JSON line per kernel.
    Writes a Chrome trace per model and number of tokens (open it in ui.perfetto.dev).
    """
    # Imported here so that other commands also run where Triton is missing.
    from halley.tools.kernel_timeline import KERNELS_CASE, kernel_table, record_case

    num_ranks = count_ranks(nproc, device=device)
    cases = layer_cases(models, tokens, dtype=dtype, seed=seed, device=device)
    memory_bytes = rank_memory_bytes(num_ranks, device=device)
    check_memory(cases, ep_size=num_ranks, memory_bytes=memory_bytes)
    where = {"device": device, "num_ranks": num_ranks}
    check_output(output, case=KERNELS_CASE, has_chart=False, **where)
    machine: Row = {"gpu": machine_name(pick_device(device)), "num_gpus": num_ranks}
    path = results_path(output, machine | {"case": KERNELS_CASE})
    names = [f"{KERNELS_CASE}-{case.model.name}-{case.num_tokens}.json.gz" for case in cases]
    for name in names:
        check_replaceable(path.with_name(name), option="output", what="a trace", start=b"\x1f\x8b")
    launch_ranks(nproc, device=device)
    with joined(device) as (world, _), saved_rows(world, output) as save:
        groups = build_groups(0, device_type=world.device.type)
        rows: list[Row] = []
        for case, name in zip(cases, names, strict=True):
            found, spans = record_case(case, groups=groups, device=world.device, commit=commit)
            rows += found
            save(rows)
            if world.is_first:
                write_chrome_trace(spans, path.with_name(name))
    if world.is_first:
        print_rows(kernel_table(rows), rows, width=180)
    return 0


def layer_cases(
    models: str,
    tokens: str,
    *,
    skew: str = "balanced",
    dtype: str,
    seed: int = 0,
    spare: int | None = None,
    device: str,
) -> list[LayerCase]:
    """Return a ``LayerCase`` for each combination of model, number of tokens and load.

    The arguments are options of commands; a wrong one is a ``ValueError``.
    """
    on_gpu = pick_device(device).type == "cuda"
    options = {"dtype": read_dtype(dtype, on_gpu=on_gpu), "seed": seed, "spare": spare}
    check_seed(seed)
    if models == "default":
        models = _BENCH_MODELS if on_gpu else "tiny"
    if tokens == "default":
        tokens = "2048,8192" if on_gpu else "512"
    configs = [find_model(name) for name in split_names(models, option="models")]
    loads = split_names(skew, option="skew")
    for config, load in product(configs, loads):
        parse_load(load, num_experts=config.moe.num_experts, top_k=config.moe.top_k)
    numbers = split_integers(tokens, option="tokens")
    return [
        LayerCase(model=config, num_tokens=num_tokens, skew=load, **options)
        for config, num_tokens, load in product(configs, numbers, loads)
    ]


def split_strategy_names(text: str) -> list[str]:
    """Split strategies at commas; raise ``ValueError`` if one is unknown, repeated or missing."""
    names = split_names(text, option="strategies")
    for name in names:
        check_strategy(name)
    return names


def _case_name(
    cases: list[LayerCase], strategies: list[str], tp_sizes: list[int], max_load: float
) -> str:
    kinds = {name.partition(":")[0] for name in strategies}
    differs = {
        "nodes": bool(kinds & {"deduplicated", "hierarchical"}),
        "skew": any(case.skew != "balanced" for case in cases),
        "placed": any(case.spare is not None for case in cases),
        "tp": tp_sizes != [1],
        "graph": bool(max_load),
    }
    return "-".join([_PLAIN_CASE, *(name for name, is_so in differs.items() if is_so)])


def _check_graphs(max_load: float, strategies: list[str], *, device: str) -> None:
    if not max_load:
        return
    must = f"max_load ({max_load}) must"
    if not 1 <= max_load < math.inf:
        raise ValueError(f"{must} be finite and at least 1, or 0 for no CUDA graphs")
    if pick_device(device).type != "cuda":
        raise ValueError(f"{must} be 0 without a GPU: graphs are CUDA's")
    if not any(name.partition(":")[0] in _CAPTURED for name in strategies):
        names = f"{', '.join(_CAPTURED[:-1])} or {_CAPTURED[-1]}"
        raise ValueError(f"{must} come with {names} in strategies: others have no graphs")


def check_output(
    output: Path | None, *, case: str, device: str, num_ranks: int, has_chart: bool
) -> None:
    """Raise ``ValueError`` unless result lines, and with ``has_chart`` a chart, can be saved."""
    if output is None:
        return
    if has_chart:
        check_package("matplotlib", extra="plot", option=f"output ({output})")
    gpu = machine_name(pick_device(device))
    path = results_path(output, {"gpu": gpu, "num_gpus": num_ranks, "case": case})
    what = "result lines of halley bench"
    check_replaceable(path, option="output", what=what, start=b"{", inside=b'"case": ')
    if has_chart:
        check_replaceable(path.with_suffix(".png"), option="output", **CHART)


@contextmanager
def saved_rows(world: World, output: Path | None) -> Iterator[Callable[[list[Row]], None]]:
    """Yield a function that saves result lines, so that an error or interrupt does not lose them.

    Without a folder ``output``, the lines are printed if an error or an interrupt ends the block.
    Only the first rank writes and prints.
    """
    rows: list[Row] = []

    def save(found: list[Row]) -> None:
        rows[:] = found
        if output is not None and world.is_first and found:
            write_rows(found, output)

    try:
        yield save
    except BaseException:
        if output is None and world.is_first:
            _print_json(rows)
        raise


def print_rows(table: Table, rows: list[Row], *, width: int = 140) -> None:
    """Print a table, then rows as JSON lines; ``width`` limits the table outside of a terminal."""
    Console(width=None if Console().is_terminal else width).print(table)
    _print_json(rows)


def _print_json(rows: list[Row]) -> None:
    for row in rows:
        typer.echo(json.dumps(row))


def layer_table(rows: list[Row]) -> Table:
    """Return a table of the layer benchmark's result lines, with times in microseconds."""
    gpu, count = rows[0]["gpu"], rows[0]["num_gpus"]
    table = Table(
        title=f"MoE layer on {count} x {gpu}: slowest rank, us",
        caption="routing +N: placed experts, N spare per rank; /N: N ranks share an expert; "
        "floor: lower bound (GEMMs or wire alone); hidden: (unfused - fused) / wire; "
        "error: of the worst tensor; = same bits",
    )
    for name in ("model", "tokens", "routing", "direction", "strategy"):
        table.add_column(name, no_wrap=True)
    for name in ("median", "p90", "floor", "/ floor", "exposed", "hidden", "MiB", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        median, bound = row["median_us"], row["floor_us"]
        # Column "routing", as "zipf:1.2 +1 /2": load, 1 spare expert per rank, 2 ranks per expert.
        placed = "" if row.get("spare") is None else f" +{row['spare']}"
        shared = "" if row["tp_size"] == 1 else f" /{row['tp_size']}"
        table.add_row(
            str(row["model"]),
            str(row["num_tokens"]),
            f"{row['skew']}{placed}{shared}",
            "fwd" if row["direction"] == "forward" else "fwd+bwd",
            f"{row['strategy']} {row['setting'] or ''}".strip(),
            format_number(median) if median else "[red]wrong",
            format_number(row["p90_us"]),
            format_number(bound),
            f"{to_float(median) / to_float(bound):.2f}" if median else "",
            format_number(row["exposed_comm_us"]),
            "" if row.get("hidden") is None else f"{to_float(row['hidden']):.0%}",
            format_number(row["peak_mib"]),
            f"{to_float(row['max_rel_err']):.0e}" + ("=" if row["bit_equal"] else " "),
        )
    return table


def format_ms(duration_us: object) -> str:
    """Return a time in microseconds as a text in milliseconds with two decimals; "" for None."""
    return "" if duration_us is None else f"{to_float(duration_us) / 1e3:.2f}"


def format_number(value: object) -> str:
    """Return a number as a text without decimals, with commas between thousands; "" for None."""
    return "" if value is None else f"{to_float(value):,.0f}"


def report(
    files: Annotated[
        list[Path],
        Argument(help="Results of halley bench (.jsonl) and traces of halley trace (.json.gz)."),
    ],
    output: Annotated[
        Path, Option(help="HTML file to write; an earlier report is replaced.")
    ] = Path("report.html"),
) -> int:
    """Write an HTML page with charts of benchmark results and timelines of traced steps.

    The page needs no network: send it, or open it in a browser. Prints one JSON line.
    """
    check_replaceable(
        output,
        option="output",
        what="a report",
        start=b"<!doctype html>",
        inside=b"<title>Halley report</title>",
    )
    results = [row for path in files if path.suffix == ".jsonl" for row in read_results(path)]
    traces = {str(path): read_trace(path) for path in files if path.suffix != ".jsonl"}
    write_report(results, traces, output)
    typer.echo(json.dumps({"output": str(output), "rows": len(results), "traces": len(traces)}))
    return 0
