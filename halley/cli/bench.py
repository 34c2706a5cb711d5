"""``halley bench``: measure layers and training steps of whole models."""

import json
import math
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from halley.cli.bars import step_progress
from halley.cli.checks import (
    check_samples,
    check_seed,
    rank_memory_bytes,
    read_dtype,
    split_integers,
    split_names,
)
from halley.cli.kept_rows import check_output, kept_rows
from halley.cli.ranks import count_ranks, hand_to_ranks, joined
from halley.cli.tables import layer_table, model_table
from halley.core.config import OptimizerConfig
from halley.core.models import find_model
from halley.distributed.mesh import build_groups
from halley.distributed.world import pick_device
from halley.strategies.registry import check_strategy
from halley.tools.candidates import check_case_memory
from halley.tools.charts import draw_layer_bench
from halley.tools.layer_bench import LayerCase, measure_layers
from halley.tools.model_bench import measure_models
from halley.tools.model_case import ModelCase, check_memory, cut_model
from halley.tools.results import Row, results_path
from halley.tools.skew import parse_load
from halley.train.optim import ModelOptimizer


app = typer.Typer(help="Measure layers and models.", no_args_is_help=True)

_BENCH_MODELS = "mixtral-8x7b,phi-3.5-moe,qwen2-moe,qwen3-30b-a3b,deepseek-v3"
_SEQ_LEN = 4096
_PLAIN = "layer"  # the case that has a chart

