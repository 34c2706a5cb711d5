"""Wrong command lines: one exact line, exit code 2, no rank started and no file touched."""

import dataclasses
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from halley.cli import ranks
from halley.cli.main import main
from halley.core.load_config import load_config
from tests.hostile.commands_of_bench import BENCH_GRAPH, BENCH_LAYER, BENCH_MODEL
from tests.hostile.commands_of_plan import PLAN
from tests.hostile.commands_of_tools import TOOLS
from tests.hostile.commands_of_training import TRACE, TRAIN, TRAIN_MODEL


LIMIT_S = 60.0
PREFIX = "halley: error: "
TABLES = (TRAIN, TRAIN_MODEL, TRACE, BENCH_LAYER, BENCH_MODEL, BENCH_GRAPH, PLAN, TOOLS)
MESSAGES = {command: message for table in TABLES for command, message in table.items()}
SYSTEM = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 6171000}  # 23.5 GiB
WORDS = {
    "{models}": "tiny, mixtral-8x7b, phi-3.5-moe, qwen2-moe, qwen3-30b-a3b, olmoe, gpt-oss-20b, "
    "deepseek-v3",
    "{strategies}": "sequential, chunked, gathered, functional, unfused, fused, auto",
    "{saving}": "unfused:all, unfused:inputs, unfused:recompute, fused:all, fused:inputs, "
    "fused:recompute",
    "{train_keys}": "train.num_steps, train.batch_size, train.num_microbatches, train.dtype, "
    "train.seed, train.activation_checkpointing, train.deterministic, train.log_every, "
    "train.tensorboard",
    "{knobs}": "fetch_elements, chunk_columns, "
    "combine_rows, combine_stages, combiners_beside, combiners_after, down, up, down_grad, weight, "
    "up_grad",
    "{grouped_rows}": "torch's grouped GEMM reads rows of 16 bytes",
    "{long}": "n" * 300,
    "{machine}": platform.machine(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the command lines name."""
    path = tmp_path_factory.mktemp("commands")
    for name in ("empty", "damaged", "tiny", "deepseek-v3", "taken_too"):
        (path / name).mkdir()
    texts = {
        "short.txt": "abc",
        "script.py": "pass",
        "broken.toml": "[train\n",
        "unknown.toml": "[train]\nnum_stepz = 3\n",
        "counts.json": "[4, 1, 1, 1]",
        "negative.json": "[4, -1]",
        "damaged/config.json": '{"model": ',
        "taken_too/trace-chunked.json.gz": "notes of the user\n",
    }
    results = path / "taken" / f"cpu-{platform.machine()}x2"
    results.mkdir(parents=True)
    for name in ("layer.jsonl", "model.jsonl", "graph.jsonl", "../timeline.png", "../notes.png"):
        (results / name).write_text("notes of the user\n")
    for name, text in texts.items():
        (path / name).write_text(text)
    (path / "binary.toml").write_bytes(b"\xff\xfe")
    for model in ("tiny", "deepseek-v3"):
        config = load_config(None, overrides=[f"model={model}"])
        (path / model / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    return path


@pytest.fixture(autouse=True)
def _nothing_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(argv: list[str], *, num_processes: int) -> int:
        pytest.fail(f"{num_processes} ranks would start")

    sysconf = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: SYSTEM.get(name) or sysconf(name))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(ranks, "launch", launch)
    monkeypatch.chdir(folder)  # a run's default output is relative


def _hashes(folder: Path) -> dict[Path, str]:
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


def _filled(text: str, folder: Path) -> str:
    for word, value in {**WORDS, "{folder}": str(folder)}.items():
        text = text.replace(word, value)
    return text


@pytest.mark.parametrize("command", MESSAGES)
def test_a_wrong_command_gets_one_exact_line_and_changes_nothing(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _hashes(folder)
    assert main(shlex.split(_filled(command, folder))) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"{PREFIX}{_filled(MESSAGES[command], folder)}\n")
    assert _hashes(folder) == before


@pytest.mark.parametrize("word", ["a\0b", "a\udc80b"])
@pytest.mark.parametrize("option", ["--output", "--config", "--data", "--strategy"])
def test_no_argument_holds_a_nul_byte_or_bytes_that_are_no_text(
    option: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", option, word]) == 2
    want = f"{PREFIX}argument ({word!r}) must be UTF-8 without NUL bytes\n"
    assert capsys.readouterr().err == want


@pytest.mark.parametrize("command", ["tune --device cpu --show", "tune --device cpu"])
def test_tuned_knobs_of_the_environment_are_checked(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALLEY_KNOBS", str(folder / "binary.toml"))
    assert main(command.split()) == 2
    assert capsys.readouterr().err == (
        f"{PREFIX}tuned knobs ({folder}/binary.toml) must be UTF-8 text: the byte at offset 0 is "
        "not\n"
    )


def test_a_chart_and_results_of_before_are_replaced(folder: Path, tmp_path: Path) -> None:
    """What Halley wrote itself is no obstacle: the check passes and ranks would start."""
    rows = tmp_path / f"cpu-{platform.machine()}x2" / "model.jsonl"
    rows.parent.mkdir()
    rows.write_text('{"case": "model"}\n')
    with pytest.raises(pytest.fail.Exception, match="2 ranks would start"):
        main(f"bench model --device cpu --nproc 2 --output {tmp_path}".split())
    assert rows.read_text() == '{"case": "model"}\n'


def _run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_cannot_be_printed_is_told_in_one_line() -> None:
    done = _run(f"{sys.executable} -m halley.cli --help > /dev/full")
    assert done.returncode == 1
    assert done.stderr == "halley: failed: [Errno 28] No space left on device\n"


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    done = _run(f"{sys.executable} -m halley.cli --help | true")
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_output_and_a_dumb_terminal_are_no_failure() -> None:
    done = _run(f"{sys.executable} -m halley.cli doctor >&-", TERM="dumb")
    assert (done.returncode, done.stderr) == (0, "")
