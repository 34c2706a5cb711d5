"""Measure training steps of whole models: forward, backward and optimizer, by each strategy.

    python -m benchmarks.model_bench --nproc 4 --output benchmarks/results

Run it in the root of the repository. ``--help`` lists the options.
"""

import sys
from typing import Annotated

import torch
import typer
from rich.table import Table

from benchmarks.model_bench.case import ModelCase, check_memory, cut_model
from benchmarks.model_bench.measure import measure_models
from halley.cli.bench import (
    CommitOption,
    DeviceOption,
    ModelsOption,
    NprocOption,
    OutputOption,
    SamplesOption,
    SeedOption,
    StrategiesOption,
    TokensOption,
    check_output,
    format_ms,
    format_number,
    print_rows,
    saved_rows,
    split_strategy_names,
)
from halley.cli.checks import (
    check_samples,
    check_seed,
    rank_memory_bytes,
    read_dtype,
    split_integers,
    split_names,
)
from halley.cli.main import main as run_command
from halley.cli.ranks import count_ranks, joined, launch_ranks, step_progress
from halley.core.config import OptimizerConfig
from halley.distributed.mesh import build_groups, pick_device
from halley.tools.timer import Row, to_float
from halley.train.optim import ModelOptimizer


app = typer.Typer(name="benchmarks.model_bench", add_completion=False, rich_markup_mode="markdown")

_SEQ_LEN = 4096


@app.command()
def model(
    models: ModelsOption = "default",
    layers: Annotated[
        str, typer.Option(help="Layers of each model, comma-separated, or 'default'.")
    ] = "default",
    tokens: TokensOption = "default",
    seq_len: Annotated[
        int, typer.Option(help="Tokens per sequence; 0: all tokens of a rank, at most 4096.")
    ] = 0,
    strategies: StrategiesOption = "sequential,chunked",
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float32, or 'default' for the device.")
    ] = "default",
    samples: SamplesOption = 11,
    seed: SeedOption = 0,
    output: OutputOption = None,
    commit: CommitOption = None,
    nproc: NprocOption = 0,
    device: DeviceOption = "auto",
) -> int:
    """Measure training steps of whole models by each strategy.

    Models have their own width and the given number of layers. Prints a table, then one JSON line
    per strategy.
    """
    num_ranks = count_ranks(nproc, device=device)
    on_gpu = pick_device(device).type == "cuda"
    cases = _model_cases(
        models if models != "default" else "qwen3-30b-a3b" if on_gpu else "tiny",
        layers if layers != "default" else "4" if on_gpu else "2",
        tokens if tokens != "default" else "8192" if on_gpu else "256",
        seq_len=seq_len,
        dtype=read_dtype(dtype, on_gpu=on_gpu),
        seed=seed,
    )
    names = split_strategy_names(strategies)
    check_samples(samples)
    memory_bytes = rank_memory_bytes(num_ranks, device=device)
    for case in cases:
        check_memory(case, num_ranks=num_ranks, memory_bytes=memory_bytes)
    check_output(output, case="model", device=device, num_ranks=num_ranks, has_chart=False)
    launch_ranks(nproc, device=device)

    with joined(device) as (world, _):
        groups = build_groups(0, device_type=world.device.type)
        with saved_rows(world, output) as save, step_progress(world) as on_progress:
            rows = measure_models(
                cases,
                names,
                make_optimizer=lambda m: ModelOptimizer(m, OptimizerConfig(), groups=groups),
                groups=groups,
                device=world.device,
                num_samples=samples,
                commit=commit,
                on_progress=on_progress,
                on_rows=save,
            )
        if world.is_first:
            print_rows(model_table(rows), rows)
    return 0


def _model_cases(
    models: str, layers: str, tokens: str, *, seq_len: int, dtype: torch.dtype, seed: int
) -> list[ModelCase]:
    check_seed(seed)
    if seq_len < 0:
        raise ValueError(f"seq_len ({seq_len}) must be at least 1, or 0 for all tokens up to 4096")
    return [
        ModelCase(
            model=cut_model(name, num_layers=num_layers),
            num_tokens=num_tokens,
            seq_len=seq_len or min(num_tokens, _SEQ_LEN),
            dtype=dtype,
            seed=seed,
        )
        for name in split_names(models, option="models")
        for num_layers in split_integers(layers, option="layers")
        for num_tokens in split_integers(tokens, option="tokens")
    ]


def model_table(rows: list[Row]) -> Table:
    """Return the result lines as a table, times in milliseconds.

    Speed is relative to the first strategy of the same model, layers and tokens.
    """
    gpu, count = rows[0]["gpu"], rows[0]["num_gpus"]
    table = Table(
        title=f"Training step on {count} x {gpu}: slowest rank, ms",
        caption="floor: lower bound of the MoE layers (GEMMs or wire alone); error: of loss and "
        "gradient norms",
    )
    for name in ("model", "layers", "tokens", "strategy"):
        table.add_column(name, no_wrap=True)
    has_mfu = any(row["mfu"] is not None for row in rows)  # not on CPUs
    names = ["median", "p90", "speed", "floor", "exposed", "tokens/s", "MiB", "error"]
    names[6:6] = ["MFU"] if has_mfu else []
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    firsts: dict[object, object] = {}
    for row in rows:
        setting = f" {row['setting']}" if row["setting"] else ""
        median, mfu = row["median_us"], row["mfu"]
        first = firsts.setdefault((row["model"], row["num_layers"], row["num_tokens"]), median)
        table.add_row(
            str(row["model"]),
            str(row["num_layers"]),
            str(row["num_tokens"]),
            f"{row['strategy']}{setting}",
            format_ms(median) if median else "[red]wrong",
            format_ms(row["p90_us"]),
            f"{to_float(first) / to_float(median):.2f}x" if median and first else "",
            format_ms(row["floor_us"]),
            format_ms(row["exposed_comm_us"]),
            format_number(row["tokens_per_s"]),
            *(["" if mfu is None else f"{to_float(mfu):.1%}"] if has_mfu else []),
            format_number(row["peak_mib"]),
            f"{to_float(row['max_rel_err']):.0e}",
        )
    return table


def main(argv: list[str] | None = None) -> int:
    """Run the command; arguments and exit code as for ``halley.cli.main``."""
    return run_command(argv, commands=app, module="benchmarks.model_bench")


if __name__ == "__main__":
    sys.exit(main())
