"""Documents name files and commands that exist, and their Python snippets run."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import typer

from halley.cli.main import app


ROOT = Path(__file__).parents[1]
EXTENDING = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", EXTENDING, re.DOTALL)
OF_A_RUN = ("checkpoints/", "previous-1/")  # files in the output folder of a run
# The changelog and the log may name files of earlier versions.
HISTORY = {"CHANGELOG.md", "docs/LOG.md"}
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
GUIDES = sorted({str(page.relative_to(ROOT)) for page in PAGES} - HISTORY)


def _find_missing(guide: str) -> list[str]:
    """Return the paths in backticks that exist neither in the repository nor in ``halley/``."""
    path = ROOT / guide
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    words = {word for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()}
    names = sorted(word for word in words if re.fullmatch(r"[\w-]+/[\w./-]*", word))
    names = [name for name in names if not name.startswith(OF_A_RUN)]
    folders = (ROOT, ROOT / "halley", path.parent)
    return [name for name in names if not any((folder / name).exists() for folder in folders)]


@pytest.mark.parametrize("guide", GUIDES)
def test_guide_names_files_that_exist(guide: str) -> None:
    assert _find_missing(guide) == []


def _find_wrong_options(command: str) -> list[str]:
    """Return the subcommand or the options of a ``halley`` command line that do not exist."""
    words = command.split()
    parsed: Any = typer.main.get_command(app)
    while hasattr(parsed, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        if name not in parsed.commands:
            return [name]
        parsed = parsed.commands[name]
    known = {option for parameter in parsed.params for option in parameter.opts}
    return [word for word in words if word.startswith("--") and word not in known]


@pytest.mark.parametrize("guide", GUIDES)
def test_guide_names_commands_that_exist(guide: str) -> None:
    text = (ROOT / guide).read_text(encoding="utf-8")
    pattern = r"(?:^ {4}|^|`)(?:halley|torchrun [^\n`]*-m halley\.cli) ([a-z][^\n`#]*)"
    commands = re.findall(pattern, text, flags=re.MULTILINE)
    wrong = {each: found for each in commands if (found := _find_wrong_options(each))}
    assert wrong == {}


def test_unknown_option_of_a_document_is_found() -> None:
    assert _find_wrong_options("bench layer --no-such 3 --tokens 4") == ["--no-such"]
    assert _find_wrong_options("no-such --tokens 4") == ["no-such"]


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_snippet_runs(index: int, tmp_path: Path) -> None:
    path = tmp_path / f"snippet_{index}.py"  # a file, because Triton reads the source of kernels
    path.write_text(SNIPPETS[index], encoding="utf-8")
    runpy.run_path(str(path), run_name="__main__")
