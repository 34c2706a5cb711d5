"""Run the Python snippets of docs/extending.md, and check that guides name files that exist."""

import re
import runpy
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
EXTENDING = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", EXTENDING, re.DOTALL)
GUIDES = ("CONTRIBUTING.md", "docs/ARCHITECTURE.md", "docs/GLOSSARY.md", "docs/extending.md")


def _find_missing(guide: str) -> list[str]:
    """Return the paths in backticks that exist neither in the repository nor in ``halley/``."""
    path = ROOT / guide
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    words = {word for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()}
    names = sorted(word for word in words if re.fullmatch(r"[\w.-]+/[\w./-]*", word))
    folders = (ROOT, ROOT / "halley", path.parent)
    return [name for name in names if not any((folder / name).exists() for folder in folders)]


@pytest.mark.parametrize("guide", GUIDES)
def test_guide_names_files_that_exist(guide: str) -> None:
    assert _find_missing(guide) == []


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_snippet_runs(index: int, tmp_path: Path) -> None:
    path = tmp_path / f"snippet_{index}.py"  # a file, since Triton reads the source of kernels
    path.write_text(SNIPPETS[index], encoding="utf-8")
    runpy.run_path(str(path), run_name="__main__")
