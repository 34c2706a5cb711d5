"""The doctor's table and its last line."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from halley.cli.doctor import machine_table
from halley.cli.main import main
from halley.moe.strategy import STRATEGIES
from halley.perf.doctor import Device, Link, Machine, StrategyState


GPU = Device(
    name="NVIDIA Fast",
    kind="cuda",
    memory_bytes=80 * 2**30,
    compute_capability="9.0",
    num_cores=132,
)
CPU = Device(
    name="Some [CPU]", kind="cpu", memory_bytes=16 * 2**30, compute_capability=None, num_cores=4
)
FINE = StrategyState(
    name="sequential", needs={"nccl of torch.distributed": True}, problems=[], notes=[]
)
MACHINE = Machine(
    versions={"torch": "2.13.0", "triton": None},
    packages={"matplotlib": "3.11.2", "safetensors": None},
    devices=[GPU, GPU, CPU],
    links=[Link(first=0, second=1, peer_access=True, kind="NVLink (NV18)")],
    backends={"gloo": True, "nccl": True},
    strategies=[FINE],
    notes=[],
)
RED = "\x1b[31m"


def _rendered(machine: Machine, *, color: bool = False) -> str:
    system = "standard" if color else None
    console = Console(file=io.StringIO(), width=200, force_terminal=color, color_system=system)
    console.print(machine_table(machine))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _row(text: str, what: str) -> str:
    (line,) = [line for line in text.splitlines() if f" {what} " in line]
    return line.strip("│ ").split("│")[-1].strip()


def test_table_tells_all_facts():
    text = _rendered(MACHINE)
    assert _row(text, "torch") == "2.13.0"
    assert _row(text, "triton") == "-"
    assert _row(text, "safetensors") == "- pip install 'halley-moe[hf]'"
    assert _row(text, "cuda:1") == (
        "NVIDIA Fast, 80 GiB, compute capability 9.0, 132 multiprocessors"
    )
    assert _row(text, "cpu") == "Some [CPU], 4 cores, 16 GiB"
    assert _row(text, "all pairs") == "NVLink (NV18), peer access yes"
    assert _row(text, "sequential") == "can run: nccl of torch.distributed yes"


def test_pairs_that_are_linked_alike_share_a_row():
    links = [
        Link(first=0, second=1, peer_access=True, kind="NVLink (NV18)"),
        Link(first=0, second=2, peer_access=False, kind="PCIe (SYS)"),
        Link(first=1, second=2, peer_access=False, kind="PCIe (SYS)"),
        Link(first=2, second=3, peer_access=False, kind=None),
    ]
    text = _rendered(dataclasses.replace(MACHINE, links=links))
    assert _row(text, "0-1") == "NVLink (NV18), peer access yes"
    assert _row(text, "0-2 1-2") == "PCIe (SYS), peer access no"
    assert _row(text, "2-3") == "peer access no"


def test_a_problem_is_red_and_a_note_is_not():
    broken = dataclasses.replace(FINE, problems=["no nccl: install it"], notes=["no figures"])
    text = _rendered(dataclasses.replace(MACHINE, strategies=[broken]), color=True)
    assert f"{RED}no nccl: install it" in text
    assert f"{RED}cannot run" in text
    assert f"{RED}no figures" not in text
    assert "no figures" in text
    assert RED not in _rendered(MACHINE, color=True)


def test_command_ends_with_one_json_line(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told.keys() == {field.name for field in dataclasses.fields(Machine)}
    assert told["devices"][-1]["kind"] == "cpu"
    assert [strategy["problems"] for strategy in told["strategies"]] == [[] for _ in STRATEGIES]


def test_command_fails_where_nothing_can_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    broken = dataclasses.replace(FINE, problems=["no nccl: install it"])
    for strategies, code in [([broken], 1), ([broken, FINE], 0)]:
        machine = dataclasses.replace(MACHINE, strategies=strategies)
        monkeypatch.setattr("halley.cli.doctor.examine_machine", lambda found=machine: found)
        assert main(["doctor"]) == code
        assert "no nccl: install it" in capsys.readouterr().out
