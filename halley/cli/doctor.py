"""``halley doctor``: check versions, devices, links and strategies of this machine."""

import dataclasses
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halley.cli.checks import check_range, rank_memory_bytes, read_dtype
from halley.cli.ranks import count_ranks, joined, launch_ranks
from halley.cli.result_rows import step_progress
from halley.core.models import find_model
from halley.distributed.failures import tell_failure
from halley.distributed.mesh import build_groups, pick_device
from halley.tools.candidates import check_case_memory, check_experts
from halley.tools.choice import LayerChoice, choose_strategy
from halley.tools.diagnosis import (
    OPTIONAL_PACKAGES,
    Device,
    Link,
    Machine,
    StrategyState,
    examine_machine,
)
from halley.tools.layer_case import LayerCase


_DEFAULT_TIME_LIMIT_S = 300.0
_MAX_TIME_LIMIT_S = 10**7  # 116 days; waits of the threading module overflow soon above

# Fields of ``FusedBuffers`` with the text that the table shows.
_BUFFERS = {
    "routing_mib": "flags and routing, symmetric",
    "send_mib": "send buffers, symmetric",
    "combine_mib": "combine buffer, symmetric",
    "weight_grads_mib": "gradients of routing weights, symmetric",
    "symm_mib": "all symmetric",
    "rows_mib": "fetched rows, local",
    "plan_mib": "plan of a call",
}


_ModelOption = Annotated[
    str | None, typer.Option(help="Name of a model. Ranks start and run an MoE layer of it.")
]
_TokensOption = Annotated[
    int | None, typer.Option(help="Tokens per rank; default: 2048 on GPUs, 512 on CPUs.")
]
_DtypeOption = Annotated[
    str | None,
    typer.Option(help="bfloat16, float16 or float32; default: bfloat16 on GPUs, float32 on CPUs."),
]
_NprocOption = Annotated[
    int | None,
    typer.Option(help="Number of ranks to start; default: one per GPU, or 2 without GPUs."),
]
_DeviceOption = Annotated[
    str | None,
    typer.Option(help="cpu or cuda; auto (default) is cuda if there is a GPU, else cpu."),
]
_TimeLimitOption = Annotated[
    float | None, typer.Option(help="Seconds that the run of the layer may take; default: 300.")
]


def doctor(
    model: _ModelOption = None,
    tokens: _TokensOption = None,
    dtype: _DtypeOption = None,
    nproc: _NprocOption = None,
    device: _DeviceOption = None,
    time_limit: _TimeLimitOption = None,
) -> int:
    """Show versions, devices and links, and whether each strategy can run on this machine.

    With --model, ranks start and run an MoE layer of the model forward. The output then also shows
    which strategy "auto" chooses and why, whether ranks can address each other's memory, and the
    memory that the fused kernels need. On CPUs, the fused kernels run in an interpreter and are not
    timed.

    Prints tables, then one JSON line. The exit code is 1 if no strategy can run, if the layer
    fails, or if the layer exceeds the time limit.
    """
    if model is None:
        options = {
            "tokens": tokens, "dtype": dtype, "nproc": nproc, "device": device,
            "time_limit": time_limit,
        }  # fmt: skip
        for name, value in options.items():
            if value is not None:
                raise ValueError(f"{name} ({value}) must come with a model: add --model")
        machine = examine_machine()
        Console().print(machine_table(machine))
        typer.echo(json.dumps(dataclasses.asdict(machine)))
        return 0 if machine.can_run else 1
    device = device or "auto"
    limit_s = _DEFAULT_TIME_LIMIT_S if time_limit is None else time_limit
    if not 0 < limit_s <= _MAX_TIME_LIMIT_S:
        raise ValueError(
            f"time_limit ({limit_s:g}) must be above 0 and at most {_MAX_TIME_LIMIT_S} s"
        )
    num_ranks = count_ranks(nproc or 0, device=device)
    on_gpu = pick_device(device).type == "cuda"
    case = LayerCase(
        model=find_model(model),
        num_tokens=(2048 if on_gpu else 512) if tokens is None else tokens,
        dtype=read_dtype(dtype or "default", on_gpu=on_gpu),
    )
    check_range(case.num_tokens, 1, option="tokens")
    check_experts(case, ep_size=num_ranks)
    memory_bytes = rank_memory_bytes(num_ranks, device=device)
    check_case_memory(case, ep_size=num_ranks, memory_bytes=memory_bytes)
    code = launch_ranks(nproc or 0, device=device)
    return _try_layer(case, device=device, limit_s=limit_s) if code is None else code


def _try_layer(case: LayerCase, *, device: str, limit_s: float) -> int:
    """Run the layer on this rank; rank 0 prints the machine and the choice of "auto"."""
    last_text = "waiting for the other ranks"

    def explain() -> str:
        return (
            f"{last_text} (model {case.model.name}, {case.num_tokens} tokens a rank): lower "
            "--tokens, choose a smaller --model or raise --time-limit"
        )

    with (
        _time_limit(limit_s, explain=explain),
        joined(device) as (world, _),
        step_progress(world) as show,
    ):

        def on_progress(text: str, done: int, total: int) -> None:
            nonlocal last_text
            last_text = text
            show(text, done, total)

        groups = build_groups(0, device_type=world.device.type)
        machine = examine_machine() if world.is_first else None
        if machine is not None:  # Print it before the layer runs, because the layer may fail.
            Console().print(machine_table(machine))
        choice = choose_strategy(case, groups=groups, device=world.device, on_progress=on_progress)
        if machine is not None:
            Console().print(choice_table(choice))
            facts = dataclasses.asdict(machine) | {"choice": dataclasses.asdict(choice)}
            typer.echo(json.dumps(facts))
    return 0


