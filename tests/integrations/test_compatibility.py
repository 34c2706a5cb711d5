"""The tables of versions in the plug-ins' documents: what their script makes of the results."""

import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest


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


@pytest.fixture(scope="module")
def compatibility() -> ModuleType:
    path = ROOT / "benchmarks" / "compatibility.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["transformers", "torchtitan", "megatron-core", "deepspeed"])
def test_table_is_that_of_the_results(name: str, compatibility: ModuleType) -> None:
    framework = compatibility.FRAMEWORKS[name]
    results = json.loads(framework.results.read_text(encoding="ascii"))
    assert set(results) == set(framework.versions)
    assert [found["failed"] for found in results.values()] == [[]] * len(results)
    document = framework.document.read_text(encoding="utf-8")
    assert compatibility.render(document, compatibility.table(results, framework.row)) == document


def test_report_is_read(compatibility: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    found = compatibility.read_report(report)
    assert found == {
        "passed": 3,
        "skipped": 1,
        "failed": ["test_step_is_that_of_the_whole_model[gpt_oss-chunked-ep2]"],
        "rows": {"mixtral": ["sequential", "fused"]},
    }
    lines = compatibility.table({"5.9.0": {**found, "torch": "2.13.0"}}, "family")
    assert lines[2] == "| mixtral | sequential, fused |"
    assert lines[-2:] == ["| tests failed | 1 |", "| torch | 2.13.0 |"]


def test_outcomes_of_a_suite_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    suite = importlib.import_module("transformers_suite")
    report = tmp_path / "report.xml"
    report.write_text(REPORT.replace("<testcase ", '<testcase classname="a" '))
    found = suite.read_outcomes(report)
    assert found["a.test_step_is_that_of_the_whole_model[gpt_oss-chunked-ep2]"] == ["failure"]
    assert (found["a.test_other"], found["a.test_another"]) == (["skipped"], ["passed"])
