"""Errors of commands: a mistake of the user gives one line and exit code 2, and starts no rank."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.graph_bench.__main__ import main as graph_bench
from benchmarks.model_bench.__main__ import main as model_bench
from halley.cli import ranks
from halley.cli.main import main


LIMIT_S = 60.0
PREFIX = "halley: error: "


@pytest.fixture(autouse=True)
def _nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(argv: list[str], *, num_processes: int) -> int:
        pytest.fail(f"{num_processes} ranks would start")

    monkeypatch.setattr(ranks, "launch", launch)
    monkeypatch.chdir(tmp_path)  # a run's default output is relative


def _line_of(err: str) -> str:
    """Return the one line of standard error, without its prefix."""
    assert err.startswith(PREFIX)
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.removeprefix(PREFIX).strip()


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("bench layer --output out --device cpu", "matplotlib", "plot"),
        ("train --set train.tensorboard=true --set device=cpu", "tensorboard", "tensorboard"),
        ("train --set train.wandb=true --set device=cpu", "wandb", "wandb"),
        ("train --set data.tokenizer=a.json --set device=cpu", "tokenizers", "data"),
        ("tokenize a.txt tokens --tokenizer a.json", "tokenizers", "data"),
    ],
)
def test_missing_package_is_named_with_the_command_that_installs_it(
    command: str, package: str, extra: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setattr("halley.core.validation.find_spec", lambda name: None)
    assert main(command.split()) == 2
    line = _line_of(capsys.readouterr().err)
    assert line.endswith(
        f"must have the package {package}: pip install '.[{extra}]' in a checkout of Halley"
    )


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("--debug train --set train.num_steps=0", "train.num_steps (0) must be at least 1"),
        ("train --set train.num_steps=0 --debug", "train.num_steps (0) must be at least 1"),
        # A folder that is named like a command does not end the options of halley.
        ("export run --output hf --debug", "run "),
    ],
)
def test_debug_shows_the_traceback(command: str, told: str, capsys: pytest.CaptureFixture[str]):
    assert main(command.split()) == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last.startswith(f"{PREFIX}{told}")


@pytest.mark.parametrize(
    ("rank", "local_rank", "told"),
    [
        (None, None, "halley: failed: the disk is full\n"),
        ("5", None, ""),
        ("5", "0", "halley: failed on rank 5: the disk is full\n"),
        ("5", "1", ""),
    ],
)
def test_a_failure_or_a_mistake_is_printed_once_on_each_host(
    rank: str | None, local_rank: str | None, told: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """Under torchrun, other ranks write the error to torchrun's error file, which it prints."""

    def fail() -> None:
        raise RuntimeError("the disk\nis full")

    monkeypatch.setattr("halley.cli.doctor.examine_machine", fail)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == told
    assert (tmp_path / "error.json").exists() == (not told)
    assert main(["train", "--set", "train.num_steps=0"]) == 2  # a mistake of the user
    assert bool(capsys.readouterr().err) == bool(told)


@pytest.mark.parametrize(
    ("command", "usage"), [("", "halley [OPTIONS]"), ("bench", "halley bench [OPTIONS]")]
)
def test_help_where_no_command_is_given(
    command: str, usage: str, capsys: pytest.CaptureFixture[str]
):
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    assert f"Usage: {usage}" in captured.out + captured.err
    assert PREFIX.strip() not in captured.err


# Runs ``python -m halley.cli`` and then prints whether that imported Triton.
PROGRAM = """
import runpy, sys
try:
    runpy.run_module("halley.cli", run_name="__main__")
finally:
    print("triton" in sys.modules)
"""


def test_program_exits_with_2_and_imports_no_triton(tmp_path: Path):
    """The first import of Triton decides whether its kernels are interpreted."""
    (tmp_path / "short.txt").write_text("abc")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "train", "--data", f"{tmp_path}/short.txt"],
        capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "False\n")
    line = f"data.path ({tmp_path}/short.txt) must hold at least one window of 257 bytes"
    assert _line_of(done.stderr) == f"{line}, and has 3 bytes"


@pytest.mark.parametrize(
    ("run", "module", "command"),
    [
        (main, "halley.cli", "train --nproc 2 --set device=cpu --debug"),
        (model_bench, "benchmarks.model_bench", "--nproc 2 --device cpu"),
        (graph_bench, "benchmarks.graph_bench", "--nproc 2 --device cpu"),
    ],
)
def test_ranks_get_the_module_and_the_arguments_of_the_command(
    run: Callable[[list[str]], int], module: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[str]] = []
    monkeypatch.setattr(ranks, "launch", lambda argv, *, num_processes: found.append(argv) or 3)
    assert run(command.split()) == 3
    assert found == [[sys.executable, "-m", module, *command.split()]]


@pytest.mark.parametrize(("rank", "told"), [(None, "halley: interrupted\n"), ("0", "")])
def test_only_the_process_that_started_the_ranks_reports_an_interrupt(
    rank: str | None, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def interrupt() -> None:
        raise KeyboardInterrupt

    for name in ("RANK", "WORLD_SIZE") if rank else ():
        monkeypatch.setenv(name, str(rank))
    monkeypatch.setattr("halley.cli.doctor.examine_machine", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == told
    if not rank:
        monkeypatch.setattr(ranks, "launch", lambda argv, *, num_processes: 130)
        assert main(["train", "--nproc", "2", "--set", "device=cpu"]) == 130
        assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    "command",
    [
        # Each strategy of a trace is checked, and not that of the run.
        "trace --strategies functional,fused",
        "train --strategy planned",
        "train --strategy functional,fused:inputs,unfused,functional",
        "train --strategy unfused",
    ],
)
def test_strategies_that_are_part_of_a_graph_have_passes(
    command: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ranks, "launch", lambda argv, *, num_processes: 7)
    assert main([*command.split(), "--set=passes=wgrad", "--set=device=cpu", "--nproc=2"]) == 7