@contextmanager
def _time_limit(limit_s: float, *, explain: Callable[[], str]) -> Iterator[None]:
    """End this process with exit code 1 if the block takes longer than a limit.

    A thread ends the process, because an exception would wait for a running collective or kernel.

    Args:
        limit_s: seconds.
        explain: returns the current work of the process, and a way to avoid the limit.
    """

    def end() -> None:
        tell_failure(f"the time limit of {limit_s:g} s is over while {explain()}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def choice_table(choice: LayerChoice) -> Table:
    """Return a table of the choice of "auto"; a problem with peer memory access is red."""
    title = f"MoE layer of {choice.model}, forward: {choice.num_tokens} tokens a rank, "
    table = Table(title=f"{title}{choice.dtype}, ep_size {choice.num_ranks}")
    for name in ("", "what", "state"):
        table.add_column(name, overflow="fold")
    table.add_row("strategy auto", "picks", escape(choice.strategy))
    for name, time_us in choice.times_us.items():
        table.add_row("", escape(name), f"{time_us:,.0f} us")
    table.add_row("", "why", escape(choice.reason))
    table.add_section()
    problem = f"[red]no: {escape(choice.access_problem)}[/red]"
    table.add_row("memory of peers", "addressed", problem if choice.access_problem else "yes")
    table.add_section()
    title = "buffers of fused"
    if choice.buffers is None:
        table.add_row(title, "", escape(f"not measured: {choice.no_buffers}"))
        return table
    for key, text in _BUFFERS.items():
        table.add_row(title, text, f"{getattr(choice.buffers, key):.3f} MiB")
        title = ""
    table.add_section()
    title = "training with fused"
    for save, memory in choice.memory.items():
        saved, peak = memory.saved / 2**20, memory.peak / 2**20
        table.add_row(
            title, f"save={save}", f"saves {saved:,.1f} MiB a layer, peak {peak:,.1f} MiB"
        )
        title = ""
    return table


def machine_table(machine: Machine) -> Table:
    """Return a table of the facts about a machine; each problem of a strategy is red."""
    table = Table(title="Halley on this machine")
    for name in ("", "what", "state"):
        table.add_column(name, overflow="fold")
    sections = {
        "versions": [(name, version or "-") for name, version in machine.versions.items()],
        "devices": _devices(machine.devices),
        "links": _links(machine.links),
        "backends": [(name, _mark(there)) for name, there in machine.backends.items()],
        "packages": [
            (name, version or f"- pip install '.[{OPTIONAL_PACKAGES[name]}]'")
            for name, version in machine.packages.items()
        ],
    }
    for section, rows in sections.items():
        for index, (what, state) in enumerate(rows):
            table.add_row("" if index else section, escape(what), escape(state))
        if rows:
            table.add_section()
    for index, strategy in enumerate(machine.strategies):
        title = "" if index else "strategies"
        table.add_row(title, escape(strategy.name), _strategy(strategy))
    for index, note in enumerate(machine.notes):
        if not index:
            table.add_section()
        table.add_row("" if index else "notes", "", f"[yellow]{escape(note)}[/yellow]")
    return table


def _devices(devices: list[Device]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for index, device in enumerate(devices):
        memory = f"{device.memory_bytes / 2**30:.0f} GiB"
        if device.kind == "cpu":
            rows.append(("cpu", f"{device.name}, {device.num_cores} cores, {memory}"))
            continue
        state = f"{device.name}, {memory}, compute capability {device.compute_capability}"
        rows.append((f"cuda:{index}", f"{state}, {device.num_cores} SMs"))
    return rows


def _links(links: list[Link]) -> list[tuple[str, str]]:
    """Return one row for all pairs of GPUs with the same kind of link."""
    pairs: dict[str, list[str]] = defaultdict(list)
    for link in links:
        access = f"peer access {_mark(link.peer_access)}"
        pairs[f"{link.kind}, {access}" if link.kind else access].append(
            f"{link.first}-{link.second}"
        )
    return [
        ("all pairs" if len(pairs) == 1 else " ".join(among), state)
        for state, among in pairs.items()
    ]


def _strategy(strategy: StrategyState) -> str:
    color = "red" if strategy.problems else "green"
    state = "cannot run" if strategy.problems else "can run"
    needs = ", ".join(f"{name} {_mark(there)}" for name, there in strategy.needs.items())
    lines = [f"[{color}]{state}[/{color}]: {escape(needs)}"]
    lines += [f"[red]{escape(problem)}[/red]" for problem in strategy.problems]
    lines += [f"[yellow]{escape(note)}[/yellow]" for note in strategy.notes]
    return "\n".join(lines)


def _mark(there: bool) -> str:
    return "yes" if there else "no"
