"""``halley doctor``: its tables, its JSON line, its exit code and its time limit."""

import dataclasses
import io
import json
import platform
import re

import pytest
import torch
from rich.console import Console

from halley.cli.doctor import choice_table, machine_table
from halley.cli.main import main
from halley.strategies.registry import STRATEGIES
from halley.tools.choice import LayerChoice, LayerMemory
from halley.tools.diagnosis import Link, Machine, StrategyState
from tests.tools.test_diagnosis import CPU, H200


FINE = StrategyState(
    name="sequential", needs={"nccl of torch.distributed": True}, problems=[], notes=[]
)
MACHINE = Machine(
    versions={"torch": "2.13.0", "triton": None},
    packages={"matplotlib": "3.11.2", "safetensors": None}, devices=[H200, H200, CPU],
    links=[Link(first=0, second=1, peer_access=True, kind="NVLink (NV18)")],
    backends={"gloo": True, "nccl": True}, strategies=[FINE], notes=[],
)  # fmt: skip
CHOICE = LayerChoice(
    model="tiny",
    num_tokens=64,
    num_ranks=4,
    dtype="bfloat16",
    strategy="fused",
    times_us={"chunked": 3000.0, "fused": 20.0},
    reason="fused is fastest of chunked 30 us, fused 20 us",
    access_problem="",
    buffers={
        "routing_mib": 0.25, "send_mib": 1.0, "combine_mib": 4.0, "weight_grads_mib": 0.5,
        "symm_mib": 5.75, "plan_mib": 0.125,
    },
    no_buffers="",
    memory={"all": LayerMemory(saved=3 * 2**20, peak=2**31)},
)  # fmt: skip
FAR = "ranks 0 and 1 are [far]"
RED = "\x1b[31m"


def _rendered(facts: Machine | LayerChoice, *, color: bool = False) -> str:
    system = "standard" if color else None
    console = Console(file=io.StringIO(), width=200, force_terminal=color, color_system=system)
    console.print(machine_table(facts) if isinstance(facts, Machine) else choice_table(facts))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _row(text: str, what: str) -> str:
    (line,) = [line for line in text.splitlines() if f" {what} " in line]
    return line.strip("│ ").split("│")[-1].strip()


def test_table_shows_all_facts_and_joins_pairs_with_the_same_kind_of_link():
    text = _rendered(MACHINE)
    assert _row(text, "torch") == "2.13.0"
    assert _row(text, "triton") == "-"
    assert _row(text, "safetensors") == "- pip install '.[hf]'"
    assert _row(text, "cuda:1") == "NVIDIA H200, 140 GiB, compute capability 9.0, 132 SMs"
    assert _row(text, "cpu") == "a [cpu], 2 cores, 1 GiB"
    assert _row(text, "all pairs") == "NVLink (NV18), peer access yes"
    assert _row(text, "sequential") == "can run: nccl of torch.distributed yes"
    links = [
        Link(first=first, second=second, peer_access=kind == "NVLink (NV18)", kind=kind)
        for first, second, kind in (
            (0, 1, "NVLink (NV18)"), (0, 2, "PCIe (SYS)"), (1, 2, "PCIe (SYS)"), (2, 3, None)
        )
    ]  # fmt: skip
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


def test_command_ends_with_one_json_line_of_facts(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told.keys() == {field.name for field in dataclasses.fields(Machine)}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    assert versions.items() <= told["versions"].items()
    names = "matplotlib pyarrow safetensors tensorboard tokenizers transformers wandb"
    assert list(told["packages"]) == names.split()
    *gpus, cpu = told["devices"]
    assert len(gpus) == torch.cuda.device_count()
    assert cpu["kind"] == "cpu"
    assert cpu["num_cores"] >= 1
    assert cpu["memory_bytes"] > 2**28
    found = {strategy["name"]: strategy["problems"] for strategy in told["strategies"]}
    assert found == {name: [] for name in STRATEGIES}


def test_command_fails_where_nothing_can_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    broken = dataclasses.replace(FINE, problems=["no nccl: install it"])
    for strategies, code in [([broken], 1), ([broken, FINE], 0)]:
        machine = dataclasses.replace(MACHINE, strategies=strategies)
        monkeypatch.setattr("halley.cli.doctor.examine_machine", lambda found=machine: found)
        assert main(["doctor"]) == code
        assert "no nccl: install it" in capsys.readouterr().out


def test_table_of_a_choice_shows_times_memory_and_in_red_missing_peer_access():
    text = _rendered(CHOICE)
    assert "MoE layer of tiny, forward: 64 tokens a rank, bfloat16, ep_size 4" in text
    assert _row(text, "picks") == "fused"
    assert _row(text, "│ chunked") == "3,000 us"
    assert _row(text, "why") == CHOICE.reason
    assert _row(text, "addressed") == "yes"
    assert _row(text, "combine buffer, symmetric") == "4.000 MiB"
    assert _row(text, "all symmetric") == "5.750 MiB"
    assert _row(text, "plan of a call") == "0.125 MiB"
    assert _row(text, "save=all") == "saves 3.0 MiB a layer, peak 2,048.0 MiB"
    far = dataclasses.replace(CHOICE, access_problem=FAR, buffers=None, no_buffers=FAR)
    text = _rendered(far, color=True)
    assert f"{RED}no: ranks 0 and 1 are [far]" in text
    assert f"not measured: {FAR}" in text
    assert RED not in _rendered(CHOICE, color=True)


def test_layer_of_a_model_runs_on_two_ranks(capfd: pytest.CaptureFixture[str]):
    argv = ["doctor", "--model", "tiny", "--tokens", "16", "--nproc", "2", "--device", "cpu"]
    assert main(argv) == 0
    out, err = capfd.readouterr()
    assert err.splitlines()[:3] == [  # the user sees which strategy runs: it may take minutes
        "halley: drawing the weights of tiny (0 of 9)",
        "halley: running strategy sequential (0 of 9)",
        "halley: running strategy chunked (1 of 9)",
    ]
    told = json.loads(out.splitlines()[-1])
    choice = told.pop("choice")
    assert told.keys() == {field.name for field in dataclasses.fields(Machine)}
    no_buffers = "its kernels are interpreted on a CPU"  # for minutes
    wanted = {"model": "tiny", "num_tokens": 16, "num_ranks": 2, "dtype": "float32"}
    wanted |= {"access_problem": "", "buffers": None, "memory": {}, "no_buffers": no_buffers}
    assert wanted.items() <= choice.items()
    assert list(choice["times_us"]) == ["sequential", "chunked"]
    assert choice["strategy"] == min(choice["times_us"], key=choice["times_us"].get)
    assert f"forward: {choice['strategy']} is fastest of sequential " in choice["reason"]
    assert choice["reason"].endswith(f"; not fused: {no_buffers}")
    assert out.count("Halley on this machine") == out.count("MoE layer of tiny") == 1
    assert "not measured: its kernels" in out


def test_time_limit_ends_all_ranks_with_one_line(capfd: pytest.CaptureFixture[str]):
    """The limit is far below the time in which the ranks start."""
    argv = ["doctor", "--model", "tiny", "--nproc", "2", "--device", "cpu", "--time-limit", "0.01"]
    assert main(argv) == 1
    err = capfd.readouterr().err
    assert re.fullmatch(
        r"halley: failed on rank \d: the time limit of 0.01 s is over while waiting for the other "
        r"ranks \(model tiny, 512 tokens a rank\): lower --tokens, choose a smaller --model or "
        r"raise --time-limit\n",
        err,
    ), err
