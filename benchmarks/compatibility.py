"""Run the tests of the plug-ins with several versions of their frameworks; write the tables.

python benchmarks/compatibility.py                       # all versions of all, then the tables
python benchmarks/compatibility.py torchtitan            # one framework; keep other results
python benchmarks/compatibility.py transformers 5.20.2   # one version of it
python benchmarks/compatibility.py --table               # the tables alone
python benchmarks/compatibility.py --gate                # newest versions here; exit 1 if one fails

Each version gets a virtual environment in a temporary folder. A package that is missing there is
taken from a base: the running interpreter, or an environment with another Python or torch. A
"0.3.0+python3.12+torch2.15.0" names them; without these words they are the running interpreter's.
Results are in benchmarks/results/, tables in docs/.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree


ROOT = Path(__file__).parents[1]
NEWEST_TORCH = "+torch2.15.0"
NEWER_MEGATRON = ("0.17.1", "0.18.2", "0.19.2")  # these need Python 3.12
START, END = "<!-- table: made by benchmarks/compatibility.py -->", "<!-- end of table -->"


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A plug-in, its framework and the versions that are tested.

    Attributes:
        plugin: names of its results and of its document.
        tests: files of its tests, as patterns.
        versions: of the framework's package, oldest first, each with "+python..." or "+torch..." if
            Python or torch are not the running interpreter's.
        needs: further packages.
        row: what a row of its table is.
    """

    plugin: str
    tests: tuple[str, ...]
    versions: tuple[str, ...]
    needs: tuple[str, ...] = ()
    row: str = "case"

    @property
    def results(self) -> Path:
        return ROOT / "benchmarks" / "results" / f"{self.plugin}.json"

    @property
    def document(self) -> Path:
        return ROOT / "docs" / f"{self.plugin}.md"


FRAMEWORKS = {
    "transformers": Framework(
        plugin="transformers",
        tests=("test_contract.py", "test_transformers_*.py"),
        versions=("5.17.0", "5.20.2", "5.22.2", "5.23.0", "5.24.0", f"5.24.0{NEWEST_TORCH}"),
        needs=("accelerate",),
        row="family",
    ),
    "torchtitan": Framework(
        plugin="torchtitan",
        tests=("test_torchtitan.py",),
        versions=("0.3.0", f"0.3.0{NEWEST_TORCH}"),
    ),
    "megatron-core": Framework(
        plugin="megatron",
        tests=("test_megatron*.py",),
        versions=("0.16.1", *(f"{name}+python3.12{NEWEST_TORCH}" for name in NEWER_MEGATRON)),
        needs=("psutil",),  # its checkpoints need it, and it does not name it
    ),
    "deepspeed": Framework(
        plugin="deepspeed",
        tests=("test_deepspeed.py",),
        versions=("0.19.8", f"0.19.8{NEWEST_TORCH}"),
        needs=("transformers==5.22.2",),  # AutoEP of 0.19.8 fails on what 5.23 changed
    ),
}


def find_base(folder: Path, wanted: str) -> Path:
    """Return the interpreter from which a version takes the packages that it does not bring.

    Raises:
        SystemExit: the version needs a Python that is not installed.
    """
    words = wanted.split("+")[1:]
    base = folder / "-".join(words)
    interpreter = base / "bin" / "python"
    if not words:
        return Path(sys.executable)
    if interpreter.exists():
        return interpreter
    python = next((word for word in words if word.startswith("python")), sys.executable)
    if shutil.which(python) is None:
        raise SystemExit(f"command {python} must exist: install it, or add its folder to PATH")
    torch = next((word for word in words if word.startswith("torch")), f"torch{version('torch')}")
    subprocess.run([python, "-m", "venv", base], check=True)
    # torch first: which triton fits depends on its build.
    torch = torch.replace("torch", "torch==").partition("+")[0]
    for packages in ([torch], ["-e", ROOT, "pytest", "safetensors"]):
        subprocess.run([interpreter, "-m", "pip", "install", "-q", *packages], check=True)
    return interpreter


