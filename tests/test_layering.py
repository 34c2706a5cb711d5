"""Imports go down the layers of ``LAYERS`` only, and third-party modules stay in their packages."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parents[1] / "halley"
FILES = sorted(PACKAGE.rglob("*.py"))

# Each package may import the packages of the lines above it, but none of its own line.
LAYERS = (
    {"core"},
    {"cost", "interpreter"},
    {"distributed"},
    {"symm_mem"},
    {"ops"},
    {"fused"},
    {"strategies", "compiler"},
    {"lanes", "moe"},
    {"planner"},
    {"tools"},
    {"integrations", "train"},
    {"cli"},
    {"__init__", "__main__"},  # public names, and the entry point of the command line
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}

# Third-party modules, and the only packages of Halley that may import them.
ALLOWED_IMPORTERS = {
    "triton": {"interpreter", "ops", "fused"},
    "torch.autograd.Function": {"ops", "fused"},
    "torch.library": {"ops", "fused"},
    "torch.distributed": {
        "distributed", "symm_mem", "ops", "fused", "strategies",
        "moe", "planner", "tools", "train", "integrations",
    },
    "torch.fx": {"compiler", "lanes"},
    "typer": {"cli"},
    "rich": {"cli", "train", "tools"},
    "matplotlib": {"tools"},
    "transformers": {"integrations"},
    "megatron": {"integrations"},
    "torchtitan": {"integrations"},
    "deepspeed": {"integrations"},
    "safetensors": {"train"},
    "tensorboard": {"train"},
    "tokenizers": {"train"},
    "pyarrow": {"train"},
    "wandb": {"train"},
    "torch.utils.tensorboard": {"train"},
}  # fmt: skip

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120  # of functions in kernels/


def find_violations(package: str, source: str, *, parent: str = "") -> list[str]:
    """Return the imports in the source of a file that break the rules, one sentence each.

    Relative imports start from the module ``parent``, by default ``halley.<package>``.
    """
    if package not in LAYER_OF:
        return [f"{package} has no layer: add it to LAYERS"]
    names = [
        name
        for node in ast.walk(ast.parse(source))  # imports inside functions count too
        for name in (*_imported(node, parent or f"halley.{package}"), *_used(node))
    ]
    found = (check(package, name) for name in names for check in (_check_layer, _check_third_party))
    return list(dict.fromkeys(filter(None, found)))


def find_long_functions(source: str, *, max_lines: int) -> list[str]:
    """Return the functions of more than ``max_lines`` lines, from ``def`` to the last line."""
    return [
        f"{node.name} has {num_lines} lines, more than {max_lines}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (num_lines := (node.end_lineno or 0) - node.lineno + 1) > max_lines
    ]


def find_cycle(sources: dict[str, str]) -> list[str]:
    """Return the modules of one cycle among imports at module level, or an empty list.

    The sources are by module name; ``a/__init__.py`` counts as module ``a.__init__``.
    """
    graph = {}
    for module, source in sources.items():
        package = module.rpartition(".")[0]
        names = [n for node in _run_on_import(ast.parse(source)) for n in _imported(node, package)]
        graph[module] = {_module_of(name, sources) for name in names} - {"", module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def _check_layer(package: str, name: str) -> str:
    root, _, rest = f"{name}.".partition(".")
    other = rest.partition(".")[0] or "__init__"
    if root != "halley" or other == package:
        return ""
    if other not in LAYER_OF:
        return f"{package} may not use {name}: it is in no package"
    return "" if LAYER_OF[other] < LAYER_OF[package] else f"{package} may not use {other}"


def _check_third_party(package: str, name: str) -> str:
    for module, importers in ALLOWED_IMPORTERS.items():
        if f"{name}.".startswith(f"{module}.") and package not in importers:
            return f"{package} may not use {module}"
    return ""


def _imported(node: ast.AST, package: str) -> list[str]:
    """Return the full names that an import statement binds; none for other nodes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, *filter(None, [node.module])])
    return [f"{base}.{alias.name}" for alias in node.names]


def _used(node: ast.AST) -> list[str]:
    """Return the name in an expression such as ``torch.fx.Node``, which needs no own import."""
    if not isinstance(node, ast.Attribute):
        return []
    name = ast.unparse(node)
    return [name] if name.startswith("torch.") else []


