"""``halley doctor``: what this machine has, what is missing, and what to do about it."""

import dataclasses
import json
from collections import defaultdict

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halley.perf.doctor import (
    OPTIONAL_PACKAGES,
    Device,
    Link,
    Machine,
    StrategyState,
    examine_machine,
)


def doctor() -> int:
    """Show versions, devices and links, and whether each strategy can run here.

    Prints a table, then one JSON line. Fails only where no strategy can run.
    """
    machine = examine_machine()
    Console().print(machine_table(machine))
    typer.echo(json.dumps(dataclasses.asdict(machine)))
    return 0 if machine.can_run else 1


def machine_table(machine: Machine) -> Table:
    """Return the facts as one table; what keeps a strategy from running is red."""
    table = Table(title="Halley on this machine")
    for name in ("", "what", "state"):
        table.add_column(name, overflow="fold")
    sections = {
        "versions": [(name, version or "-") for name, version in machine.versions.items()],
        "devices": _devices(machine.devices),
        "links": _links(machine.links),
        "backends": [(name, _mark(there)) for name, there in machine.backends.items()],
        "packages": [
            (name, version or f"- pip install 'halley-moe[{OPTIONAL_PACKAGES[name]}]'")
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
        rows.append((f"cuda:{index}", f"{state}, {device.num_cores} multiprocessors"))
    return rows


def _links(links: list[Link]) -> list[tuple[str, str]]:
    """Return one row for all pairs that are linked alike."""
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
