"""``halley tune``: find the fastest knobs of fused layers on this machine, or show those known."""

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from halley.cli.bars import step_progress
from halley.cli.bench import (
    DeviceOption,
    DtypeOption,
    ModelsOption,
    NprocOption,
    TokensOption,
    default_models,
    default_tokens,
    layer_cases,
)
from halley.cli.checks import (
    check_known,
    check_package,
    check_samples,
    rank_memory_bytes,
    read_dtype,
    split_names,
)
from halley.cli.path_checks import check_picture, check_readable, check_replaceable
from halley.cli.ranks import count_ranks, hand_to_ranks, joined
from halley.distributed.mesh import build_groups
from halley.distributed.world import pick_device
from halley.tools.candidates import check_case_memory
from halley.tools.layer_case import LayerCase


if TYPE_CHECKING:
    from halley.cost.profiles import Environment
    from halley.fused.tuned import KnobTable


def tune(
    models: ModelsOption = "default",
    tokens: TokensOption = "default",
    knobs: Annotated[str, typer.Option(help="Which to tune, or 'all'.")] = "all",
    dtype: DtypeOption = "default",
    tp_size: Annotated[int, typer.Option(help="Ranks that share each expert.")] = 1,
    samples: Annotated[int, typer.Option(help="Counted samples of each candidate.")] = 7,
    path: Annotated[Path | None, typer.Option(help="File of tuned knobs.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Only show what the file holds.")] = False,
    merge: Annotated[list[Path], typer.Option(help="Only take over what that file holds.")] = [],  # noqa: B006
    chart: Annotated[Path | None, typer.Option(help="Chart (.png) of what was tried.")] = None,
    nproc: NprocOption = 0,
    device: DeviceOption = "auto",
) -> int:
    """Measure knobs of the fused strategy and keep the fastest, which layers find from then on.

    Writes each layer to the file once it is measured. Prints a table, then a JSON line a layer.
    """
    # Only here: Triton is not there on every platform.
    from halley.fused.tuned import KnobTable, knobs_path, merge_tables, tuning_environment
    from halley.tools.tuner import SPACE, tune_layer

    if show and merge:
        raise ValueError("show must be left out with merge, which shows the result")
    num_ranks = count_ranks(nproc, device=device)
    place = pick_device(device)
    file = path or knobs_path()
    environment = tuning_environment(place, num_ranks=num_ranks, tp_size=tp_size)
    if chart is not None:
        check_package("matplotlib", extra="plot", option=f"chart ({chart})")
        check_picture(chart, option="chart")
    for source in merge:
        check_readable(source, option="merge")
    if merge:
        merge_tables(merge, file)
    if show or merge:
        _print(KnobTable(file, environment), chart)
        return 0
    space = {name: SPACE[name] for name in _names(knobs, list(SPACE))}
    check_samples(samples)
    cases = _cases(models, tokens, dtype=dtype, num_ranks=num_ranks, tp_size=tp_size, device=device)
    _check_table(file, environment)
    code = hand_to_ranks(nproc, device=device)
    if code is not None:
        return code

    with joined(device) as (world, _):
        groups = build_groups(0, device_type=world.device.type, tp_size=tp_size)
        table = KnobTable(file, environment)
        with step_progress(world) as on_progress:
            for case in cases:
                found = tune_layer(
                    case, groups=groups, device=world.device, space=space,
                    num_samples=samples, on_progress=on_progress,
                )  # fmt: skip
                if world.is_first:
                    table.write(found)
        if world.is_first:
            _print(table, chart)
    return 0


def _check_table(file: Path, environment: "Environment") -> None:
    """Check the file before the work: that its lines can be read, and others added."""
    from halley.fused.tuned import KnobTable

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of knobs of other machines, which the ranks tell of
        KnobTable(file, environment)
    check_replaceable(file, option="path", is_own=lambda head: True, what="tuned knobs")


def _cases(
    models: str, tokens: str, *, dtype: str, num_ranks: int, tp_size: int, device: str
) -> list[LayerCase]:
    on_gpu = pick_device(device).type == "cuda"
    cases = layer_cases(
        models if models != "default" else default_models(on_gpu=on_gpu),
        tokens if tokens != "default" else default_tokens(on_gpu=on_gpu),
        skew="balanced",
        dtype=read_dtype(dtype, on_gpu=on_gpu),
        seed=0,
    )
    memory_bytes = rank_memory_bytes(num_ranks, device=device)
    for case in cases:
        check_case_memory(
            case, ep_size=num_ranks, tp_size=tp_size, memory_bytes=memory_bytes, backward=True
        )
    return cases


def _names(knobs: str, allowed: list[str]) -> list[str]:
    names = allowed if knobs == "all" else split_names(knobs, option="knobs")
    check_known(names, allowed, option="knobs")
    return names


def _print(table: "KnobTable", chart: Path | None) -> None:
    if chart is not None:
        from halley.tools.tuning_chart import draw_sweeps

        draw_sweeps(table.found, chart)
    shown = Table(title=f"{table.path}: {table.environment.device}, {table.environment.topology}")
    for name in ("hidden", "experts", "top-k", "tokens", "default us", "tuned us", "knobs"):
        shown.add_column(name)
    for each in table.found:
        shape = each.shape
        sizes = (shape.hidden_size, shape.num_experts, shape.top_k, shape.num_tokens)
        times = (f"{each.default_us:.0f}", f"{each.median_us:.0f}")
        shown.add_row(*map(str, sizes), *times, " ".join(each.settings) or "defaults")
    Console(width=None if Console().is_terminal else 140).print(shown)
    for each in table.found:
        typer.echo(json.dumps(asdict(each)))
