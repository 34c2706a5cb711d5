"""Reading a damaged or hostile file gives a valid value or an error that names the file."""

import json
import os
import pickle
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halley.core.models import load_config
from halley.fused.config import merge_tables
from tests.hostile.cases import expand, fill, read_cases
from tests.hostile.file_formats import FORMATS


MAX_S = 2.0  # for one file; all readers are linear in sizes that are limited
READERS = {name: read for name, (_, read) in FORMATS.items()}
READERS["config"] = lambda path: load_config(path, overrides=[])
each_reader = pytest.mark.parametrize("name", READERS)


class Bomb:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


def _message(name: str, path: Path) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - callers compare the text
        READERS[name](path)
    return str(caught.value)


@pytest.mark.parametrize(("name", "text", "other", "message"), read_cases("files"))
def test_wrong_content_is_refused(
    tmp_path: Path, name: str, text: str, other: Any, message: str
) -> None:
    """``other`` replaces ``text``, which occurs in the valid file of that format."""
    path = tmp_path / "file"
    FORMATS[name][0](path)
    valid = path.read_text()
    assert text in valid
    path.write_text(valid.replace(text, expand(other), 1))
    assert _message(name, path) == fill(message, {"path": str(path)})


@each_reader
def test_folder_is_refused(tmp_path: Path, name: str) -> None:
    assert (
        _message(name, tmp_path) == f"{name} ({tmp_path}) must be a readable file: Is a directory"
    )


@each_reader
def test_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path, name: str) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    want = f"{name} ({path}) must be a readable file: Not a regular file"
    assert _message(name, path) == want


@each_reader
def test_endless_device_is_refused(name: str) -> None:
    want = f"{name} (/dev/zero) must be a readable file: Not a regular file"
    assert _message(name, Path("/dev/zero")) == want


@each_reader
def test_file_below_a_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "below"
    assert _message(name, path) == f"{name} ({path}) must be a readable file: Not a directory"


@each_reader
def test_loop_of_links_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "link"
    path.symlink_to(path)
    want = f"{name} ({path}) must be a readable file: Too many levels of symbolic links"
    assert _message(name, path) == want


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
@each_reader
def test_file_without_permission_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    path.touch(mode=0)
    assert _message(name, path) == f"{name} ({path}) must be a readable file: Permission denied"


@pytest.mark.parametrize("name", ["placement", "counts", "config"])
def test_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "none"
    want = f"{name} ({path}) must be a readable file: No such file or directory"
    assert _message(name, path) == want


@pytest.mark.parametrize(
    ("name", "value"), [("profiles", (None, None, None)), ("tuned kernel configurations", [])]
)
def test_missing_table_of_measurements_reads_as_empty(
    tmp_path: Path, name: str, value: object
) -> None:
    """The first measurement creates the file; the null device reads as empty, too."""
    assert READERS[name](tmp_path / "folder" / "none") == value
    assert READERS[name](Path(os.devnull)) == value


@pytest.mark.parametrize(
    ("name", "max_bytes"),
    [
        ("placement", 2**24),
        ("counts", 2**24),
        ("profiles", 2**26),
        ("tuned kernel configurations", 2**24),
    ],
)
def test_file_beyond_the_limit_is_not_read(tmp_path: Path, name: str, max_bytes: int) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(max_bytes + 1)  # sparse: takes no space
    want = f"{name} ({path}) must have at most {max_bytes} bytes and has {max_bytes + 1}"
    assert _message(name, path) == want


@each_reader
@pytest.mark.parametrize(
    ("content", "offset"), [("{}".encode("utf-16"), 0), (b'{"a": "\xff"}', 7), (b"\x80\x04", 0)]
)
def test_other_encodings_are_refused(
    tmp_path: Path, name: str, content: bytes, offset: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    want = f"{name} ({path}) must be UTF-8 text: the byte at offset {offset} is not"
    assert _message(name, path) == want


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 33 + "]" * 33])
def test_deep_nesting_is_refused(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    has_lines = name in ("profiles", "tuned kernel configurations")
    where = f"{path}:1 must be a line of {name}: it" if has_lines else f"{name} ({path})"
    assert _message(name, path) == f"{where} must nest lists and objects at most 32 deep"


@each_reader
@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_pickle_is_never_loaded(tmp_path: Path, name: str, protocol: int) -> None:
    path, marker = tmp_path / "file", tmp_path / "marker"
    path.write_bytes(pickle.dumps(Bomb(marker), protocol=protocol))
    assert str(path) in _message(name, path)
    assert not marker.exists()
    pickle.loads(path.read_bytes())  # a reader that unpickles would run the code
    assert marker.exists()


def test_merged_tables_must_be_files(tmp_path: Path) -> None:
    merged = tmp_path / "merged.jsonl"
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        merge_tables([tmp_path], merged)
    assert (
        str(caught.value)
        == f"tuned kernel configurations ({tmp_path}) must be a readable file: Is a directory"
    )
    assert not merged.exists()


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["cut", "flip", "twice", "retype", "nest"]))
def test_damaged_file_gives_a_value_or_an_error_with_its_path(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int, kind: str
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "file"
    write, read = FORMATS[name]
    write(path)
    path.write_bytes(_damage(path.read_bytes(), kind, random.Random(seed)))
    begin_s = time.perf_counter()
    try:
        first = read(path)
    except ValueError as error:
        message = str(error)
        assert str(path) in message
        assert len(message.splitlines()) == 1
        assert len(message) < 1000
    else:
        assert read(path) == first
    assert time.perf_counter() - begin_s < MAX_S


def _damage(content: bytes, kind: str, rng: random.Random) -> bytes:
    """Return a damaged copy of a valid file."""
    if kind == "cut":
        return content[: rng.randrange(len(content))]
    if kind == "flip":
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        return bytes(damaged)
    lines = content.decode().splitlines()
    index = rng.randrange(len(lines))
    if kind == "twice":
        key, comma, rest = lines[index].partition(",")
        lines.insert(index, f"{key}{comma}{key[1:]}{comma}{rest}" if rng.random() < 0.5 else "[]")
    else:
        value = json.loads(lines[index])
        _change_one(value, kind, rng)
        lines[index] = json.dumps(value)
    return "\n".join([*lines, ""]).encode()


def _change_one(value: Any, kind: str, rng: random.Random) -> None:
    """Replace one value inside lists and tables by one of another type, or by nested lists."""
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in items:
            places.append((node, key))
            if isinstance(child, dict | list):
                collect(child)

    collect(value)
    node, key = rng.choice(places)
    wrong: list[object] = [None, True, -1, 0, 1.5, 10**30, "", "a\nb", "\x1b[2J", [], {}, [[1]]]
    node[key] = rng.choice(wrong)
    if kind == "nest":
        for _ in range(rng.choice([1, 40, 400])):
            node[key] = [node[key]]
