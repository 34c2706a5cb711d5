"""Run the model tests of transformers with its own experts and with Halley's; compare outcomes.

python benchmarks/transformers_suite.py --source CHECKOUT        # suites of the four families
python benchmarks/transformers_suite.py                          # tests of the source distribution
python benchmarks/transformers_suite.py --strategy chunked ...   # another strategy
python benchmarks/transformers_suite.py --activation silu ...    # models with another activation
python benchmarks/transformers_suite.py --table                  # only the table in docs/

The source distribution comes from the package index and has only the tests that all models share.
CHECKOUT is a source tree of transformers, at the tag of the version or near it. Files that the
source distribution lacks come from there, for example the suites of the families. Without CHECKOUT,
the shared tests run on models of the same families (``transformers_families.py``).

``transformers_plugin.py`` replaces the experts of transformers by those of Halley. The script
prints a table, and then the same as one JSON line. ``--output FILE`` also adds that line to a file.
The file RESULTS gives the table of docs/transformers.md. The exit code is 1 if a test has another
outcome than without Halley, if Halley never ran experts, or if an output in float32 differs from
that of transformers by more than rounding.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compatibility import ROOT, make_environment


FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
SIDES = ("transformers", "halley")
COUNTS = ("passed", "skipped", "failed")
DTYPES = ("float32", "bfloat16")
COLUMNS = ("family", "tests", *COUNTS, "differ", "calls by Halley", *(f"{d} error" for d in DTYPES))
MAX_ERROR = 1e-5  # of an output in float32, over the largest
RESULTS = ROOT / "benchmarks" / "results" / "transformers_suite.json"
DOCUMENT = ROOT / "docs" / "transformers.md"
START = "<!-- suites: made by benchmarks/transformers_suite.py -->"
END = "<!-- end of suites -->"
_LIMIT_S = 3600.0  # for one side
# Modules that the shared tests import and a source distribution lacks: tests of export, of
# generate() and of ranks. They need the utilities of exactly this version of transformers.
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


@dataclass(frozen=True, kw_only=True)
class Side:
    """The outcome of each test with one kind of experts, by the test's id.

    Attributes:
        outcomes: how often each outcome came; more than one where a test has subtests.
        calls: how many calls of experts Halley ran, and how many it left to their own arithmetic.
        errors: largest difference of Halley's outputs from transformers', relative, by dtype.
        messages: what the first failure of a test said.
        seconds: of the whole run.
    """

    outcomes: dict[str, dict[str, int]]
    calls: dict[str, dict[str, int]]
    errors: dict[str, dict[str, float]]
    messages: dict[str, str]
    seconds: float = 0.0


def run(python: Path, tests: list[Path], source: Path, *, options: list[str], record: Path) -> Side:
    """Run tests in a source tree; return what they did.

    Raises:
        RuntimeError: pytest did not run them to their end.
    """
    command = [python, "-m", "pytest", *tests, "-q", "-p", "transformers_plugin"]
    command += ["-p", "no:randomly", "-p", "no:cacheprovider", f"--rootdir={source}"]
    command += ["-c", "/dev/null", "--tb=no", "--record", record, *options]
    command += ["--import-mode=append"]  # the package ``tests`` is that of the source tree
    environment = {
        "PYTHONPATH": ":".join(map(str, (source, ROOT / "benchmarks", ROOT))),
        "PATH": "/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # models are tiny
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(record.with_suffix(".compiled")),  # neither side has the
        "TMPDIR": str(record.parent),  # other's graphs
    }
    begin = time.perf_counter()
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, timeout=_LIMIT_S
    )
    seconds = time.perf_counter() - begin
    if done.returncode not in (0, 1):  # all passed, and some failed
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return Side(**json.loads(record.read_text(encoding="utf-8")), seconds=round(seconds, 1))


def family_of(test: str) -> str:
    """Return the family that a test's class is of, or "other"."""
    name = test.partition("::")[2].lower()
    return next((each for each in FAMILIES if name.startswith(each.replace("_", ""))), "other")


