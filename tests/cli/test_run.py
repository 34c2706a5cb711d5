"""``halley run``: a script with its own arguments, warnings, errors and exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from halley.cli.main import main
from halley.integrations import huggingface


ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
SCRIPT = """
import pathlib, sys, warnings
pathlib.Path(sys.argv[1]).write_text(repr((sys.argv[2:], __name__, sys.path[0])))
warnings.warn("of the script", DeprecationWarning)
if "--fail" in sys.argv:
    raise LookupError("of the script")
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a script; what it does to the process is undone."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(autouse=True)
def _unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the registries alone: what register does has its own tests."""
    calls: list[object] = []
    monkeypatch.setattr(huggingface, "register", lambda *a, **k: calls.append((a, k)) or "said")


def test_script_gets_its_arguments_and_keeps_its_exit_code(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "told"
    arguments = ["run", "--strategy", "chunked", str(script), str(told), "--debug", "--nproc", "2"]
    with pytest.warns(DeprecationWarning, match="of the script"), pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 7
    assert told.read_text() == repr((["--debug", "--nproc", "2"], "__main__", str(tmp_path)))
    assert capsys.readouterr().err == "halley: said\n"


def test_error_of_the_script_is_its_own(script: Path, tmp_path: Path) -> None:
    with pytest.warns(match="of the script"), pytest.raises(LookupError, match="of the script"):
        main(["--debug", "run", str(script), str(tmp_path / "told"), "--fail"])


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["none.py"], "script (none.py) must be a Python file"),
        (["--strategy", "fastest", "{script}"], "strategy (fastest) must be one of sequential"),
        (["--nonsense", "{script}"], "--nonsense"),
        ([], "script"),
    ],
)
def test_mistake_is_one_line(
    arguments: list[str], wanted: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *(argument.format(script=script) for argument in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("halley: error: ")
    assert wanted in line


def test_example_runs_on_two_ranks() -> None:
    """The example of the documents, unchanged; the experts of both ranks make one model."""
    pytest.importorskip("transformers", minversion="5.23")
    command = [sys.executable, "-m", "halley.cli", "run", "--nproc", "2", "--strategy", "chunked"]
    path = ROOT / "examples" / "03_huggingface.py"
    done = subprocess.run(
        [*command, str(path)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "(strategy chunked) by default" in done.stderr
    assert "model.layers.1.mlp.experts: halley: sequential" in done.stdout
    assert done.stdout.endswith("8 experts on 2 ranks\n")
