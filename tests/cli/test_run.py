"""``halley run``: a script with its own arguments, warnings, errors and exit code."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from halley.cli.main import main
from halley.distributed.launcher import run_ranks
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
    """Return a script; what it does to the process is undone."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(autouse=True)
def _enable_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the registries of Transformers alone; ``enable`` has tests of its own."""
    calls: list[object] = []
    monkeypatch.setattr(
        halley_transformers, "enable", lambda *a, **k: calls.append((a, k)) or "said"
    )


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


def test_error_of_the_script_is_its_own(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with ``python script.py``: exit code 1, and no frame of Halley in the traceback."""
    with pytest.warns(match="of the script"):
        assert main(["--debug", "run", str(script), str(tmp_path / "told"), "--fail"]) == 1
    said, *lines = capsys.readouterr().err.splitlines()
    assert said == "halley: said"
    assert lines[:2] == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 6, in <module>',
    ]
    assert lines[-1] == "LookupError: of the script"
    assert "halley" not in "".join(lines).replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["none.py"], "script (none.py) must be a readable file: No such file or directory"),
        (["{folder}"], "script ({folder}) must be a readable file: Is a directory"),
        (["n" * 300], f"script ({'n' * 300}) must be a readable file: File name too long"),
        (["{folder}/latin.py"], "script ({folder}/latin.py) must be Python: (unicode error)"),
        (["{folder}/nul.py"], "script ({folder}/nul.py) must be Python: source code string cannot"),
        (["{folder}/broken.py"], "script ({folder}/broken.py) must be Python: '(' was never cl"),
        (["--strategy", "fastest", "{script}"], "strategy (fastest) must be one of sequential"),
        (["--nonsense", "{script}"], "--nonsense"),
        (["--nproc", "-1", "{script}"], "nproc (-1) must be at least 1, or 0 for one rank a GPU"),
        ([], "script"),
    ],
)
def test_mistake_is_one_line_and_no_rank_starts(
    arguments: list[str], wanted: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = script.parent
    (folder / "latin.py").write_bytes(b"name = '\xe9'\n")
    (folder / "nul.py").write_bytes(b"name = 1\0\n")
    (folder / "broken.py").write_text("print((1)\n")
    words = [argument.format(script=script, folder=folder) for argument in arguments]
    assert main(["run", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("halley: error: ")
    assert wanted.format(folder=folder) in line


# Runs a script as ``halley run`` does once transformers is imported, which takes seconds.
PROGRAM = """
import sys
from pathlib import Path
from halley.cli.run import Script
sys.exit(Script(path=Path(sys.argv[1]), arguments=[]).run())
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], list[str]]:
    """Return the function that makes a command of the text of a script."""

    def make(source: str) -> list[str]:
        path = tmp_path / "script.py"
        path.write_text(source)
        return [sys.executable, "-c", PROGRAM, str(path)]

    return make


@pytest.mark.parametrize(
    ("source", "code", "err"),
    [
        ("import sys; sys.exit('no text')", 1, "no text\n"),
        ("import os; os._exit(5)", 5, ""),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt\n"),  # a shell shows 130
    ],
)
def test_a_script_ends_as_under_python(
    program: Callable[[str], list[str]], source: str, code: int, err: str
) -> None:
    done = subprocess.run(program(source), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == code
    assert done.stderr.endswith(err)


@pytest.mark.parametrize(
    ("source", "code", "err"),
    [
        (
            "raise LookupError('no key')",
            1,
            'Traceback (most recent call last):\n  File "{script}", line 1, in <module>\n'
            "    raise LookupError('no key')\nLookupError: no key\n"
            "halley: failed on rank N: LookupError: no key\n",
        ),
        ("import sys; sys.exit('no text')", 1, "halley: failed on rank N: no text\n"),
        ("import sys; sys.exit(3)", 3, "halley: rank N ended with exit code 3\n"),
        (
            "import os; os.environ['RANK'] == '0' and os.kill(os.getpid(), 11)",
            139,
            "halley: rank N was killed by SIGSEGV\n",
        ),
    ],
)
def test_what_all_ranks_see_is_told_once(
    program: Callable[[str], list[str]],
    capfd: pytest.CaptureFixture[str],
    source: str,
    code: int,
    err: str,
) -> None:
    command = program(source)
    assert run_ranks(command, num_processes=2) == code
    got = re.sub(r"rank \d", "rank N", capfd.readouterr().err)
    assert got == err.replace("{script}", command[-1])


def test_example_runs_on_two_ranks() -> None:
    """The example of the documents, unchanged; the experts of both ranks make one model."""
    pytest.importorskip("transformers", minversion="5.23")
    command = [sys.executable, "-m", "halley.cli", "run", "--nproc", "2", "--strategy", "chunked"]
    path = ROOT / "examples" / "03_transformers.py"
    done = subprocess.run(
        [*command, str(path)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "(strategy chunked) in models loaded with ep_size above 1" in done.stderr
    assert "model.layers.1.mlp.experts: halley: sequential" in done.stdout
    assert done.stdout.endswith("8 experts on 2 ranks\n")
