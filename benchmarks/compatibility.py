"""Run the tests of the Hugging Face plug-in with several versions of transformers; write the table.

python benchmarks/compatibility.py                # all versions, then docs/huggingface.md
python benchmarks/compatibility.py 5.20.2         # one of them; the others' results stay
python benchmarks/compatibility.py --table        # docs/huggingface.md alone

Each version gets a virtual environment in a temporary folder, with the packages of the running
interpreter behind its own. Results stand in benchmarks/results/huggingface.json.
"""

import json
import os
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree


ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "huggingface.json"
DOCUMENT = ROOT / "docs" / "huggingface.md"
START, END = "<!-- table: made by benchmarks/compatibility.py -->", "<!-- end of table -->"
VERSIONS = ("5.17.0", "5.20.2", "5.22.2", "5.23.0")
STEP = "test_step_is_that_of_the_whole_model"


def make_environment(folder: Path, wanted: str) -> Path:
    """Make an environment with one version of transformers; return its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (own,) = folder.glob("lib/python*/site-packages")
    (below,) = Path(sys.prefix).glob("lib/python*/site-packages")
    (own / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
    # What is below is taken where it fits, and torch always.
    limits = folder / "constraints.txt"
    limits.write_text("".join(f"{name}=={version(name)}\n" for name in ("torch", "numpy")))
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", limits]
    subprocess.run([*install, f"transformers=={wanted}", "accelerate"], check=True)
    return python


def run_tests(python: Path, report: Path) -> dict[str, Any]:
    """Run the tests of the plug-in; return what of them passed."""
    command = [python, "-m", "pytest", "tests/integrations", "-q", "-p", "no:cacheprovider"]
    # Not the test of what this writes.
    command += ["--ignore=tests/integrations/test_compatibility.py"]
    command += ["-o", "junit_family=xunit1", f"--junitxml={report}"]  # the newer has no properties
    subprocess.run(command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return {"torch": version("torch").partition("+")[0], **read_report(report)}


def read_report(report: Path) -> dict[str, Any]:
    """Return the number of tests by outcome, what failed, and how each family ran."""
    passed, failed, skipped = 0, list[str](), 0
    families: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.get("name", "")
        if case.find("skipped") is not None:
            skipped += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        else:
            passed += 1
            ran = {p.get("value", "") for p in case.iter("property") if p.get("name") == "ran"}
            if name.startswith(f"{STEP}["):
                found = families.setdefault(name.partition("[")[2].partition("-")[0], [])
                found += [path for path in sorted(ran) if path not in found]
    return {"passed": passed, "skipped": skipped, "failed": failed, "families": families}


def table(results: dict[str, Any]) -> list[str]:
    """Return the lines of the Markdown table."""
    versions = sorted(results, key=lambda name: [int(part) for part in name.split(".")])
    families = list(dict.fromkeys(f for name in versions for f in results[name]["families"]))
    lines = [
        f"| family | {' | '.join(versions)} |",
        f"|---|{'---|' * len(versions)}",
    ]
    for family in families:
        cells = [", ".join(results[name]["families"].get(family, ["-"])) for name in versions]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    for word in ("passed", "skipped", "failed"):
        counts = [results[name][word] for name in versions]
        cells = [str(count if isinstance(count, int) else len(count)) for count in counts]
        lines.append(f"| tests {word} | {' | '.join(cells)} |")
    torches = [results[name]["torch"] for name in versions]
    return [*lines, f"| torch | {' | '.join(torches)} |"]


def render(document: str, lines: list[str]) -> str:
    """Return the document with its table replaced.

    Raises:
        ValueError: the document lacks the markers.
    """
    if START not in document or END not in document:
        raise ValueError(f"{DOCUMENT.name} must have the markers {START} and {END}")
    before, rest = document.split(START)
    after = rest.split(END)[1]
    return f"{before}{START}\n\n" + "\n".join(lines) + f"\n\n{END}{after}"


def main() -> None:
    arguments = sys.argv[1:]
    results = json.loads(RESULTS.read_text(encoding="ascii")) if RESULTS.exists() else {}
    for wanted in [] if arguments == ["--table"] else arguments or VERSIONS:
        with tempfile.TemporaryDirectory(prefix="halley-compatibility-") as folder:
            python = make_environment(Path(folder) / "venv", wanted)
            results[wanted] = run_tests(python, Path(folder) / "report.xml")
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="ascii")
    document = render(DOCUMENT.read_text(encoding="utf-8"), table(results))
    DOCUMENT.write_text(document, encoding="utf-8")


if __name__ == "__main__":
    main()
