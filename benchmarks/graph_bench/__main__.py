"""Measure the compiler passes and lanes in training steps of GPT-2 and catalogue models.

    python -m benchmarks.graph_bench --nproc 4 --output benchmarks/results
    python -m benchmarks.graph_bench --nproc 2 --models mixtral-8x7b --layers 4 --fixed-sizes

Run it in the root of the repository. ``--help`` lists the options.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.graph_bench.case import (
    DIVIDED,
    VARIANTS,
    GraphCase,
    check_inner,
    graph_case_name,
)
from benchmarks.graph_bench.catalogue import CatalogueShape, find_catalogue_shape
from benchmarks.graph_bench.gpt2_moe import GPT2Shape, check_gate, find_shape
from benchmarks.graph_bench.report import draw_graph_bench, graph_table
from halley.cli.bench import (
    CommitOption,
    DeviceOption,
    NprocOption,
    OutputOption,
    SamplesOption,
    SeedOption,
    check_output,
    print_rows,
    saved_rows,
)
from halley.cli.checks import check_known, check_samples, check_seed, read_dtype, split_names
from halley.cli.main import main as run_command
from halley.cli.ranks import count_ranks, joined, launch_ranks, step_progress
from halley.distributed.mesh import build_groups, pick_device
from halley.tools.timer import Row, results_path


app = typer.Typer(name="benchmarks.graph_bench", add_completion=False, rich_markup_mode="markdown")

# Environment of NCCL, to make the link between GPUs of one host as slow as between hosts.
_SLOW_LINKS: dict[str, dict[str, str]] = {
    "none": {},
    # One NCCL channel over NVLink: about 150 Gb/s per GPU (4 H200).
    "channels": {"NCCL_MAX_NCHANNELS": "1"},
    # TCP, as if each rank were on its own host: about 50 Gb/s per GPU, 25 with fewer threads.
    "sockets": {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_NTHREADS": "8",
        "NCCL_NSOCKS_PERTHREAD": "4",
    },
}


_ModelsOption = Annotated[
    str, typer.Option(help="Models, comma-separated; 'default' depends on the device.")
]
_VariantsOption = Annotated[
    str, typer.Option(help="Variants of the step, comma-separated, or 'all'.")
]
_InnerOption = Annotated[
    str, typer.Option(help="Compiler that runs after the passes: inductor or eager.")
]
_GateOption = Annotated[
    str, typer.Option(help="Router of GPT-2 models: switch, top2, prioritized or dropless.")
]
_LayersOption = Annotated[
    int, typer.Option(help="Layers of the models, which are of Halley's catalogue; 0: GPT-2.")
]
_SeqLenOption = Annotated[
    int, typer.Option(help="Tokens of a sequence; 0: the default of the model.")
]
_BatchOption = Annotated[int, typer.Option(help="Sequences per rank; 0: the default of the model.")]
_MicrobatchesOption = Annotated[
    int, typer.Option(help="Microbatches of a step; each has the sequences of --batch.")
]
_FixedSizesOption = Annotated[
    bool,
    typer.Option(help="Send messages of fixed sizes, so that no host reads counts."),
]
_MaxLoadOption = Annotated[
    float,
    typer.Option(
        help="Fixed sizes, in multiples of the balanced load. 0: 1.25 for models of the catalogue, "
        "the capacity of the experts for GPT-2."
    ),
]
_ActivationBudgetOption = Annotated[
    float,
    typer.Option(help="Share of activations that compiled variants save; below 1 they recompute."),
]
_MemoryMarginOption = Annotated[
    float, typer.Option(help="Share by which the passes may raise peak memory.")
]
_SlowLinkOption = Annotated[str, typer.Option(help="Slow NCCL down: channels, sockets or none.")]
_DtypeOption = Annotated[str, typer.Option(help="bfloat16, float32, or 'default' for the device.")]


@app.command()
def graph(
    models: _ModelsOption = "default",
    variants: _VariantsOption = "all",
    inner: _InnerOption = "inductor",
    gate: _GateOption = "switch",
    layers: _LayersOption = 0,
    seq_len: _SeqLenOption = 0,
    batch: _BatchOption = 0,
    microbatches: _MicrobatchesOption = 1,
    fixed_sizes: _FixedSizesOption = False,
    max_load: _MaxLoadOption = 0.0,
    activation_budget: _ActivationBudgetOption = 1.0,
    memory_margin: _MemoryMarginOption = 0.02,
    slow_link: _SlowLinkOption = "none",
    dtype: _DtypeOption = "default",
    samples: SamplesOption = 11,
    seed: SeedOption = 0,
    output: OutputOption = None,
    commit: CommitOption = None,
    nproc: NprocOption = 0,
    device: DeviceOption = "auto",
) -> int:
    """Measure forward and backward of MoE models, without and with the compiler passes.

    Other variants are microbatches in lanes, one batch divided into two lanes, the strategies
    sequential and chunked in eager mode, and Inductor's own overlap scheduler. With --layers, the
    models are those of Halley's catalogue, at their own width. Prints a table, then one JSON line
    per model and variant.
    """
    num_ranks = count_ranks(nproc, device=device)
    if num_ranks < 2:
        raise ValueError(f"nproc ({num_ranks}) must be at least 2: one rank has no all-to-alls")
    on_gpu = pick_device(device).type == "cuda"
    if layers < 0 or seq_len < 0:
        raise ValueError(f"layers ({layers}) and seq_len ({seq_len}) must be at least 0")
    if models == "default":
        models = "gpt2-s-moe,gpt2-l-moe" if on_gpu else "gpt2-tiny-moe"
    cases = [
        GraphCase(
            shape=shape,
            gate=check_gate(gate),
            batch_size=batch or shape.batch_size,
            num_microbatches=microbatches,
            dtype=read_dtype(dtype, on_gpu=on_gpu),
            inner=check_inner(inner),
            fixed_sizes=fixed_sizes,
            max_load=max_load,
            activation_budget=activation_budget,
            memory_margin=memory_margin,
            seed=seed,
        )
        for name in split_names(models, option="models")
        for shape in (_shape(name, layers, num_ranks=num_ranks, seq_len=seq_len),)
    ]
    names = _variants(variants, num_microbatches=microbatches)
    check_seed(seed)
    check_samples(samples)
    _check_link(slow_link, on_gpu=on_gpu)
    where = {"device": device, "num_ranks": num_ranks}
    check_output(output, case=graph_case_name(slow_link), has_chart=True, **where)
    launch_ranks(nproc, device=device)
    _slow_down(slow_link)
    rows = _measure(
        cases, names, samples=samples, link=slow_link, commit=commit, device=device, output=output
    )
    if rows:
        _report(rows, output)
    return 0


def _measure(
    cases: list[GraphCase],
    variants: list[str],
    *,
    samples: int,
    link: str,
    commit: str | None,
    device: str,
    output: Path | None,
) -> list[Row]:
    """Return the result lines on the first rank, none on the others."""
    # Imported here because torch's compiler imports Triton. On a CPU, Halley's interpreter must be
    # installed before that import.
    import halley.interpreter  # noqa: F401  # isort: split
    from benchmarks.graph_bench.measure import measure_graph_cases

    with joined(device) as (world, _):
        groups = build_groups(0, device_type=world.device.type)
        with saved_rows(world, output) as save, step_progress(world) as on_progress:
            rows = measure_graph_cases(
                cases,
                variants,
                groups=groups,
                device=world.device,
                num_samples=samples,
                commit=commit,
                slow_link=link,
                on_progress=on_progress,
                on_rows=save,
            )
        return rows if world.is_first else []


def _report(rows: list[Row], output: Path | None) -> None:
    if output is not None:
        draw_graph_bench(rows, results_path(output, rows[0]).with_suffix(".png"))
    for row in rows:
        if row["error"]:
            typer.echo(f"{row['model']} {row['variant']}: {row['error']}", err=True)
    print_rows(graph_table(rows), rows, width=160)


def _shape(
    name: str, num_layers: int, *, num_ranks: int, seq_len: int
) -> GPT2Shape | CatalogueShape:
    """Return the sizes of a GPT-2 model, or with ``num_layers`` of a model of the catalogue."""
    if num_layers:
        shape = find_catalogue_shape(name, num_layers=num_layers, num_ranks=num_ranks)
    else:
        shape = find_shape(name)
    return replace(shape, seq_len=seq_len or shape.seq_len)


def _variants(words: str, *, num_microbatches: int) -> list[str]:
    if words == "all":
        return [name for name in VARIANTS if name != DIVIDED or num_microbatches == 1]
    names = split_names(words, option="variants")
    check_known(names, list(VARIANTS), option="variants")
    if DIVIDED in names and num_microbatches > 1:
        raise ValueError(f"microbatches ({num_microbatches}) must be 1 for variant {DIVIDED}")
    return names


def _check_link(link: str, *, on_gpu: bool) -> None:
    if link not in _SLOW_LINKS:
        raise ValueError(f"slow_link ({link}) must be one of {', '.join(_SLOW_LINKS)}")
    if link != "none" and not on_gpu:
        raise ValueError(f"slow_link ({link}) must be none without a GPU: it is NCCL's")


def _slow_down(link: str) -> None:
    """Set NCCL's environment of this rank before NCCL starts; keep variables of the user."""
    for name, value in _SLOW_LINKS[link].items():
        os.environ.setdefault(name, value)
    if link == "sockets":
        os.environ.setdefault("NCCL_HOSTID", f"halley-{os.environ['RANK']}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; arguments and exit code as for ``halley.cli.main``."""
    return run_command(argv, commands=app, module="benchmarks.graph_bench")


if __name__ == "__main__":
    sys.exit(main())
