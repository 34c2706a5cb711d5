"""``halley plan graph``: predict a training step with compiler passes, and choose strategies."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from halley.cli.checks import (
    MAX_PLANNED_RANKS,
    check_chart,
    check_range,
    check_readable,
    check_replaceable,
    check_samples,
)
from halley.cli.ranks import joined, launch_ranks, step_progress
from halley.cli.train import ConfigOption, SetOption, check_groups, read_config
from halley.core.config import RunConfig
from halley.core.timeline import Span
from halley.core.types import local_experts
from halley.cost.hardware import find_environment, find_hardware
from halley.cost.profiles import ProfileTable
from halley.planner.step_plan import (
    StepPlan,
    check_strategies,
    find_problems,
    plan_strategies,
    trace_step,
)
from halley.strategies.registry import PLANNED, describe_strategies, split_strategies
from halley.tools.charts import draw_timelines
from halley.tools.timer import Progress
from halley.tools.tracing import measure_graphs, simulated_step
from halley.train.step import check_passes


if TYPE_CHECKING:
    from halley.compiler import OrderReport

_DEVICE = "NVIDIA H200"  # the default of --device
_PASSES = "wgrad"

_DeviceOption = Annotated[str, Option(help="GPU of the predicted run; Halley must know its rates.")]
_LinkOption = Annotated[
    float, Option(help="Bandwidth out of each device in GB/s; 0: the known one of the device.")
]
_MemoryMarginOption = Annotated[
    float,
    Option(
        help="Fraction by which the passes may raise the peak memory, for example 0.02 for 2 %."
    ),
]
_PeerAccessOption = Annotated[
    bool,
    Option(
        help="Whether GPUs can address each other's memory, as on one host; the strategy fused "
        "needs this."
    ),
]
_ProfilesOption = Annotated[
    Path | None, Option(help="File of measured operator times; default: the tables in the package.")
]
_FillOption = Annotated[
    bool, Option(help="Measure operators without a time on this GPU, and add them to --profiles.")
]
_TimelineOption = Annotated[Path | None, Option(help="PNG file for a chart of the simulated step.")]
_MeasureOption = Annotated[
    int,
    Option(help="Also run this many steps on --ranks ranks of this host, and time them; 0: off."),
]


def graph(
    config: ConfigOption = None,
    overrides: SetOption = None,
    ranks: Annotated[int, Option(help="Number of ranks of the predicted run.")] = 8,
    device: _DeviceOption = _DEVICE,
    link: _LinkOption = 0.0,
    memory_margin: _MemoryMarginOption = 0.02,
    peer_access: _PeerAccessOption = True,
    profiles: _ProfilesOption = None,
    fill: _FillOption = False,
    timeline: _TimelineOption = None,
    measure: _MeasureOption = 0,
) -> int:
    """Predict the changes of the compiler passes to the graphs of a model, and the time of a step.

    The pass is wgrad, which runs weight-gradient GEMMs under all-to-alls. Chooses the strategy of
    each MoE layer by predicted time, unless `--set strategy=NAME` or `--measure` is given. Prints
    tables, then one JSON line.
    """
    run_config = read_config(config, overrides)
    # ``halley.compiler.options`` checks this too, but its import loads torch's compiler.
    if not 0.0 <= memory_margin < math.inf:
        raise ValueError(f"memory_margin ({memory_margin}) must be finite and at least 0")
    _check(run_config, ranks=ranks, measure=measure, device=device, link=link)
    strategy = run_config.strategy
    if strategy == RunConfig.strategy:  # the default strategy cannot be part of a graph
        strategy = "functional" if measure else PLANNED
    run_config = dataclasses.replace(run_config, passes=_PASSES, strategy=strategy)
    check_strategies(run_config)
    check_passes(run_config)
    check_chart(timeline, option="timeline")
    options: dict[str, Any] = {"passes": _PASSES, "memory_margin": memory_margin}
    if not measure:
        hardware = find_hardware(device)
        if link:
            if not 0.001 <= link < math.inf:
                rule = "at least 0.001 GB/s, or 0 for the device's own"
                raise ValueError(f"link ({link:g}) must be {rule}")
            hardware = dataclasses.replace(hardware, link_bytes_per_s=link * 1e9)
        options |= {"num_ranks": ranks, "hardware": hardware, "fill": fill}
        options |= {"profiles": _check_profiles(profiles, fill=fill, device=device)}
        with step_progress() as show:
            strategies, plan = _plan(run_config, options, peer_access=peer_access, show=show)
            show("tracing the step as chosen", 0, 0)
            reports = trace_step(run_config, strategies, **options)
        _show(reports, timeline=timeline, plan=plan)
        return 0
    if profiles or fill:
        raise ValueError("profiles and fill must be left out with measure, which has its own")
    launch_ranks(ranks, device=run_config.device)
    with joined(run_config.device) as (world, _), step_progress(world) as show:
        reports, measured_us, spans = measure_graphs(
            run_config, options=options, device=world.device, num_steps=measure, on_progress=show
        )
    if world.is_first:
        _show(reports, timeline=timeline, measured_us=measured_us, measured=spans)
    return 0


def _plan(
    config: RunConfig, options: dict[str, Any], *, peer_access: bool, show: Progress
) -> tuple[tuple[str, ...], StepPlan | None]:
    """Return each MoE layer's strategy, and the plan (None if the user names the strategies)."""
    problem = "" if peer_access else "ranks do not address each other's memory"
    if config.strategy != PLANNED:
        names = split_strategies(config.strategy, num_layers=config.model.num_moe_layers)
        if problem and any(name.startswith("fused") for name in names):
            raise ValueError(f"strategy ({config.strategy}) must not be fused: {problem}")
        return names, None
    problems = find_problems(config, hardware=options["hardware"], fused_problem=problem)
    chosen = {name: value for name, value in options.items() if name != "passes"}
    plan = plan_strategies(config, problems=problems, on_progress=show, **chosen)
    return plan.strategies, plan


