"""``halley bench graph``: what the compiler's passes bring in training steps of Lancet's models."""

import os
from pathlib import Path
from typing import Annotated

import typer

from halley.cli.bars import step_progress
from halley.cli.bench import (
    OUTPUT_HELP,
    CommitOption,
    DeviceOption,
    NprocOption,
    SamplesOption,
    print_rows,
)
from halley.cli.checks import check_known, check_samples, check_seed, read_dtype, split_names
from halley.cli.kept_rows import check_output, kept_rows
from halley.cli.ranks import count_ranks, hand_to_ranks, joined
from halley.cli.tables import graph_table
from halley.distributed.mesh import build_groups
from halley.distributed.world import pick_device
from halley.tools.gpt2_moe import check_gate, find_shape
from halley.tools.graph_case import VARIANTS, GraphCase, check_inner, graph_case_name
from halley.tools.results import Row, results_path


# What NCCL is told, to send between the GPUs of one host as slowly as between hosts.
_SLOW_LINKS: dict[str, dict[str, str]] = {
    "none": {},
    # One channel of copies, over the same link: about 150 Gb/s a GPU (4 H200).
    "channels": {"NCCL_MAX_NCHANNELS": "1"},
    # Each rank as if on a host of its own, over TCP: about 50 Gb/s a GPU, 25 with less threads.
    "sockets": {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_NTHREADS": "8",
        "NCCL_NSOCKS_PERTHREAD": "4",
    },
}


def graph(
    models: Annotated[str, typer.Option(help="Models, or 'default'.")] = "default",
    variants: Annotated[str, typer.Option(help="Ways to run a step, or 'all'.")] = "all",
    inner: Annotated[str, typer.Option(help="inductor or eager.")] = "inductor",
    gate: Annotated[str, typer.Option(help="switch, top2, prioritized or dropless.")] = "switch",
    batch: Annotated[int, typer.Option(help="Sequences a rank; 0 is the model's.")] = 0,
    num_parts: Annotated[int, typer.Option(help="Parts of the batch; 0 chooses.")] = 0,
    memory_margin: Annotated[float, typer.Option(help="How much memory may rise.")] = 0.02,
    slow_link: Annotated[str, typer.Option(help="channels, sockets or none.")] = "none",
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or default.")] = "default",
    samples: SamplesOption = 11,
    seed: Annotated[int, typer.Option(help="Of tokens.")] = 0,
    output: Annotated[Path | None, typer.Option(help=OUTPUT_HELP)] = None,
    commit: CommitOption = None,
    nproc: NprocOption = 0,
    device: DeviceOption = "auto",
) -> int:
    """Measure forward and backward of GPT-2 with experts: each pass, both, and without.

    Beside them run the sequential and the chunked strategy, operator by operator, and Inductor's
    own scheduler of overlap. Prints a table, then one JSON line for each model and variant.
    """
    num_ranks = count_ranks(nproc, device=device)
    if num_ranks < 2:
        raise ValueError(f"nproc ({num_ranks}) must be at least 2: one rank has no all-to-alls")
    on_gpu = pick_device(device).type == "cuda"
    if models == "default":
        models = "gpt2-s-moe,gpt2-l-moe" if on_gpu else "gpt2-tiny-moe"
    cases = [
        GraphCase(
            shape=shape,
            gate=check_gate(gate),
            batch_size=batch or shape.batch_size,
            dtype=read_dtype(dtype, on_gpu=on_gpu),
            inner=check_inner(inner),
            num_parts=num_parts,
            memory_margin=memory_margin,
            seed=seed,
        )
        for shape in map(find_shape, split_names(models, option="models"))
    ]
    names = _variants(variants)
    check_seed(seed)
    check_samples(samples)
    _check_link(slow_link, on_gpu=on_gpu)
    where = {"device": pick_device(device), "num_ranks": num_ranks}
    check_output(output, case=graph_case_name(slow_link), has_chart=True, **where)
    code = hand_to_ranks(nproc, device=device)
    if code is not None:
        return code
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
    # Only here: with torch's compiler comes Triton, before it is known how kernels are to run.
    from halley.tools.graph_bench import measure_graph_cases

    with joined(device) as (world, _):
        groups = build_groups(0, device_type=world.device.type)
        with kept_rows(world, output) as keep, step_progress(world) as on_progress:
            rows = measure_graph_cases(
                cases,
                variants,
                groups=groups,
                device=world.device,
                num_samples=samples,
                commit=commit,
                slow_link=link,
                on_progress=on_progress,
                on_rows=keep,
            )
        return rows if world.is_first else []


def _report(rows: list[Row], output: Path | None) -> None:
    if output is not None:
        from halley.tools.graph_chart import draw_graph_bench

        draw_graph_bench(rows, results_path(output, rows[0]).with_suffix(".png"))
    for row in rows:
        if row["error"]:
            typer.echo(f"{row['model']} {row['variant']}: {row['error']}", err=True)
    print_rows(graph_table(rows), rows, width=160)


def _variants(words: str) -> list[str]:
    names = [*VARIANTS] if words == "all" else split_names(words, option="variants")
    check_known(names, list(VARIANTS), option="variants")
    return names


def _check_link(link: str, *, on_gpu: bool) -> None:
    if link not in _SLOW_LINKS:
        raise ValueError(f"slow_link ({link}) must be one of {', '.join(_SLOW_LINKS)}")
    if link != "none" and not on_gpu:
        raise ValueError(f"slow_link ({link}) must be none without a GPU: it is NCCL's")


def _slow_down(link: str) -> None:
    """Tell NCCL in this rank's environment, before it begins; what the user told it stays."""
    for name, value in _SLOW_LINKS[link].items():
        os.environ.setdefault(name, value)
    if link == "sockets":
        os.environ.setdefault("NCCL_HOSTID", f"halley-{os.environ['RANK']}")