def outcome(counts: dict[str, int]) -> str:
    """Return the one outcome of a test whose subtests may have their own."""
    if "failed" in counts or "subtests failed" in counts:
        return "failed"
    return "skipped" if "skipped" in counts else "passed"


def summarize(own: Side, halley: Side) -> dict[str, Any]:
    """Return for each family what its tests did on both sides, and which did something else."""
    tests = list({**own.outcomes, **halley.outcomes})
    families: dict[str, Any] = {}
    for name in dict.fromkeys(family_of(test) for test in tests):
        ours = [test for test in tests if family_of(test) == name]
        found: dict[str, Any] = {"tests": len(ours)}
        for side, results in zip(SIDES, (own, halley), strict=True):
            counts = [results.outcomes[test] for test in ours if test in results.outcomes]
            words = Counter(map(outcome, counts))
            parts = sum((Counter(each) for each in counts), Counter[str]())
            found[side] = {
                **{word: words[word] for word in COUNTS},
                "subtests": sum(n for part, n in parts.items() if part.startswith("subtests")),
            }
        calls = sum((Counter(halley.calls.get(test, {})) for test in ours), Counter[str]())
        found["calls"] = {kind: calls[kind] for kind in ("halley", "own arithmetic")}
        errors = [halley.errors.get(test, {}) for test in ours]
        found["errors"] = {
            dtype: max(each.get(dtype, 0.0) for each in errors)
            for dtype in sorted({dtype for each in errors for dtype in each})
        }
        found["differ"] = [t for t in ours if own.outcomes.get(t) != halley.outcomes.get(t)]
        found["failed_both_ways"] = [
            test
            for test in ours
            if test not in found["differ"] and outcome(own.outcomes[test]) == "failed"
        ]
        families[name] = found
    return families


