"""Tables in the plug-ins' documents match the results; the scripts that write them work."""

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import compatibility


ROOT = Path(__file__).parents[2]

REPORT = """<testsuites><testsuite>
<testcase name="test_step_is_that_of_the_whole_model[mixtral-sequential-ep2]">
<properties><property name="ran" value="sequential" /></properties></testcase>
<testcase name="test_step_is_that_of_the_whole_model[mixtral-fused-ep2]">
<properties><property name="ran" value="fused" /></properties></testcase>
<testcase name="test_step_is_that_of_the_whole_model[gpt_oss-chunked-ep2]">
<failure message="wrong" /></testcase>
<testcase name="test_other"><skipped /></testcase>
<testcase name="test_another" />
</testsuite></testsuites>"""

SUITE = """
import unittest

class MixtralTest(unittest.TestCase):
    def test_fails(self):
        raise AssertionError("wrong")
    def test_passes(self):
        for number in range(2):
            with self.subTest(number=number):
                if number:
                    self.skipTest("odd")
    def test_skips(self):
        self.skipTest("always")
"""


@pytest.mark.parametrize("name", ["transformers", "torchtitan", "megatron-core", "deepspeed"])
def test_table_of_versions_matches_the_results(name: str) -> None:
    framework = compatibility.FRAMEWORKS[name]
    results = json.loads(framework.results.read_text(encoding="ascii"))
    assert set(results) == set(framework.versions)
    assert [found["failed"] for found in results.values()] == [[]] * len(results)
    document = framework.document.read_text(encoding="utf-8")
    assert compatibility.render(document, compatibility.table(results, framework.row)) == document


def test_gate_fails_where_a_framework_cannot_be_installed(monkeypatch) -> None:
    """Without a network, for example: the gate must not pass with no test run."""
    missing = compatibility.Framework(plugin="none", tests=(), versions=("1.0",))
    monkeypatch.setattr(compatibility, "FRAMEWORKS", {"missing-framework": missing})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    message = r"missing-framework 1.0: not tested, exit code 1 of .* pip install .*==1.0$"
    with pytest.raises(SystemExit, match=message):
        compatibility.run_gate()


def test_measured_steps_in_the_document_are_those_of_the_results() -> None:
    lines = (ROOT / "benchmarks/results/h200x4/transformers_step.jsonl").read_text().splitlines()
    document = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    names = {"all_to_all": "built-in `all_to_all`", "halley": "Halley, `fused`"}
    for row in map(json.loads, lines):
        median, low, high = (f"{row[key] / 1e3:.0f}" for key in ("median_us", "p10_us", "p90_us"))
        cells = f"{median} ms ({low} to {high}) | {row['peak_mib'] / 1024:.1f} GiB"
        assert f"| {names[row['strategy']]} | {cells} |" in document


