"""``halley tune``: find the fastest kernel configuration of fused layers, or show stored ones."""

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from typer import Option

from halley.cli.bench import (
    DeviceOption,
    DtypeOption,
    ModelsOption,
    TokensOption,
    layer_cases,
    print_rows,
)
from halley.cli.checks import (
    check_chart,
    check_known,
    check_readable,
    check_replaceable,
    check_samples,
    rank_memory_bytes,
    split_names,
)
from halley.cli.ranks import NprocOption, count_ranks, joined, launch_ranks, step_progress
from halley.distributed.mesh import build_groups, pick_device
from halley.tools.candidates import check_memory
from halley.tools.charts import draw_sweeps


if TYPE_CHECKING:
    from halley.fused.config import ConfigTable

_SettingsOption = Annotated[
    str,
    Option(
        "--settings",
        "--knobs",
        help="Groups of kernel settings to tune, comma-separated, or 'all'. --knobs is the "
        "name of an earlier version.",
    ),
]
_TpSizeOption = Annotated[int, Option(help="Ranks that share each expert (tensor parallelism).")]
_PathOption = Annotated[
    Path | None,
    Option(
        help="File of tuned kernel configurations; default: $HALLEY_KERNEL_CONFIG, or a file "
        "in the user's cache folder."
    ),
]
_ShowOption = Annotated[
    bool, Option("--show", help="Show the configurations of the file; measure nothing.")
]
_MergeOption = Annotated[
    list[Path],
    Option(
        help="Copy the configurations of this file into --path; measure nothing. May be given "
        "several times."
    ),
]
_ChartOption = Annotated[
    Path | None, Option(help="PNG file for a chart of the time of every measured setting.")
]


def tune(
    models: ModelsOption = "default",
    tokens: TokensOption = "default",
    settings: _SettingsOption = "all",
    dtype: DtypeOption = "default",
    tp_size: _TpSizeOption = 1,
    samples: Annotated[int, Option(help="Timed runs of each configuration.")] = 7,
    path: _PathOption = None,
    show: _ShowOption = False,
    merge: _MergeOption = [],  # noqa: B006
    chart: _ChartOption = None,
    nproc: NprocOption = 0,
    device: DeviceOption = "auto",
) -> int:
    """Measure kernel settings of the strategy fused, and store the fastest for later runs.

    Stores each result as soon as it is measured. Prints a table, then one JSON line per layer.
    """
    # Imported here so that other commands also run where Triton is missing.
    from halley.fused.config import ConfigTable, config_path, merge_tables, tuning_environment
    from halley.tools.tuner import SPACE, tune_layer

    if show and merge:
        raise ValueError("show must be left out with merge, which shows the result")
    num_ranks = count_ranks(nproc, device=device)
    file = path or config_path()
    environment = tuning_environment(pick_device(device), num_ranks=num_ranks, tp_size=tp_size)
    check_chart(chart, option="chart")
    if merge:
        for source in merge:
            check_readable(source, option="merge")
        merge_tables(merge, file)
    if show or merge:
        _print(ConfigTable(file, environment), chart)
        return 0
    names = list(SPACE) if settings == "all" else split_names(settings, option="settings")
    check_known(names, list(SPACE), option="settings")
    check_samples(samples)
    cases = layer_cases(models, tokens, dtype=dtype, device=device)
    memory_bytes = rank_memory_bytes(num_ranks, device=device)
    check_memory(cases, ep_size=num_ranks, memory_bytes=memory_bytes, tp_size=tp_size)
    # Find errors of the file before ranks start. Ranks read it again and then show its warnings.
    with warnings.catch_warnings(action="ignore"):
        ConfigTable(file, environment)
    check_replaceable(file, option="path", what="tuned kernel configurations")
    launch_ranks(nproc, device=device)
    with joined(device) as (world, _), step_progress(world) as on_progress:
        groups = build_groups(0, device_type=world.device.type, tp_size=tp_size)
        table = ConfigTable(file, environment)
        for case in cases:
            found = tune_layer(
                case, groups=groups, device=world.device, num_samples=samples,
                space={name: SPACE[name] for name in names}, on_progress=on_progress,
            )  # fmt: skip
            if world.is_first:
                table.write(found)
    if world.is_first:
        _print(table, chart)
    return 0


def _print(table: "ConfigTable", chart: Path | None) -> None:
    if chart is not None:
        draw_sweeps(table.found, chart)
    names = ("hidden", "experts", "top-k", "tokens", "default us", "tuned us", "settings")
    title = f"{table.path}: {table.environment.device}, {table.environment.topology}"
    shown = Table(*names, title=title)
    for each in table.found:
        shape = each.shape
        sizes = (shape.hidden_size, shape.num_experts, shape.top_k, shape.num_tokens)
        times = (f"{each.default_us:.0f}", f"{each.median_us:.0f}")
        shown.add_row(*map(str, sizes), *times, " ".join(each.settings) or "defaults")
    print_rows(shown, [asdict(each) for each in table.found])
