"""Run transformers' own model tests with its experts and with Halley's; compare what passes.

python benchmarks/transformers_suite.py --source CHECKOUT        # suites of the four families
python benchmarks/transformers_suite.py                          # what the source distribution has
python benchmarks/transformers_suite.py --strategy chunked ...   # another strategy

The source distribution, which is taken from the package index, has only the tests that all models
share. CHECKOUT is a source tree of transformers, at the tag of the version or near it: what the
source distribution lacks is taken from there, the families' suites among it. Without it the shared
tests are run on models of the same families (``transformers_families.py``).

Experts run by Halley wherever a model asks for none, or for transformers' default by its name, and
experts of a kind that it does not know by transformers, as for any user. The script ends with 1 if
any test has another outcome than without Halley, or if Halley was never called.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from compatibility import ROOT, make_environment


FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
_DEFAULT = "grouped_mm"  # what transformers runs experts by unless another name is given
_CALLED = "Halley was called"
# What the shared tests import and a source distribution lacks: tests of export and of generate(),
# and of ranks, which need the utilities of the very version.
_LACKING = {
    "exporters/test_export.py": "class ExportTesterMixin: ...",
    "generation/test_utils.py": "class GenerationTesterMixin: ...",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}",
    "distributed_testing_utils.py": """
import unittest

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    def skip(*args, **kwargs):
        raise unittest.SkipTest("no utilities of ranks")
    return skip
""",
}


def pytest_addoption(parser: Any) -> None:
    """Give pytest, whose plug-in this file is in the runs below, the option ``--halley``."""
    parser.addoption("--halley", default="", help="strategy that runs experts")


def pytest_configure(config: Any) -> None:
    """Put Halley's function in the place of transformers' default."""
    config.num_halley_calls = 0
    strategy = config.getoption("--halley")
    if not strategy:
        return
    import torch

    import halley.integrations.huggingface as halley_hf
    from halley.integrations.huggingface.seams import find_seams

    halley_hf.register(strategy)
    interface = find_seams().experts.ExpertsInterface
    run = interface()[halley_hf.NAME]

    def count(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # a graph would be made anew for each number
            config.num_halley_calls += 1
        return run(*args, **kwargs)

    interface.register(_DEFAULT, count)


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    terminalreporter.write_line(f"{_CALLED} {config.num_halley_calls} times")


def run(python: Path, tests: list[Path], source: Path, *, strategy: str, report: Path) -> str:
    """Run tests in a source tree; return how many passed, and how often Halley was called."""
    command = [
        python,
        "-m",
        "pytest",
        *tests,
        "-q",
        "-p",
        "transformers_suite",
        "-p",
        "no:randomly",
    ]
    command += [f"--junitxml={report}", f"--rootdir={source}", "-c", "/dev/null", "--tb=no"]
    if strategy:
        command += ["--halley", strategy]
    paths = ":".join(map(str, (source, ROOT / "benchmarks", ROOT)))
    environment = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    environment["OMP_NUM_THREADS"] = "1"  # models are tiny
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    called = [line for line in lines if line.startswith(_CALLED)]
    return "; ".join([*lines[-1:], *called])


def read_outcomes(report: Path) -> dict[str, list[str]]:
    """Return the outcomes of each test; of more than one where it has subtests."""
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        words = [word for word in ("failure", "error", "skipped") if case.find(word) is not None]
        name = f"{case.get('classname')}.{case.get('name')}"
        found.setdefault(name, []).append(words[0] if words else "passed")
    return found


def unpack(folder: Path, wanted: str, checkout: Path | None) -> Path:
    """Return a version's source distribution, with what it lacks of tests from a checkout."""
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    download += ["--no-binary", "transformers", f"transformers=={wanted}", "-d", folder]
    subprocess.run(download, check=True)
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    source = folder / f"transformers-{wanted}"
    if checkout is not None:
        shutil.copytree(source / "tests", folder / "shared")
        for tests in (checkout / "tests", folder / "shared"):
            shutil.copytree(tests, source / "tests", dirs_exist_ok=True)
        shutil.copytree(checkout / "utils", source / "utils")
        shutil.copy(checkout / "conftest.py", source)
    (source / "tests" / "__init__.py").touch()
    for name, text in _LACKING.items():
        path = source / "tests" / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(f"{text}\n")
    return source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--source", type=Path)
    parser.add_argument("--strategy", default="sequential")
    parser.add_argument("--version", default=version("transformers"), help="of transformers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="halley-suite-") as name:
        folder = Path(name)
        packages = [f"transformers=={options.version}", "httpx", "parameterized"]
        python = make_environment(folder / "venv", [*packages, "timeout-decorator"])
        source = unpack(folder, options.version, options.source)
        tests = [ROOT / "benchmarks" / "transformers_families.py"]
        if options.source:
            tests = [source / "tests" / "models" / family for family in FAMILIES]
        outcomes: list[dict[str, list[str]]] = []
        said = ""
        for strategy in ("", options.strategy):
            report = folder / "report.xml"
            said = run(python, tests, source, strategy=strategy, report=report)
            sys.stdout.write(f"{strategy or 'transformers'}: {said}\n")
            sys.stdout.flush()
            outcomes.append(read_outcomes(report))
    own, halley = outcomes
    changed = [name for name in {**own, **halley} if own.get(name) != halley.get(name)]
    for name in changed:
        sys.stdout.write(f"{name}: {own.get(name)}, with Halley {halley.get(name)}\n")
    sys.stdout.write(f"{len(own)} tests, {len(changed)} with another outcome\n")
    passed = ["passed"] in own.values()  # and not errors of imports alone
    if changed or not passed or f"{_CALLED} 0 times" in said:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
