"""``halley bench``: measure layers."""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from halley.cli.bars import step_progress
from halley.cli.checks import check_package, read_dtype
from halley.cli.ranks import count_ranks, hand_to_ranks, joined
from halley.cli.tables import layer_table
from halley.core.models import find_model
from halley.core.routing import local_experts
from halley.core.skew import parse_load
from halley.moe.parallel import build_groups
from halley.moe.strategy import STRATEGIES
from halley.moe.world import pick_device
from halley.perf.bench import LayerCase, measure_layers
from halley.perf.charts import draw_layer_bench
from halley.perf.results import results_path, write_rows
from halley.train.checkpoint import check_writable


app = typer.Typer(help="Measure layers.", no_args_is_help=True)

_BENCH_MODELS = "mixtral-8x7b,phi-3.5-moe,qwen2-moe,qwen3-30b-a3b,deepseek-v3"


@app.callback()
def _bench() -> None:
    """Measure layers."""


@app.command("layer")
def layer(
    models: Annotated[str, typer.Option(help="Named models, or 'default'.")] = "default",
    tokens: Annotated[str, typer.Option(help="Tokens a rank, or 'default'.")] = "default",
    strategies: Annotated[str, typer.Option(help="Strategies.")] = "sequential,chunked",
    skew: Annotated[str, typer.Option(help="Of balanced, std:X, zipf:X, one-hot.")] = "balanced",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or default.")] = "default",
    samples: Annotated[int, typer.Option(help="Counted samples of each variant.")] = 11,
    seed: Annotated[int, typer.Option(help="Of tokens, weights and routing.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder for lines and chart.")] = None,
    commit: Annotated[str | None, typer.Option(help="Written into the lines.")] = None,
    nproc: Annotated[int, typer.Option(help="Ranks; 0 is one a GPU, or 2.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> int:
    """Measure the MoE layer of models: forward, and forward with backward, by each strategy.

    Prints a table, then one JSON line for each measurement.
    """
    num_ranks = count_ranks(nproc, device=device)
    on_gpu = pick_device(device).type == "cuda"
    if models == "default":
        models = _BENCH_MODELS if on_gpu else "tiny"
    if tokens == "default":
        tokens = "2048,8192" if on_gpu else "512"
    cases = _cases(models, tokens, skew=skew, dtype=read_dtype(dtype, on_gpu=on_gpu), seed=seed)
    names = _split(strategies, option="strategies")
    if unknown := [name for name in names if name not in STRATEGIES]:
        raise ValueError(f"strategy ({unknown[0]}) must be one of {', '.join(STRATEGIES)}")
    if samples < 1:
        raise ValueError(f"samples ({samples}) must be at least 1")
    for case in cases:
        local_experts(case.model.moe.num_experts, ep_size=num_ranks)
    if output is not None:
        check_package("matplotlib", extra="plot", option=f"output ({output})")
        check_writable(output)
    code = hand_to_ranks(nproc, device=device)
    if code is not None:
        return code

    with joined(device) as (world, _):
        groups = build_groups(0, device_type=world.device.type)
        with step_progress(world) as on_progress:
            rows = measure_layers(
                cases,
                names,
                groups=groups,
                device=world.device,
                num_samples=samples,
                commit=commit,
                on_progress=on_progress,
            )
        if world.is_first:
            Console(width=None if Console().is_terminal else 120).print(layer_table(rows))
            if output is not None:
                write_rows(rows, output)
                draw_layer_bench(rows, results_path(output, rows[0]).with_suffix(".png"))
            for row in rows:
                typer.echo(json.dumps(row))
    return 0


def _cases(
    models: str, tokens: str, *, skew: str, dtype: torch.dtype, seed: int
) -> list[LayerCase]:
    if seed < 0:
        raise ValueError(f"seed ({seed}) must be at least 0")
    configs = [find_model(name) for name in _split(models, option="models")]
    loads = _split(skew, option="skew")
    for config in configs:
        for load in loads:
            parse_load(load, num_experts=config.moe.num_experts, top_k=config.moe.top_k)
    return [
        LayerCase(model=config, num_tokens=num_tokens, skew=load, dtype=dtype, seed=seed)
        for config in configs
        for num_tokens in _positive_integers(tokens, option="tokens")
        for load in loads
    ]


def _split(text: str, *, option: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError(f"{option} ({text}) must name at least one")
    return words


def _positive_integers(text: str, *, option: str) -> list[int]:
    words = _split(text, option=option)
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{option} ({text}) must be positive integers with commas between")
    return [int(word) for word in words]
