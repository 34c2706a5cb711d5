"""Dataclasses built from tables, and JSON files read with limits.

tests/hostile/data has the wrong values of each annotation and of each file.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from halley.core.validation import (
    MAX_DEPTH,
    build,
    check_choice,
    check_fields,
    parse_json,
    read_json,
    read_json_lines,
    read_text,
)


@dataclass(frozen=True, kw_only=True)
class Inner:
    number: int
    rate: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    kind: Literal["a", "b"] = "a"
    path: str | None = None
    names: tuple[str, ...] = ()
    points: tuple[tuple[int, float], ...] = ()
    times: dict[str, float] | None = None
    anything: object = None

    def __post_init__(self) -> None:
        check_fields(self, prefix="outer.")


def test_tables_become_dataclasses_of_the_annotated_types() -> None:
    same = {"kind": "b", "path": "x", "times": {"t": 1.5}, "anything": [1]}
    lists = {"names": ["m", "n"], "points": [[1, 2], [3, 4.5]]}
    found = build(Outer, {"inner": {"number": 3, "rate": 2}, **lists, **same})
    tuples = {"names": ("m", "n"), "points": ((1, 2.0), (3, 4.5))}
    assert found == Outer(inner=Inner(number=3, rate=2.0), **tuples, **same)
    assert type(found.inner.rate) is float
    assert type(found.points[0][1]) is float
    assert build(Outer, {"inner": {"number": 1}}) == Outer(inner=Inner(number=1))


def test_choices_are_compared_with_their_types() -> None:
    """True equals 1 in Python, but it is no allowed value where 1 is one."""
    with pytest.raises(ValueError, match=r"^x \(True\) must be one of 1, 2$"):
        check_choice(True, (1, 2), name="x")


def test_valid_json_is_read_as_json_reads_it(tmp_path: Path) -> None:
    value = {"a": [1, -2.5, 1e300, True, None, "\u00e4\n"], "b": {"c": [], "d": {}}, "": 10**30}
    path = tmp_path / "file.json"
    path.write_text(json.dumps(value))
    assert read_json(path, what="plan", max_bytes=1000) == value
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2), encoding="utf-8")
    assert read_json(path, what="plan", max_bytes=1000) == value


def test_limits_are_inclusive(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_text(path, what="plan", max_bytes=5) == "12345"
    with pytest.raises(ValueError, match=r"^plan \(.*file\) must have at most 4 bytes and has 5$"):
        read_text(path, what="plan", max_bytes=4)
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(deepest, where="it") == json.loads(deepest)
    with pytest.raises(ValueError, match=r"^it must nest lists and objects at most 32 deep$"):
        parse_json(f"[{deepest}]", where="it")


def test_file_without_a_size_is_limited_too(tmp_path: Path) -> None:
    """Files of /proc have a size of 0 but content, so ``st_size`` does not limit them."""
    path = Path("/proc/self/status")
    if not path.exists():
        pytest.skip("needs /proc")
    assert read_text(path, what="plan", max_bytes=10**6).startswith("Name:")
    with pytest.raises(ValueError, match=r"must have at most 10 bytes and has 11$"):
        read_text(path, what="plan", max_bytes=10)


def test_lines_are_numbered_and_read_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n[2, "\u2028"]\n{"a"\n', encoding="utf-8")
    lines = read_json_lines(path, what="profiles", max_bytes=100)
    assert next(lines) == (f"{path}:1 must be a line of profiles:", {"a": 1})
    assert next(lines) == (f"{path}:2 must be a line of profiles:", [2, "\u2028"])
    with pytest.raises(ValueError, match=r":3 must be a line of profiles: it must be JSON: "):
        next(lines)
    path.write_text("1\n2")  # the last line needs no newline
    assert [value for _, value in read_json_lines(path, what="a", max_bytes=9)] == [1, 2]
    path.write_text("")
    assert list(read_json_lines(path, what="a", max_bytes=9)) == []
