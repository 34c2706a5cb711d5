"""Reading JSON with limits: valid files give the values of ``json``, others a clear error."""

import json
from pathlib import Path

import pytest

from halley.core.json_file import (
    MAX_DEPTH,
    check_version,
    parse_json,
    read_json,
    read_json_lines,
    read_text,
)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "an object has the key 'c' twice"),
        ("NaN", "NaN is not a finite number"),
        ("-1e999", "'-1e999' is not a finite number"),
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("[] []", "Extra data: line 1 column 4 (char 3)"),
    ],
)
def test_other_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        parse_json(text, where="plan (p)")
    assert str(caught.value) == f"plan (p) must be JSON: {message}"


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


@pytest.mark.parametrize("version", [None, 2, "1", 1.0, True])
def test_other_versions_are_refused(version: object) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        check_version({"version": version}, version=1, where="plan (p)")
    assert str(caught.value) == f"plan (p) must be of version 1 and is of {version!r}"
    with pytest.raises(ValueError, match=r"^plan \(p\) must be a table with a version$"):
        check_version([version], version=1, where="plan (p)")
    assert check_version({"version": 1, "a": 2}, version=1, where="") == {"version": 1, "a": 2}