OUTPUT_HELP = "Folder for lines and chart, in place of those of the same case and machine."
ModelsOption = Annotated[str, typer.Option(help="Named models, or 'default'.")]
TokensOption = Annotated[str, typer.Option(help="Tokens a rank, or 'default'.")]
StrategiesOption = Annotated[str, typer.Option(help="Strategies.")]
DtypeOption = Annotated[str, typer.Option(help="bfloat16, float16, float32 or default.")]
SamplesOption = Annotated[int, typer.Option(help="Counted samples of each variant.")]
SkewOption = Annotated[str, typer.Option(help="Of balanced, std:X, cv:X, zipf:X, one-hot.")]
SpareOption = Annotated[
    int | None, typer.Option(help="Place experts by the routing, with so many spare a rank.")
]
CommitOption = Annotated[str | None, typer.Option(help="Written into the lines.")]
NprocOption = Annotated[int, typer.Option(help="Ranks; 0 is one a GPU, or 2.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


@app.command("layer")
def layer(
    models: ModelsOption = "default",
    tokens: TokensOption = "default",
    strategies: StrategiesOption = "sequential,chunked",
    skew: SkewOption = "balanced",
    tp_size: Annotated[str, typer.Option(help="Numbers of ranks that share each expert.")] = "1",
    max_load: Annotated[float, typer.Option(help="Also CUDA graphs, with that room; 0 none.")] = 0,
    spare: SpareOption = None,
    dtype: DtypeOption = "default",
    samples: SamplesOption = 11,
    seed: Annotated[int, typer.Option(help="Of tokens, weights and routing.")] = 0,
    output: Annotated[Path | None, typer.Option(help=OUTPUT_HELP)] = None,
    commit: CommitOption = None,
    nproc: NprocOption = 0,
    device: DeviceOption = "auto",
) -> int:
    """Measure the MoE layer of models: forward, and forward with backward, by each strategy.

    Prints a table, then one JSON line for each measurement; takes lists with commas between.
    """
    num_ranks = count_ranks(nproc, device=device)
    on_gpu = pick_device(device).type == "cuda"
    cases = layer_cases(
        models if models != "default" else default_models(on_gpu=on_gpu),
        tokens if tokens != "default" else default_tokens(on_gpu=on_gpu),
        skew=skew,
        dtype=read_dtype(dtype, on_gpu=on_gpu),
        seed=seed,
        spare=spare,
    )
    names = _strategies(strategies)
    check_samples(samples)
    _check_graphs(max_load, names, on_gpu=on_gpu)
    tp_sizes = split_integers(tp_size, option="tp_size")
    options = {"memory_bytes": rank_memory_bytes(num_ranks, device=device), "backward": True}
    for case, size in product(cases, tp_sizes):
        check_case_memory(case, ep_size=num_ranks, tp_size=size, **options)
    case_name = _case_name(cases, tp_sizes, max_load)
    where = {"device": pick_device(device), "num_ranks": num_ranks}
    check_output(output, case=case_name, has_chart=case_name == _PLAIN, **where)
    code = hand_to_ranks(nproc, device=device)
    if code is not None:
        return code

    with (
        joined(device) as (world, _),
        kept_rows(world, output) as keep,
        step_progress(world) as on_progress,
    ):
        rows: list[Row] = []
        for size in tp_sizes:
            rows += measure_layers(
                cases, names, groups=build_groups(0, device_type=world.device.type, tp_size=size),
                device=world.device, num_samples=samples, commit=commit, max_load=max_load,
                case_name=case_name, on_progress=on_progress,
                on_rows=lambda found, before=tuple(rows): keep([*before, *found]),
            )  # fmt: skip
    return _report(rows, output) if world.is_first else 0


def _case_name(cases: list[LayerCase], tp_sizes: list[int], max_load: float) -> str:
    """Return the name of the lines, and of their file, by what is not plain about them."""
    named = {
        "skew": any(case.skew != "balanced" for case in cases),
        "placed": any(case.spare is not None for case in cases),
        "tp": tp_sizes != [1],
        "graph": bool(max_load),
    }
    return "-".join([_PLAIN, *(name for name, is_so in named.items() if is_so)])


def _report(rows: list[Row], output: Path | None) -> int:
    if output is not None and rows[0]["case"] == _PLAIN:  # a chart has one bar a strategy
        draw_layer_bench(rows, results_path(output, rows[0]).with_suffix(".png"))
    print_rows(layer_table(rows), rows)
    return 0


@app.command("model")
def model(
    models: ModelsOption = "default",
    layers: Annotated[str, typer.Option(help="Layers of each model, or 'default'.")] = "default",
    tokens: TokensOption = "default",
    seq_len: Annotated[int, typer.Option(help="Tokens a sequence; 0 is all, up to 4096.")] = 0,
    strategies: StrategiesOption = "sequential,chunked",
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or default.")] = "default",
    samples: SamplesOption = 11,
    seed: Annotated[int, typer.Option(help="Of tokens and weights.")] = 0,
    output: Annotated[Path | None, typer.Option(help=OUTPUT_HELP)] = None,
    commit: CommitOption = None,
    nproc: NprocOption = 0,
    device: DeviceOption = "auto",
) -> int:
    """Measure training steps of whole models: forward, backward and optimizer, by each strategy.

    Models are as wide as their names say and as deep as asked. Prints a table, then one JSON line
    for each strategy.
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
    names = _strategies(strategies)
    check_samples(samples)
    memory_bytes = rank_memory_bytes(num_ranks, device=device)
    for case in cases:
        check_memory(case, num_ranks=num_ranks, memory_bytes=memory_bytes)
    check_output(
        output, case="model", device=pick_device(device), num_ranks=num_ranks, has_chart=False
    )
    code = hand_to_ranks(nproc, device=device)
    if code is not None:
        return code

    with joined(device) as (world, _):
        groups = build_groups(0, device_type=world.device.type)
        with kept_rows(world, output) as keep, step_progress(world) as on_progress:
            rows = measure_models(
                cases,
                names,
                make_optimizer=lambda m: ModelOptimizer(m, OptimizerConfig(), groups=groups),
                groups=groups,
                device=world.device,
                num_samples=samples,
                commit=commit,
                on_progress=on_progress,
                on_rows=keep,
            )
        if world.is_first:
            print_rows(model_table(rows), rows)
    return 0


def print_rows(table: Table, rows: list[Row], *, width: int = 140) -> None:
    """Print a table for people, of that width where there is no terminal, then the lines."""
    Console(width=None if Console().is_terminal else width).print(table)
    for row in rows:
        typer.echo(json.dumps(row))


def default_models(*, on_gpu: bool) -> str:
    """Return the models whose layers are measured unless others are named."""
    return _BENCH_MODELS if on_gpu else "tiny"


def default_tokens(*, on_gpu: bool) -> str:
    """Return the tokens a rank with which they are."""
    return "2048,8192" if on_gpu else "512"


def layer_cases(
    models: str,
    tokens: str,
    *,
    skew: str,
    dtype: torch.dtype,
    seed: int,
    spare: int | None = None,
) -> list[LayerCase]:
    """Return the cases of all models, numbers of tokens and loads that the words name."""
    check_seed(seed)
    configs = [find_model(name) for name in split_names(models, option="models")]
    loads = split_names(skew, option="skew")
    for config in configs:
        for load in loads:
            parse_load(load, num_experts=config.moe.num_experts, top_k=config.moe.top_k)
    return [
        LayerCase(
            model=config, num_tokens=num_tokens, skew=load, dtype=dtype, seed=seed, spare=spare
        )
        for config in configs
        for num_tokens in split_integers(tokens, option="tokens")
        for load in loads
    ]


def _strategies(words: str) -> list[str]:
    names = split_names(words, option="strategies")
    for name in names:
        check_strategy(name)
    return names


def _check_graphs(max_load: float, strategies: list[str], *, on_gpu: bool) -> None:
    if max_load and not 1 <= max_load < math.inf:
        raise ValueError(
            f"max_load ({max_load}) must be finite and at least 1, or 0 for no CUDA graphs"
        )
    if max_load and not on_gpu:
        raise ValueError(f"max_load ({max_load}) must be 0 without a GPU: graphs are CUDA's")
    if max_load and not any(name.partition(":")[0] in ("fused", "unfused") for name in strategies):
        raise ValueError(
            f"max_load ({max_load}) must come with fused or unfused in strategies: others have no "
            "CUDA graphs"
        )


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