def make_environment(folder: Path, base: Path, packages: list[str]) -> Path:
    """Make an environment with packages that pip installs; return its interpreter."""
    subprocess.run([base, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    (own,) = folder.glob("lib/python*/site-packages")
    (below,) = base.parents[1].glob("lib/python*/site-packages")
    (own / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
    # What is below is taken where it fits, and torch always.
    limits = folder / "constraints.txt"
    names = {name: ask(python, f"version({name!r})") for name in ("torch", "numpy")}
    limits.write_text("".join(f"{name}=={found}\n" for name, found in names.items()))
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", limits]
    subprocess.run([*install, *packages], check=True)
    return python


def ask(python: Path, expression: str) -> str:
    """Return the value of an expression with ``version`` and ``sys`` in another interpreter."""
    code = f"import sys; from importlib.metadata import version; print({expression})"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def run_tests(python: Path, framework: Framework, report: Path) -> dict[str, Any]:
    """Run the tests of a plug-in; return their outcomes."""
    folder = ROOT / "tests" / "integrations"
    tests = [path for pattern in framework.tests for path in sorted(folder.glob(pattern))]
    command = [python, "-m", "pytest", *tests, "-q", "-p", "no:cacheprovider"]
    command += ["-o", "junit_family=xunit1", f"--junitxml={report}"]  # the newer has no properties
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if not report.exists():  # pytest did not start, or was killed
        raise subprocess.CalledProcessError(done.returncode, command)
    found = {
        "torch": ask(python, "version('torch')").partition("+")[0],
        "python": ask(python, "'%d.%d' % sys.version_info[:2]"),
    }
    return {**found, **read_report(report)}


def read_report(report: Path) -> dict[str, Any]:
    """Return the number of tests by outcome, the failed tests, and the outcome of each family."""
    passed, failed, skipped = 0, list[str](), 0
    rows: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.get("name", "")
        if case.find("skipped") is not None:
            skipped += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        else:
            passed += 1
            ran = {p.get("value", "") for p in case.iter("property") if p.get("name") == "ran"}
            if ran:
                found = rows.setdefault(name.partition("[")[2].partition("-")[0], [])
                found += [path for path in sorted(ran) if path not in found]
    return {"passed": passed, "skipped": skipped, "failed": failed, "rows": rows}


def table(results: dict[str, Any], row: str) -> list[str]:
    """Return the lines of the Markdown table."""
    versions = sorted(results, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
    rows = list(dict.fromkeys(f for name in versions for f in results[name]["rows"]))
    lines = [
        f"| {row} | {' | '.join(name.partition('+')[0] for name in versions)} |",
        f"|---|{'---|' * len(versions)}",
    ]
    for each in rows:
        cells = [", ".join(results[name]["rows"].get(each, ["-"])) for name in versions]
        lines.append(f"| {each} | {' | '.join(cells)} |")
    for word in ("passed", "skipped", "failed"):
        counts = [results[name][word] for name in versions]
        cells = [str(count if isinstance(count, int) else len(count)) for count in counts]
        lines.append(f"| tests {word} | {' | '.join(cells)} |")
    for word in ("torch", "python"):
        lines.append(f"| {word} | {' | '.join(results[name][word] for name in versions)} |")
    return lines


def render(document: str, lines: list[str]) -> str:
    """Return the document with its table replaced.

    Raises:
        ValueError: the document lacks the markers.
    """
    if START not in document or END not in document:
        raise ValueError(f"document must have the markers {START} and {END}")
    before, rest = document.split(START)
    after = rest.split(END)[1]
    return f"{before}{START}\n\n" + "\n".join(lines) + f"\n\n{END}{after}"


def run_version(name: str, wanted: str, base: Path) -> dict[str, Any]:
    """Run a plug-in's tests with one version of its framework, in an environment over ``base``."""
    framework = FRAMEWORKS[name]
    with tempfile.TemporaryDirectory(prefix="halley-compatibility-") as folder:
        packages = [f"{name}=={wanted.partition('+')[0]}", *framework.needs]
        python = make_environment(Path(folder) / "venv", base, packages)
        return run_tests(python, framework, Path(folder) / "report.xml")


def run_framework(name: str, versions: Sequence[str], bases: Path) -> None:
    """Run the tests with these versions; keep the results of other versions."""
    framework = FRAMEWORKS[name]
    path = framework.results
    results = json.loads(path.read_text(encoding="ascii")) if path.exists() else {}
    for wanted in versions:
        results[wanted] = run_version(name, wanted, find_base(bases, wanted))
        path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="ascii")


def run_gate() -> None:
    """Run the tests with the newest version of each framework that this interpreter can run.

    No result is written. A framework of this environment is left out: `make test` has it.

    Raises:
        SystemExit: a test failed, a plug-in had no test that passed, or a framework cannot be
            installed, for example without a network.
    """
    broken: list[str] = []
    for name, framework in FRAMEWORKS.items():
        if find_spec(name.partition("-")[0]) is not None:
            continue
        runnable = [each for each in framework.versions if is_runnable(each)]
        newest = runnable[-1].partition("+")[0]  # with this interpreter and its torch
        begin = time.monotonic()
        try:
            found = run_version(name, newest, Path(sys.executable))
        except subprocess.CalledProcessError as error:
            command = shlex.join(map(str, error.cmd))
            broken.append(f"{name} {newest}: not tested, exit code {error.returncode} of {command}")
            continue
        duration_s = time.monotonic() - begin
        sys.stdout.write(f"{name} {newest}: {found['passed']} passed in {duration_s:.0f} s\n")
        if found["failed"] or not found["passed"]:
            broken.append(f"{name} {newest}: {', '.join(found['failed']) or 'no test passed'}")
    if broken:
        raise SystemExit("\n".join(["plug-ins fail with", *broken]))


def is_runnable(wanted: str) -> bool:
    """Return whether the running interpreter is one that a version asks for."""
    asked = re.search(r"\+python(\d+)\.(\d+)", wanted)
    return not asked or sys.version_info[:2] >= (int(asked[1]), int(asked[2]))


def run(words: list[str], bases: Path) -> None:
    """Run what the words of the command line name; make base environments in a folder."""
    match words:
        case []:
            for name, framework in FRAMEWORKS.items():
                run_framework(name, framework.versions, bases)
        case ["--table"]:
            pass
        case [name, *versions] if name in FRAMEWORKS:
            run_framework(name, versions or FRAMEWORKS[name].versions, bases)
        case [name, *_]:
            raise SystemExit(f"framework ({name}) must be one of {', '.join(FRAMEWORKS)}")


def main() -> None:
    if sys.argv[1:] == ["--gate"]:
        return run_gate()
    with tempfile.TemporaryDirectory(prefix="halley-compatibility-") as folder:
        run(sys.argv[1:], Path(folder))
    for framework in FRAMEWORKS.values():
        results = json.loads(framework.results.read_text(encoding="ascii"))
        document = framework.document
        text = render(document.read_text(encoding="utf-8"), table(results, framework.row))
        document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
