"""Only one file of the package unpickles; none evaluates text or uses an unsafe torch.load."""

import ast
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parents[2] / "halley"
ALLOWED = {
    # Its subclass of pickle.Unpickler refuses all names but those of torch's checkpoint metadata.
    "train/checkpoint_reader.py": {"pickle"},
    # ``halley run`` runs the script that its user names.
    "cli/main.py": {"runpy", "compile"},
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_MODULES |= {"joblib", "runpy", "code", "codeop"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
LOADERS = ("torch.load", "np.load", "numpy.load")


def _find_uses(text: str) -> set[str]:
    """Return the forbidden modules that a text imports and the forbidden functions it calls."""
    uses: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            uses |= {alias.name.partition(".")[0] for alias in node.names} & FORBIDDEN_MODULES
        elif isinstance(node, ast.ImportFrom):
            uses |= {(node.module or "").partition(".")[0]} & FORBIDDEN_MODULES
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN_CALLS or name.endswith(LOADERS):
                uses.add(name)
        elif isinstance(node, ast.keyword):
            uses |= {node.arg or ""} & {"weights_only", "allow_pickle"}
    return uses


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_nothing_that_runs_code_from_a_file_is_used(path: Path):
    name = str(path.relative_to(PACKAGE))
    assert _find_uses(path.read_text()) - ALLOWED.get(name, set()) == set()


@pytest.mark.parametrize(
    "text",
    [
        *("import pickle", "from pickle import loads", "import marshal as m", "import shelve"),
        *("eval('1')", "exec(text)", "torch.load(path)", "torch.load(path, weights_only=False)"),
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_the_check_finds_what_it_looks_for(text: str):
    assert _find_uses(text)


def test_the_one_unpickler_never_unpickles_without_its_own_class():
    text = (PACKAGE / "train" / "checkpoint_reader.py").read_text()
    uses = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("pickle.")
    }
    assert uses == {"pickle.Unpickler"}
