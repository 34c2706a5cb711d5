"""``halley bench layer``: measure the MoE layers of named models with each strategy."""

import math
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer

from halley.cli.checks import (
    check_samples,
    check_seed,
    rank_memory_bytes,
    read_dtype,
    split_integers,
    split_names,
)
from halley.cli.ranks import NprocOption, count_ranks, joined, launch_ranks
from halley.cli.result_rows import check_output, layer_table, print_rows, saved_rows, step_progress
from halley.core.models import find_model
from halley.distributed.mesh import build_groups, pick_device
from halley.strategies.registry import STRATEGIES, check_strategy
from halley.tools.bar_charts import draw_layer_bench
from halley.tools.candidates import check_case_memory
from halley.tools.layer_bench import measure_layers
from halley.tools.layer_case import LayerCase
from halley.tools.results import Row, results_path
from halley.tools.skew import parse_load


app = typer.Typer(help="Measure MoE layers.", no_args_is_help=True)

_BENCH_MODELS = "mixtral-8x7b,phi-3.5-moe,qwen2-moe,qwen3-30b-a3b,deepseek-v3"
_PLAIN_CASE = "layer"  # the only case with a chart
_MOVED = {"allow_extra_args": True, "ignore_unknown_options": True}

OutputOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder for result files. Earlier results of the same benchmark, device and number of "
        "ranks are replaced."
    ),
]
ModelsOption = Annotated[
    str, typer.Option(help="Names of models, comma-separated; 'default' depends on the device.")
]
TokensOption = Annotated[
    str, typer.Option(help="Tokens per rank, comma-separated; 'default' depends on the device.")
]
StrategiesOption = Annotated[
    str,
    typer.Option(help=f"Strategies to compare, comma-separated, out of: {', '.join(STRATEGIES)}."),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="bfloat16, float16 or float32; 'default' is bfloat16 on GPUs and float32 on CPUs."
    ),
]
SamplesOption = Annotated[int, typer.Option(help="Timed runs of each variant.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the random tensors.")]
CommitOption = Annotated[
    str | None,
    typer.Option(help="Git commit to write into the result lines; default: that of the checkout."),
]
DeviceOption = Annotated[
    str, typer.Option(help="cpu or cuda; auto is cuda if there is a GPU, else cpu.")
]

_SkewOption = Annotated[
    str,
    typer.Option(
        help="Loads to measure, comma-separated, out of: balanced; std:X, shares of the experts "
        "with standard deviation X; cv:X, shares with standard deviation X times their mean; "
        "zipf:X, shares proportional to 1 / (index of the expert) ^ X; one-hot, one expert that "
        "every token chooses."
    ),
]
_TpSizeOption = Annotated[
    str, typer.Option(help="Ranks that share each expert (tensor parallelism), comma-separated.")
]
_MaxLoadOption = Annotated[
    float,
    typer.Option(
        help="Also measure unfused and fused as CUDA graphs, with buffers for this multiple of the "
        "balanced load; 0: off."
    ),
]
_SpareOption = Annotated[
    int | None,
    typer.Option(
        help="Plan a placement with replicas for the load, in which a rank holds at most this many "
        "experts beyond an even share; default: no replicas."
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
    on_gpu = pick_device(device).type == "cuda"
    cases = layer_cases(
        models, tokens, skew=skew, dtype=read_dtype(dtype, on_gpu=on_gpu), seed=seed, spare=spare,
        on_gpu=on_gpu,
    )  # fmt: skip
    names = split_strategy_names(strategies)
    check_samples(samples)
    _check_graphs(max_load, names, on_gpu=on_gpu)
    tp_sizes = split_integers(tp_size, option="tp_size")
    needs = {"memory_bytes": rank_memory_bytes(num_ranks, device=device), "backward": True}
    for case, size in product(cases, tp_sizes):
        check_case_memory(case, ep_size=num_ranks, tp_size=size, **needs)
    case_name = _case_name(cases, tp_sizes, max_load)
    where = {"device": pick_device(device), "num_ranks": num_ranks}
    check_output(output, case=case_name, has_chart=case_name == _PLAIN_CASE, **where)
    code = launch_ranks(nproc, device=device)
    if code is not None:
        return code

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
        if output is not None and case_name == _PLAIN_CASE:
            draw_layer_bench(rows, results_path(output, rows[0]).with_suffix(".png"))
        print_rows(layer_table(rows), rows)
    return 0


@app.command("model", hidden=True, context_settings=_MOVED)
@app.command("graph", hidden=True, context_settings=_MOVED)
def moved(context: typer.Context) -> None:
    """Refuse a command of an earlier version, and name the script that replaces it."""
    name = context.info_name
    raise ValueError(
        f"halley bench {name} is now a script: run `python -m benchmarks.{name}_bench` with the "
        "same options in a checkout of Halley's repository"
    )


def layer_cases(
    models: str,
    tokens: str,
    *,
    skew: str = "balanced",
    dtype: torch.dtype,
    seed: int = 0,
    spare: int | None = None,
    on_gpu: bool,
) -> list[LayerCase]:
    """Return one case for each combination of model, number of tokens and load.

    Args:
        models, tokens: comma-separated, or "default".
        skew: comma-separated loads, in the syntax of ``parse_load``.
        dtype, seed, spare: as for ``LayerCase``.
        on_gpu: whether "default" means models and tokens for GPUs.

    Raises:
        ValueError: a name, number or load is wrong.
    """
    check_seed(seed)
    if models == "default":
        models = _BENCH_MODELS if on_gpu else "tiny"
    if tokens == "default":
        tokens = "2048,8192" if on_gpu else "512"
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


def split_strategy_names(text: str) -> list[str]:
    """Split a comma-separated list of strategies; raise ``ValueError`` if one is unknown."""
    names = split_names(text, option="strategies")
    for name in names:
        check_strategy(name)
    return names


def _case_name(cases: list[LayerCase], tp_sizes: list[int], max_load: float) -> str:
    """Return the value of the key "case": "layer", then the options that differ from defaults."""
    differs = {
        "skew": any(case.skew != "balanced" for case in cases),
        "placed": any(case.spare is not None for case in cases),
        "tp": tp_sizes != [1],
        "graph": bool(max_load),
    }
    return "-".join([_PLAIN_CASE, *(name for name, is_so in differs.items() if is_so)])


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
