"""``halley run``: a script with its own arguments, warnings, errors and exit code."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from halley.cli.main import Script, main
from halley.distributed.launcher import launch
from halley.integrations import transformers as halley_transformers


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
    """Return a script; its changes of sys.argv and sys.path are undone after the test."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(autouse=True)
def _enable_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the registries of Transformers alone; ``enable`` has tests of its own."""
    monkeypatch.setattr(halley_transformers, "enable", lambda strategy, strict: "said")


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


def test_traceback_of_a_script_has_no_frame_of_halley(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with ``python script.py``: exit code 1, and no frame of Halley in the traceback."""
    with pytest.warns(match="of the script"):
        assert main(["--debug", "run", str(script), str(tmp_path / "told"), "--fail"]) == 1
    said, heading, place, *lines = capsys.readouterr().err.splitlines()
    assert (said, heading) == ("halley: said", "Traceback (most recent call last):")
    assert place == f'  File "{script}", line 6, in <module>'
    assert lines[-1] == "LookupError: of the script"
    assert "halley" not in "".join(lines).replace(str(tmp_path), "")


def test_script_with_a_nul_byte_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other wrong command lines are in tests/hostile/data/commands_tools.jsonl."""
    path = tmp_path / "nul.py"
    path.write_bytes(b"name = 1\0\n")
    assert main(["run", str(path)]) == 2
    wanted = f"halley: error: script ({path}) must be Python: source code string cannot"
    assert capsys.readouterr().err.startswith(wanted)


# Runs a script as ``halley run`` does once transformers is imported, which takes seconds.
PROGRAM = """
import pathlib, sys
from halley.cli.main import Script
sys.exit(Script(path=pathlib.Path(sys.argv[1]), arguments=[]).run())
"""


def _command(folder: Path, source: str) -> list[str]:
    """Return the command that runs the text of a script."""
    path = folder / "script.py"
    path.write_text(source)
    return [sys.executable, "-c", PROGRAM, str(path)]


def test_an_interrupted_script_ends_as_under_python(tmp_path: Path) -> None:
    command = _command(tmp_path, "raise KeyboardInterrupt")
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == -signal.SIGINT  # a shell shows 130
    assert done.stderr.endswith("KeyboardInterrupt\n")


def test_error_of_all_ranks_is_printed_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = _command(tmp_path, "raise LookupError('no key')")
    assert launch(command, num_processes=2) == 1
    assert re.sub(r"rank \d", "rank N", capfd.readouterr().err) == (
        f'Traceback (most recent call last):\n  File "{command[-1]}", line 1, in <module>\n'
        "    raise LookupError('no key')\nLookupError: no key\n"
        "halley: failed on rank N: LookupError: no key\n"
    )


def test_exit_text_of_a_script_is_an_error_of_its_rank(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a launcher, Python itself prints the text."""
    script.write_text("import sys; sys.exit('no text')")
    with pytest.raises(SystemExit, match=r"^no text$"):
        Script(path=script, arguments=[]).run()
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert Script(path=script, arguments=[]).run() == 1
    assert capsys.readouterr().err == "halley: failed on rank 1: no text\n"


def test_example_runs_on_two_ranks() -> None:
    """The example of the documents, unchanged; the experts of both ranks make one model."""
    pytest.importorskip("transformers", minversion="5.23")
    command = [sys.executable, "-m", "halley.cli", "run", "--nproc", "2", "--strategy", "chunked"]
    path = ROOT / "examples" / "03_transformers.py"
    done = subprocess.run(
        [*command, str(path)], cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "(strategy chunked) in models loaded with ep_size above 1" in done.stderr
    assert "model.layers.1.mlp.experts: halley: sequential" in done.stdout
    assert done.stdout.endswith("8 experts on 2 ranks\n")


def test_version_and_shell_completion_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Typer would look for a shell among the parent processes, where a background job has none.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert main(["--version"]) == main(["--show-completion", "bash"]) == 0
    assert re.match(r"halley \d+\.\d+\.\d+\n_halley_completion", capsys.readouterr().out)
