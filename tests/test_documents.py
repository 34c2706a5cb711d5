"""Examples run, and tables in the README are those of the result files."""

import importlib.util
import runpy
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert "experts" in capsys.readouterr().out


def test_readme_has_the_tables_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    lines: list[str] = []
    for path in sorted(ROOT.glob("benchmarks/results/*/layer.jsonl")):
        lines += ["", *tables.layer_table(path)] if lines else tables.layer_table(path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tables.render(readme, lines) == readme