def rows_of(families: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of a table of the families, outcomes without Halley and with it."""
    rows = [COLUMNS]
    total: Counter[str] = Counter()
    errors: list[dict[str, float]] = []
    for name, found in families.items():
        counts = Counter({"tests": found["tests"], "differ": len(found["differ"])})
        for word in COUNTS:
            counts.update({f"{word} {side}": found[side][word] for side in SIDES})
        calls = found["calls"]
        counts.update({"halley": calls["halley"], "calls": sum(calls.values())})
        rows.append((name, *_cells(counts, [found["errors"]])))
        total.update(counts)
        errors.append(found["errors"])
    return [*rows, ("all", *_cells(total, errors))]


def _cells(counts: Counter[str], errors: list[dict[str, float]]) -> tuple[str, ...]:
    pairs = [" / ".join(str(counts[f"{word} {side}"]) for side in SIDES) for word in COUNTS]
    calls = f"{counts['halley']} of {counts['calls']}"
    found = [[each[dtype] for each in errors if dtype in each] for dtype in DTYPES]
    last = (f"{max(each):.1e}" if each else "-" for each in found)
    return (str(counts["tests"]), *pairs, str(counts["differ"]), calls, *last)


def render(families: dict[str, Any]) -> list[str]:
    """Return the lines of a table for people."""
    rows = rows_of(families)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return ["passed to failed: without Halley / with it; calls: of experts", *lines]


def render_document(document: str, results: dict[str, Any]) -> str:
    """Return the document with the table of all runs of the suites in the place of its own.

    Raises:
        ValueError: the document lacks the markers.
    """
    if START not in document or END not in document:
        raise ValueError(f"document must have the markers {START} and {END}")
    head = ("transformers (suites)", "strategy", "activation", *COLUMNS)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for runs in results.values():
        for each in (each for each in runs.values() if each["suites"]):
            versions = f"{each['transformers']} ({each['suites']})"
            first = (versions, each["strategy"], each["activation"] or "the suites'")
            rows = rows_of(each["families"])[1:-1]
            lines += [f"| {' | '.join((*first, *row))} |" for row in rows]
    before, rest = document.split(START)
    after = rest.split(END)[1]
    return f"{before}{START}\n\n" + "\n".join(lines) + f"\n\n{END}{after}"


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


def read_version(checkout: Path) -> str:
    """Return the version that a source tree of transformers says it has.

    Raises:
        ValueError: it is no such tree, or lacks the families' suites.
    """
    needed = ["src/transformers/__init__.py", "conftest.py", "utils"]
    for name in (*needed, *(f"tests/models/{family}" for family in FAMILIES)):
        if not (checkout / name).exists():
            raise ValueError(f"source ({checkout}) must be a source tree, and has no {name}")
    text = (checkout / needed[0]).read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"', text, flags=re.MULTILINE)
    return found[1] if found else "unknown"


def compare(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[Side]]:
    """Run both sides in a folder; return what came of it, and each side."""
    suites = read_version(options.source) if options.source else ""
    packages = [f"transformers=={options.version}", "httpx", "parameterized"]
    needed = [*packages, "timeout-decorator"]
    python = make_environment(folder / "venv", Path(sys.executable), needed)
    source = unpack(folder, options.version, options.source)
    tests = [ROOT / "benchmarks" / "transformers_families.py"]
    if options.source:
        tests = [source / "tests" / "models" / family for family in FAMILIES]
    sides: list[Side] = []
    for name, strategy in zip(SIDES, ("", options.strategy), strict=True):
        record = folder / f"{name}.json"
        given = ["--halley", strategy, "--activation", options.activation]
        sides.append(run(python, tests, source, options=given, record=record))
        sys.stdout.write(f"{name}: {sides[-1].seconds:.0f} s\n")
        sys.stdout.flush()
    result = {
        "transformers": options.version,
        "suites": suites,
        "torch": version("torch").partition("+")[0],
        "strategy": options.strategy,
        "activation": options.activation,
        "seconds": {name: side.seconds for name, side in zip(SIDES, sides, strict=True)},
        "families": summarize(*sides),
    }
    return result, sides


def keep(result: dict[str, Any], path: Path) -> None:
    """Put a result into a file of them, in the place of an earlier one of the same run."""
    results = json.loads(path.read_text(encoding="ascii")) if path.exists() else {}
    names = [result["strategy"], result["activation"], "" if result["suites"] else "shared tests"]
    results.setdefault(result["transformers"], {})[", ".join(filter(None, names))] = result
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--source", type=Path, help="source tree of transformers, with its tests")
    parser.add_argument("--strategy", default="sequential")
    parser.add_argument("--activation", default="", help="of the suites' models, instead of GELU")
    parser.add_argument("--version", default=version("transformers"), help="of transformers")
    parser.add_argument("--output", type=Path, help="file that keeps the results")
    parser.add_argument("--table", action="store_true", help="write the table in docs/ alone")
    options = parser.parse_args()
    if options.table:
        results = json.loads(RESULTS.read_text(encoding="ascii"))
        text = render_document(DOCUMENT.read_text(encoding="utf-8"), results)
        DOCUMENT.write_text(text, encoding="utf-8")
        return
    if options.source:
        options.source = options.source.resolve()
    with tempfile.TemporaryDirectory(prefix="halley-suite-") as name:
        result, (own, halley) = compare(options, Path(name))
    families = result["families"].values()
    for test in (test for found in families for test in found["failed_both_ways"]):
        sys.stdout.write(f"fails both ways: {test}: {own.messages[test]}\n")
    for test in (test for found in families for test in found["differ"]):
        before, after = own.outcomes.get(test), halley.outcomes.get(test)
        said = halley.messages.get(test, own.messages.get(test, ""))
        sys.stdout.write(f"differs: {test}: {before}, with Halley {after}: {said}\n")
    sys.stdout.write("\n".join([*render(result["families"]), json.dumps(result)]) + "\n")
    if options.output:
        keep(result, options.output)
    passed = any(found["halley"]["passed"] for found in families)  # and not errors alone
    ran = any(found["calls"]["halley"] for found in families)
    right = all(found["errors"].get("float32", 0.0) <= MAX_ERROR for found in families)
    if any(found["differ"] for found in families) or not (passed and ran and right):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