def _check(config: RunConfig, *, ranks: int, measure: int, device: str, link: float) -> None:
    if ranks < 2:
        raise ValueError(f"ranks ({ranks}) must be at least 2: one rank has no all-to-alls")
    check_range(ranks, 2, MAX_PLANNED_RANKS, option="ranks")
    if measure < 0:
        raise ValueError(f"measure ({measure}) must be a number of steps, or 0")
    if measure:
        check_samples(measure, option="measure")
    ep_size, tp_size = check_groups(config, num_ranks=ranks), config.expert_tp_size
    if ep_size < 2:
        raise ValueError(f"ep_size ({ep_size}) must be above 1: one rank has no all-to-alls")
    local_experts(config.model.moe.num_experts, ep_size=ep_size, tp_size=tp_size)
    if not measure:
        return
    # With --measure, the step runs on this host, so options about other hardware are errors.
    for name, value, default in (("device", device, _DEVICE), ("link", link, 0.0)):
        if value != default:
            rule = "left out with measure, which runs on this host"
            raise ValueError(f"{name} ({value}) must be {rule}")
    if config.strategy not in (RunConfig.strategy, "functional"):
        reason = "fused layers are one operator, of which no part is seen"
        raise ValueError(f"strategy ({config.strategy}) must be functional with measure: {reason}")


def _check_profiles(path: Path | None, *, fill: bool, device: str) -> Path | str:
    """Check --profiles and --fill; return the profiles file, or "" for the package's own file."""
    if not fill:
        if path is not None:
            check_readable(path, option="profiles")
            here = find_environment(torch.device("cpu"), topology="")
            ProfileTable(path, here, offline=True)  # reads and checks all lines of the file
        return path or ""
    if path is None:
        raise ValueError("fill must come with profiles, the file to fill")
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    if not here.startswith(device):
        raise ValueError(f"fill must run where the GPU ({here}) is the device ({device})")
    check_replaceable(path, option="profiles", what="profiles")
    return path


def _show(
    reports: "Sequence[OrderReport]",
    *,
    timeline: Path | None,
    plan: StepPlan | None = None,
    measured_us: float = 0.0,
    measured: Sequence[Span] = (),
) -> None:
    console = Console(stderr=True)
    found: dict[str, object] = {}
    for direction, report in zip(("forward", "backward"), reports, strict=False):
        console.print(_graph_table(direction, report))
        fields = dataclasses.asdict(dataclasses.replace(report, spans_before=(), spans_after=()))
        del fields["spans_before"], fields["spans_after"]
        found[direction] = fields
    timelines = {
        "simulated, without passes": simulated_step(reports, passed=False),
        "simulated, with passes": simulated_step(reports, passed=True),
    }
    if measured_us:
        predicted_us = sum(report.time_after.makespan_us for report in reports)
        ratio = predicted_us / measured_us
        console.print(
            f"a step: {measured_us / 1e3:.2f} ms measured, {predicted_us / 1e3:.2f} ms predicted, "
            f"predicted / measured {ratio:.3f}"
        )
        times = {"measured_us": measured_us, "predicted_us": predicted_us}
        found["step"] = {**times, "predicted_over_measured": ratio}
        timelines["measured, with passes"] = list(measured)
    if plan is not None:
        found["plan"] = dataclasses.asdict(plan)
        table = Table("strategies", title="a step by the strategies of its layers, predicted")
        table.add_column("step", justify="right", no_wrap=True)
        rows = {f"chosen: {describe_strategies(plan.strategies)}": plan.step_us}
        rows |= {f"all {name}": us for name, us in plan.uniform_us.items()}
        rows |= {f"all {name}, without passes": us for name, us in plan.unpassed_us.items()}
        for name, us in rows.items():
            table.add_row(name, f"{us / 1e3:.2f} ms")
        console.print(table)
        for name, why in plan.problems.items():
            console.print(f"- not {name}: {why}", highlight=False, soft_wrap=True)
    if timeline is not None:
        draw_timelines(timelines, timeline)
    typer.echo(json.dumps(found))


def _graph_table(direction: str, report: "OrderReport") -> Table:
    def place(name: str) -> str:
        module = report.modules.get(name, "")
        return f"{name} of {module}" if module else name

    before, after = report.time_before, report.time_after
    table = Table(
        title=f"{direction}: {before.makespan_us / 1e3:.2f} ms -> {after.makespan_us / 1e3:.2f} ms",
        caption=(
            f"exposed communication {before.exposed_us / 1e3:.2f} ms -> "
            f"{after.exposed_us / 1e3:.2f} ms, predicted; live bytes "
            f"{report.peak_before / 2**20:,.0f} MiB -> {report.peak_after / 2**20:,.0f} MiB; "
            f"{len(report.predicted)} operators were never measured"
        ),
    )
    table.add_column("all-to-all", no_wrap=True)
    table.add_column("becomes")
    for exchange, gemms in report.windows.items():
        hidden = ", ".join(map(place, gemms)) or "no GEMM"
        table.add_row(place(exchange), f"overlaps {hidden}")
    return table
