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
from rich.table import Column, Table
from typer import Option

from halley.cli.bench import DeviceOption, DtypeOption
from halley.cli.checks import check_range, rank_memory_bytes, read_dtype
from halley.cli.ranks import NprocOption, count_ranks, joined, launch_ranks, step_progress
from halley.core.models import find_model
from halley.distributed.launcher import tell_failure
from halley.distributed.mesh import build_groups, pick_device
from halley.tools.candidates import check_memory
from halley.tools.choice import LayerChoice, choose_strategy
from halley.tools.diagnosis import OPTIONAL_PACKAGES, Link, Machine, StrategyState, examine_machine
from halley.tools.layer_case import LayerCase


_MAX_TIME_LIMIT_S = 10**7  # 116 days, far less than a timer of the threading module allows

# Keys of the result of ``measure_buffers``, with the text that ``choice_table`` shows for each.
_BUFFERS = {
    "routing_mib": "flags and routing, symmetric",
    "send_mib": "send buffers, symmetric",
    "combine_mib": "combine buffer, symmetric",
    "weight_grads_mib": "gradients of routing weights, symmetric",
    "symm_mib": "all symmetric",
    "plan_mib": "plan of a call",
}


def doctor(
    context: typer.Context,
    model: Annotated[
        str | None, Option(help="Name of a model. Ranks start and run an MoE layer of it.")
    ] = None,
    tokens: Annotated[
        int | None, Option(help="Tokens per rank; default: 2048 on GPUs, 512 on CPUs.")
    ] = None,
    dtype: DtypeOption = "default",
    nproc: NprocOption = 0,
    device: DeviceOption = "auto",
    time_limit: Annotated[float, Option(help="Seconds that the run of the layer may take.")] = 300,
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
        for name in ("tokens", "dtype", "nproc", "device", "time_limit"):
            source = context.get_parameter_source(name)
            if source is not None and source.name != "DEFAULT":
                value = context.params[name]
                raise ValueError(f"{name} ({value}) must come with a model: add --model")
        machine = examine_machine()
        Console().print(machine_table(machine))
        typer.echo(json.dumps(dataclasses.asdict(machine)))
        return 0 if any(not each.problems for each in machine.strategies) else 1
    if not 0 < time_limit <= _MAX_TIME_LIMIT_S:
        rule = f"above 0 and at most {_MAX_TIME_LIMIT_S} s"
        raise ValueError(f"time_limit ({time_limit:g}) must be {rule}")
    num_ranks = count_ranks(nproc, device=device)
    on_gpu = pick_device(device).type == "cuda"
    if tokens is None:
        tokens = 2048 if on_gpu else 512
    config = find_model(model)
    case = LayerCase(model=config, num_tokens=tokens, dtype=read_dtype(dtype, on_gpu=on_gpu))
    check_range(tokens, 1, option="tokens")
    memory_bytes = rank_memory_bytes(num_ranks, device=device)
    check_memory([case], ep_size=num_ranks, memory_bytes=memory_bytes, backward=False)
    launch_ranks(nproc, device=device)
    return _try_layer(case, device=device, limit_s=time_limit)


def _try_layer(case: LayerCase, *, device: str, limit_s: float) -> int:
    """Run strategy "auto" on an MoE layer on all ranks; rank 0 prints two tables. Return 0."""
    texts = ["waiting for the other ranks"]
    layer = f"(model {case.model.name}, {case.num_tokens} tokens a rank)"
    advice = "lower --tokens, choose a smaller --model or raise --time-limit"
    limit = _time_limit(limit_s, explain=lambda: f"{texts[-1]} {layer}: {advice}")
    with limit, joined(device) as (world, _), step_progress(world) as show:

        def on_progress(text: str, done: int, total: int) -> None:
            texts.append(text)
            show(text, done, total)

        groups = build_groups(0, device_type=world.device.type)
        machine = examine_machine() if world.is_first else None
        if machine is not None:  # Print the machine first, because the layer may fail.
            Console().print(machine_table(machine))
        choice = choose_strategy(case, groups=groups, device=world.device, on_progress=on_progress)
        if machine is not None:
            Console().print(choice_table(choice))
            facts = dataclasses.asdict(machine) | {"choice": dataclasses.asdict(choice)}
            typer.echo(json.dumps(facts))
    return 0


@contextmanager
def _time_limit(limit_s: float, *, explain: Callable[[], str]) -> Iterator[None]:
    """End this process with a message and exit code 1 if the ``with`` block exceeds ``limit_s``.

    A thread ends the process, because an exception would wait for a running collective or kernel.
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
    """Return a table of the choice of "auto" and the reason, with times and memory of "fused"."""
    times = [(escape(name), f"{time_us:,.0f} us") for name, time_us in choice.times_us.items()]
    reason = ("why", escape(choice.reason))
    problem = f"[red]no: {escape(choice.access_problem)}[/red]"
    buffers = [("", escape(f"not measured: {choice.no_buffers}"))]
    if choice.buffers is not None:
        buffers = [(text, f"{choice.buffers[key]:.3f} MiB") for key, text in _BUFFERS.items()]
    memory: list[tuple[str, str]] = []
    for save, each in choice.memory.items():
        saved, peak = each.saved / 2**20, each.peak / 2**20
        memory.append((f"save={save}", f"saves {saved:,.1f} MiB a layer, peak {peak:,.1f} MiB"))
    title = f"MoE layer of {choice.model}, forward: {choice.num_tokens} tokens a rank, "
    return _table(
        f"{title}{choice.dtype}, ep_size {choice.num_ranks}",
        {
            "strategy auto": [("picks", escape(choice.strategy)), *times, reason],
            "memory of peers": [("addressed", problem if choice.access_problem else "yes")],
            "buffers of fused": buffers,
            "training with fused": memory,
        },
    )


def machine_table(machine: Machine) -> Table:
    """Return a table of a machine's versions, devices, links and strategies; problems are red."""
    return _table(
        "Halley on this machine",
        {
            "versions": [(name, version or "-") for name, version in machine.versions.items()],
            "devices": _devices(machine),
            "links": _links(machine.links),
            "backends": [(name, _mark(there)) for name, there in machine.backends.items()],
            "packages": [
                (name, version or escape(f"- pip install '.[{OPTIONAL_PACKAGES[name]}]'"))
                for name, version in machine.packages.items()
            ],
            "strategies": [(escape(each.name), _strategy(each)) for each in machine.strategies],
            "notes": [("", f"[yellow]{escape(note)}[/yellow]") for note in machine.notes],
        },
    )


def _table(title: str, sections: dict[str, list[tuple[str, str]]]) -> Table:
    columns = [Column(name, overflow="fold") for name in ("", "what", "state")]
    table = Table(*columns, title=title)
    for section, rows in sections.items():
        for index, row in enumerate(rows):
            table.add_row("" if index else section, *row)
        table.add_section()
    return table


def _devices(machine: Machine) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for index, each in enumerate(machine.devices):
        memory = f"{each.memory_bytes / 2**30:.0f} GiB"
        on_gpu = f"{memory}, compute capability {each.compute_capability}, {each.num_cores} SMs"
        is_cpu = each.kind == "cpu"
        state = f"{each.num_cores} cores, {memory}" if is_cpu else on_gpu
        rows.append(("cpu" if is_cpu else f"cuda:{index}", escape(f"{each.name}, {state}")))
    return rows


def _links(links: list[Link]) -> list[tuple[str, str]]:
    """Group pairs of GPUs by link kind and peer access; return a row (pairs, state) per group."""
    pairs: dict[str, list[str]] = defaultdict(list)
    for link in links:
        access = f"peer access {_mark(link.peer_access)}"
        state = f"{link.kind}, {access}" if link.kind else access
        pairs[state].append(f"{link.first}-{link.second}")
    names = ["all pairs"] if len(pairs) == 1 else [" ".join(among) for among in pairs.values()]
    return list(zip(names, pairs, strict=True))


def _strategy(strategy: StrategyState) -> str:
    color, state = ("red", "cannot run") if strategy.problems else ("green", "can run")
    needs = ", ".join(f"{name} {_mark(there)}" for name, there in strategy.needs.items())
    lines = [f"[{color}]{state}[/{color}]: {escape(needs)}"]
    lines += [f"[red]{escape(problem)}[/red]" for problem in strategy.problems]
    lines += [f"[yellow]{escape(note)}[/yellow]" for note in strategy.notes]
    return "\n".join(lines)


def _mark(there: bool) -> str:
    return "yes" if there else "no"