def test_report_of_pytest_is_summarised(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    found = compatibility.read_report(report)
    assert found == {
        "passed": 3,
        "skipped": 1,
        "failed": ["test_step_is_that_of_the_whole_model[gpt_oss-chunked-ep2]"],
        "rows": {"mixtral": ["sequential", "fused"]},
    }
    old, new = ({**found, "torch": torch, "python": "3.11"} for torch in ("2.13.0", "2.14.1"))
    lines = compatibility.table({"5.10.0+torch2.14.1": new, "5.10.0": old, "5.9.0": old}, "family")
    assert lines[0] == "| family | 5.9.0 | 5.10.0 | 5.10.0 |"
    assert lines[2] == "| mixtral | sequential, fused | sequential, fused | sequential, fused |"
    assert lines[-3:-1] == ["| tests failed | 1 | 1 | 1 |", "| torch | 2.13.0 | 2.13.0 | 2.14.1 |"]


@pytest.fixture(scope="module")
def suite() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("transformers_suite")


def _sides(suite: ModuleType, **halley: dict[str, int]) -> tuple[Any, Any]:
    own = {
        "tests/a.py::MixtralModelTest::test_a": {"subtests passed": 2, "passed": 1},
        "tests/b.py::Qwen2MoeModelTest::test_b": {"skipped": 1},
        "tests/b.py::Qwen2MoeModelTest::test_c": {"failed": 1},
    }
    calls = {"tests/a.py::MixtralModelTest::test_a": {"halley": 3, "own arithmetic": 1}}
    errors = {test: {"float32": 2e-7, "bfloat16": 4e-3} for test in calls}
    changed = {test: halley.get(test[-6:], counts) for test, counts in own.items()}
    return (
        suite.Side(outcomes=own, calls={}, errors={}, messages={}),
        suite.Side(outcomes=changed, calls=calls, errors=errors, messages={}),
    )


def test_equal_outcomes_of_a_suite_are_summarised(suite: ModuleType) -> None:
    found = suite.summarize(*_sides(suite))
    assert list(found) == ["mixtral", "qwen2_moe"]
    assert found["mixtral"]["halley"] == {"passed": 1, "skipped": 0, "failed": 0, "subtests": 2}
    assert found["qwen2_moe"]["failed_both_ways"] == ["tests/b.py::Qwen2MoeModelTest::test_c"]
    assert [each["differ"] for each in found.values()] == [[], []]
    assert suite.rows_of(found)[1:] == [
        ("mixtral", "1", "1 / 1", "0 / 0", "0 / 0", "0", "3 of 4", "2.0e-07", "4.0e-03"),
        ("qwen2_moe", "2", "0 / 0", "1 / 1", "1 / 1", "0", "0 of 0", "-", "-"),
        ("all", "3", "1 / 1", "1 / 1", "1 / 1", "0", "3 of 4", "2.0e-07", "4.0e-03"),
    ]


@pytest.mark.parametrize(
    ("test", "counts", "failed"),
    [
        ("test_a", {"subtests passed": 1, "subtests failed": 1, "passed": 1}, 1),
        ("test_a", {"subtests passed": 1, "subtests skipped": 1, "passed": 1}, 0),
        ("test_b", {"passed": 1}, 0),
        ("test_b", {}, 0),  # a test that did not run
    ],
)
def test_different_outcomes_of_a_suite_are_found(test, counts, failed, suite) -> None:
    found = suite.summarize(*_sides(suite, **{test: counts}))
    (changed,) = (each for each in found.values() if each["differ"])
    assert changed["differ"][0].endswith(test)
    assert changed["halley"]["failed"] - changed["transformers"]["failed"] == failed


def test_table_of_suites_matches_the_results(suite: ModuleType) -> None:
    results = json.loads(suite.RESULTS.read_text(encoding="ascii"))
    runs = [run for runs in results.values() for run in runs.values()]
    assert runs
    for each in runs:
        assert set(each["families"]) == set(suite.FAMILIES)
        assert all(found["differ"] == [] for found in each["families"].values())
        errors = [found["errors"].get("float32", 0.0) for found in each["families"].values()]
        assert max(errors) <= suite.MAX_ERROR
    document = suite.DOCUMENT.read_text(encoding="utf-8")
    assert suite.render_document(document, results) == document


def test_plugin_records_the_largest_error(suite: ModuleType) -> None:
    record = importlib.import_module("transformers_plugin").Record()
    expected = torch.tensor([1.0, -4.0])
    record.compare(expected + torch.tensor([0.5, 0.0]), expected)
    record.compare(expected, expected)
    record.compare(torch.ones(1), torch.full((1,), torch.nan))  # Transformers' own is NaN: skipped
    record.compare(expected[:0], expected[:0])
    assert record.errors == {"": {"float32": 0.125}}
    record.compare(torch.full((2,), torch.nan), expected)
    record.compare(expected, expected)
    assert record.errors == {"": {"float32": math.inf}}


def test_plugin_records_outcomes(suite, tmp_path, monkeypatch) -> None:
    (tmp_path / "test_any.py").write_text(SUITE)
    record = tmp_path / "record.json"
    tests = [tmp_path / "test_any.py"]
    side = suite.run(Path(sys.executable), tests, tmp_path, options=[], record=record)
    name = "test_any.py::MixtralTest::test_"
    assert side.outcomes == {
        f"{name}fails": {"failed": 1},
        f"{name}passes": {"subtests passed": 1, "subtests skipped": 1, "passed": 1},
        f"{name}skips": {"skipped": 1},
    }
    assert side.messages == {f"{name}fails": "AssertionError: wrong"}
    assert (side.calls, side.errors) == ({}, {})
    done = subprocess.CompletedProcess([], returncode=4, stdout="", stderr="no such file")
    monkeypatch.setattr(suite.subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(RuntimeError, match="pytest ended with 4"):
        suite.run(Path(sys.executable), tests, tmp_path, options=[], record=record)