def _run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from _run_on_import(child)


def _module_of(name: str, sources: dict[str, str]) -> str:
    while name and name not in sources:
        if f"{name}.__init__" in sources:
            return f"{name}.__init__"
        name = name.rpartition(".")[0]
    return name


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def test_files_import_allowed_packages_only() -> None:
    violations = {}
    for path in FILES:
        module = _module_name(path)
        package, parent = module.split(".")[1], module.rpartition(".")[0]
        if found := find_violations(package, path.read_text(), parent=parent):
            violations[module] = found
    assert violations == {}


def test_files_and_functions_are_short() -> None:
    violations = {}
    for path in FILES:
        source = path.read_text()
        in_kernels = path.parent.name == "kernels"
        max_lines = MAX_KERNEL_LINES if in_kernels else MAX_FUNCTION_LINES
        found = find_long_functions(source, max_lines=max_lines)
        if (num_lines := len(source.splitlines())) > MAX_FILE_LINES:
            found.append(f"{num_lines} lines, more than {MAX_FILE_LINES}")
        if found:
            violations[_module_name(path)] = found
    assert violations == {}


def test_no_cycle_of_imports() -> None:
    assert FILES, f"no package at {PACKAGE}"
    assert find_cycle({_module_name(path): path.read_text() for path in FILES}) == []


@pytest.mark.parametrize(
    ("package", "source", "violation"),
    [
        ("ops", "import halley.moe.layer as layer", "ops may not use moe"),
        ("ops", "from halley import moe", "ops may not use moe"),
        ("ops", "from halley.moe.layer import MoELayer", "ops may not use moe"),
        ("ops", "from .. import moe", "ops may not use moe"),
        ("ops", "from ..moe.layer import MoELayer", "ops may not use moe"),
        ("ops", "def run():\n    from halley.moe import layer", "ops may not use moe"),
        ("ops", "if TYPE_CHECKING:\n    from halley.moe import layer", "ops may not use moe"),
        # of the same layer
        ("train", "def f():\n    import halley.integrations.a", "train may not use integrations"),
        ("cli", "from torch import distributed", "cli may not use torch.distributed"),
        ("moe", "from torch.autograd import Function", "moe may not use torch.autograd.Function"),
        ("moe", "class F(torch.autograd.Function): 0", "moe may not use torch.autograd.Function"),
        ("tools", "def count(graph: torch.fx.Graph): ...", "tools may not use torch.fx"),
        ("core", "def draw():\n    import matplotlib.pyplot", "core may not use matplotlib"),
        ("moe", "import halley", "moe may not use __init__"),
        ("moe", "from halley import A", "moe may not use halley.A: it is in no package"),
        ("attic", "", "attic has no layer: add it to LAYERS"),
        ("moe", "import torch.distributed as dist", ""),
        ("moe", "import torch.functional, richer", ""),
        ("moe", "from halley.core.types import Routing", ""),
        ("moe", "from halley import ops\nfrom . import layer\nfrom ..strategies import base", ""),
    ],
)
def test_forbidden_import_is_found(package: str, source: str, violation: str) -> None:
    assert find_violations(package, source) == ([violation] if violation else [])


def test_relative_import_starts_at_the_package_of_the_file() -> None:
    source = "from .. import op\nfrom ...strategies import base"
    found = find_violations("fused", source, parent="halley.fused.kernels")
    assert found == ["fused may not use strategies"]
    assert find_violations("__init__", "from halley.cli import main", parent="halley") == []


def test_long_function_is_found() -> None:
    source = "class A:\n    def long(self):\n        a = 1\n        return a\n\ndef short(): ...\n"
    assert find_long_functions(source, max_lines=2) == ["long has 3 lines, more than 2"]
    assert find_long_functions(source, max_lines=3) == []


def test_cycle_is_found_unless_an_import_is_inside_a_function() -> None:
    sources = {
        "halley.core.__init__": "from halley.core.types import Routing",
        "halley.core.types": "try:\n    from . import config\nexcept ImportError: ...",
        "halley.core.config": "from halley.core import Routing",
    }
    assert set(find_cycle(sources)) == set(sources)
    sources["halley.core.config"] = "def load():\n    from halley.core import Routing"
    assert find_cycle(sources) == []
