"""Write benchmark results and timelines as one HTML page, which makes no network request."""

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from halley.core.timeline import Span
from halley.core.validation import build_record, parse_json, read_json_lines
from halley.tools.timer import installed_version


_TEMPLATE = Path(__file__).with_name("report.html")
_MAX_BYTES = 64 << 20  # of a file, and of an unpacked trace
_TEXTS = ("case", "model", "strategy", "direction", "gpu")
_NUMBERS = ("median_us", "p10_us", "p90_us", "floor_us", "predicted_us", "peak_mib")


def write_report(
    rows: Sequence[dict[str, Any]], timelines: Mapping[str, Sequence[Span]], path: Path
) -> None:
    """Write a page with charts of result lines, and one timeline for each title.

    ``rows`` are lines of benchmarks/results. Rows of one machine, workload and direction form one
    chart. A file that cannot be written is a ``ValueError``.
    """
    data = {
        "version": installed_version("halley-moe") or "of a checkout",
        "date": str(date.today()),
        "rows": rows,
        "timelines": {
            title: [asdict(span) for span in spans] for title, spans in timelines.items()
        },
    }
    # Escape "<" in the data: "</script>" in it would end the script element that holds the data.
    text = json.dumps(data).replace("<", "\\u003c")
    page = _TEMPLATE.read_text(encoding="utf-8").replace(">DATA<", f">{text}<", 1)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"output ({path}) must be a file to write: {error.strerror}") from error


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a result file, such as those of ``halley bench layer``.

    A line that is no result, such as one without a strategy, is a ``ValueError``.
    """
    if not path.exists():
        raise ValueError(f"results ({path}) must be a readable file")
    rows: list[dict[str, Any]] = []
    for where, row in read_json_lines(path, what="results", max_bytes=_MAX_BYTES):
        if not isinstance(row, dict):
            raise ValueError(f"{where} it must be an object")
        for name in _TEXTS:
            if not isinstance(row.get(name), str):
                raise ValueError(f"{where} {name} must be a text")
        for name in _NUMBERS:
            value = row.get(name)
            if value is not None and not (type(value) in (int, float) and value >= 0):
                raise ValueError(f"{where} {name} must be a number of at least 0, or null")
        shares = row.get("shares", {})
        if not (isinstance(shares, dict) and all(type(x) in (int, float) for x in shares.values())):
            raise ValueError(f"{where} shares must be a table of numbers")
        rows.append(row)
    return rows


def read_trace(path: Path) -> list[Span]:
    """Return the spans of a Chrome trace that ``halley trace`` has written, gzipped or not."""
    where = f"trace ({path})"
    if not path.is_file():
        raise ValueError(f"{where} must be a file")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{where} must be a readable file: {error}") from error
    if len(content) > _MAX_BYTES:
        raise ValueError(f"{where} must have at most {_MAX_BYTES} bytes")
    trace: Any = parse_json(content.decode(errors="replace"), where=where)
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ValueError(f"{where} must have a list traceEvents")
    keys = {"name": "name", "pid": "rank", "cat": "stream", "ts": "start_us", "dur": "duration_us"}
    spans = [
        build_record(Span, {keys[key]: event[key] for key in keys if key in event}, where=where)
        for event in events
        if isinstance(event, dict) and event.get("ph") == "X"
    ]
    if not spans or min(span.duration_us for span in spans) < 0:
        raise ValueError(f"{where} must have spans, and none of negative duration")
    return spans
