"""A wrong command line prints one exact line, exits with 2, and starts and changes nothing."""

import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.graph_bench.__main__ import main as graph_bench
from benchmarks.model_bench.__main__ import main as model_bench
from halley.cli import ranks
from halley.cli.main import main
from halley.core.models import load_config
from tests.damage import hash_tree
from tests.hostile.cases import DATA, fill, read_cases


LIMIT_S = 60.0
PREFIX = "halley: error: "
CASES = read_cases("commands_train", "commands_bench", "commands_plan", "commands_tools")
SYSTEM = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 6171000}  # 23.5 GiB
WORDS: dict[str, str] = json.loads((DATA / "words.json").read_text())
WORDS |= {"long": "n" * 300, "machine": platform.machine()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the command lines name."""
    path = tmp_path_factory.mktemp("commands")
    for name in ("empty", "damaged", "list", "partial", "tiny", "deepseek-v3", "taken_too"):
        (path / name).mkdir()
    texts = {
        "short.txt": "abc",
        "empty/empty.txt": "",
        "script.py": "pass",
        "broken.toml": "[train\n",
        "unknown.toml": "[train]\nnum_stepz = 3\n",
        "counts.json": "[4, 1, 1, 1]",
        "negative.json": "[4, -1]",
        "damaged/config.json": '{"model": ',
        "list/config.json": "[]",
        "partial/config.json": '{"model": {"name": "x"}}',
        "taken_too/trace-chunked.json.gz": "notes of the user\n",
        "rows.jsonl": '{"text": "a"}\n{"text": \n',
        "bodies.jsonl": '{"body": "a"}\n',
        "no.parquet": "no table",
        "tokenizer.json": '{"model": {"type": "WordLevel", "vocab": {"a": 299}, "unk_token": "a"}}',
        "list/tokens.json": '{"version": 1, "tokenizer_checksum": "x", "vocab_size": 300}',
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


def _call(words: list[str]) -> int:
    """Run ``halley``, or a script of benchmarks/ for "bench model" and "bench graph"."""
    scripts = {"bench model": model_bench, "bench graph": graph_bench}
    script = scripts.get(" ".join(words[:2]))
    return main(words) if script is None else script(words[2:])


@pytest.mark.parametrize(("command", "message"), CASES)
def test_wrong_command_prints_one_exact_line_and_changes_nothing(
    command: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {**WORDS, "folder": str(folder)}
    before, paths = hash_tree(folder), set(folder.rglob("*"))
    assert _call(shlex.split(fill(command, words))) == 2
    assert capsys.readouterr() == ("", f"{PREFIX}{fill(message, words)}\n")
    assert (hash_tree(folder), set(folder.rglob("*"))) == (before, paths)


@pytest.mark.parametrize("command", ["tune --device cpu --show", "tune --device cpu"])
def test_table_named_by_environment_variable_is_checked(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALLEY_KERNEL_CONFIG", str(folder / "binary.toml"))
    assert main(command.split()) == 2
    assert capsys.readouterr().err == (
        f"{PREFIX}tuned kernel configurations ({folder}/binary.toml) must be UTF-8 text: the byte "
        "at offset 0 is not\n"
    )


def test_results_of_an_earlier_run_are_accepted(folder: Path, tmp_path: Path) -> None:
    """The check refuses files of the user, but not files that Halley wrote."""
    rows = tmp_path / f"cpu-{platform.machine()}x2" / "model.jsonl"
    rows.parent.mkdir()
    rows.write_text('{"case": "model"}\n')
    with pytest.raises(pytest.fail.Exception, match="2 ranks would start"):
        model_bench(f"--device cpu --nproc 2 --output {tmp_path}".split())
    assert rows.read_text() == '{"case": "model"}\n'


@pytest.mark.parametrize(
    ("command", "code", "errors"),
    [
        pytest.param(
            *("--help > /dev/full", 1, "halley: failed: [Errno 28] No space left on device\n"),
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full"),
        ),
        ("--help | true", 141, ""),
        ("doctor >&-", 0, ""),
    ],
    ids=["full device", "closed pipe", "closed stdout"],
)
def test_output_that_cannot_be_written_gives_no_traceback(
    command: str, code: int, errors: str
) -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m halley.cli {command}"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"},
    )
    assert (done.returncode, done.stderr) == (code, errors)
