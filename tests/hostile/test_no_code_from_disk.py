"""No file of the package loads pickles, evaluates text or trusts torch.load, but for one reader."""

import ast
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parents[2] / "halley"
# Its subclass of pickle.Unpickler refuses all names but those of torch's checkpoint metadata.
UNPICKLERS = {"train/checkpoint_reader.py"}
# ``halley run`` runs the script that its user names.
RUNNERS = {"cli/main.py": {"runpy", "compile"}}
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_MODULES |= {"joblib", "runpy", "code", "codeop"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def _find_uses(tree: ast.AST, *, allowed: set[str]) -> list[str]:
    uses: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            roots = {name.partition(".")[0] for name in names}
            uses += [f"import {root}" for root in roots & (FORBIDDEN_MODULES - allowed)]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN_CALLS - allowed or name.endswith(
                ("torch.load", "np.load", "numpy.load")
            ):
                uses.append(f"{name}()")
            uses += [
                f"{name}({keyword.arg}=...)"
                for keyword in node.keywords
                if keyword.arg in ("weights_only", "allow_pickle")
            ]
    return uses


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_nothing_that_runs_code_from_a_file_is_used(path: Path):
    name = str(path.relative_to(PACKAGE))
    allowed = {"pickle"} if name in UNPICKLERS else RUNNERS.get(name, set())
    assert _find_uses(ast.parse(path.read_text()), allowed=allowed) == []


@pytest.mark.parametrize(
    "text",
    [
        *("import pickle", "from pickle import loads", "import marshal as m", "import shelve"),
        *("eval('1')", "exec(text)", "torch.load(path)", "torch.load(path, weights_only=False)"),
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_the_check_finds_what_it_looks_for(text: str):
    assert _find_uses(ast.parse(text), allowed=set())


def test_the_one_unpickler_never_unpickles_without_its_own_class():
    text = (PACKAGE / "train" / "checkpoint_reader.py").read_text()
    uses = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("pickle.")
    }
    assert uses == {"pickle.Unpickler"}
