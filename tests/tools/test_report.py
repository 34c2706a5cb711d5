"""The HTML report: its data are those of the files, and no text of a file becomes markup."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from halley.cli.main import main
from halley.core.timeline import write_chrome_trace
from tests.core.test_timeline import span
from tests.tools.test_charts import result


def test_report_has_the_rows_and_spans_of_its_files(tmp_path: Path, capsys: Any) -> None:
    rows = [result("sequential", 400.0), result("</script><b>", 200.0)]
    results, trace, page = (tmp_path / name for name in ("a.jsonl", "b.json.gz", "c.html"))
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spans = [span("experts", 0, 4000), span("dispatch", 1000, 3000, "comm", rank=1)]
    write_chrome_trace(spans, trace)
    for _ in range(2):  # a second report replaces the first
        assert main(["report", str(results), str(trace), f"--output={page}"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == 2
    text = page.read_text()
    assert "<b>" not in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert json.loads(data)["rows"] == rows
    assert json.loads(data)["timelines"] == {str(trace): [vars(each) for each in spans]}


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.jsonl", "[]", "a.jsonl:1 must be a line of results: it must be an object"),
        ("a.jsonl", '{"case": 1}', "a.jsonl:1 must be a line of results: case must be a text"),
        (
            "a.jsonl",
            json.dumps(result("fused", 1.0) | {"shares": {"wait": "<b>"}}),
            "shares must be a",
        ),
        ("a.json", "{}", r"trace \(.*a.json\) must have a list traceEvents"),
        ("a.json", '{"traceEvents": [{"ph": "X"}]}', "name is required"),
        ("a.json.gz", "no gzip", "must be a readable file: Not a gzipped file"),
        ("c.html", "mine", "must be a new file or hold a report"),
    ],
)
def test_wrong_file_is_named(tmp_path: Path, capsys: Any, name: str, text: str, error: str) -> None:
    (tmp_path / name).write_text(text)
    assert main(["report", str(tmp_path / name), f"--output={tmp_path / 'c.html'}"]) == 2
    assert re.search(error, " ".join(capsys.readouterr().err.split()))
    assert (tmp_path / "c.html").exists() == (name == "c.html")
