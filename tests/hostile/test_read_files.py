"""Reading a damaged or hostile file gives a valid value or an error that names the file."""

import json
import os
import pickle
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halley.core.models import load_config
from halley.core.placement import (
    ExpertPlacement,
    load_placements,
    read_counts,
    save_placements,
    write_counts,
)
from halley.cost.hardware import Environment
from halley.cost.profiles import Curve, ProfileTable
from halley.cost.simulate import Contention
from halley.fused.config import ConfigTable, TunedConfig, TunedShape
from tests.damage import pickle_bomb
from tests.hostile.cases import expand, fill, read_cases


HERE = Environment(device="cpu", versions="torch 2", topology="ranks 2")
PLACEMENT = ExpertPlacement(num_experts=3, experts_WL=((0, 1), (0, 2)))
SHAPE = TunedShape(hidden_size=64, num_experts=8, top_k=2, dtype="bfloat16", num_tokens=512)


def write_profiles(path: Path) -> None:
    table = ProfileTable(path, HERE)
    table.add_time("mm", 12.5)
    table.add_curve("all_to_all", Curve(((1000, 10.0), (4000, 20.0))))
    table.add_contention(Contention(compute=1.5, comm=1.25))


def read_profiles(path: Path) -> object:
    table = ProfileTable(path, HERE)
    return table.time_us("mm"), table.curve("all_to_all"), table.contention


def write_kernel_configs(path: Path) -> None:
    for num_tokens in (512, 1024):
        tuned = TunedConfig(
            shape=replace(SHAPE, num_tokens=num_tokens),
            settings=("sum_rows=16", "up.run=2"),
            median_us=80.0,
            default_us=100.0,
            sweeps={"sum_rows": {"8": 90.0, "16": 80.0}},
        )
        ConfigTable(path, HERE).write(tuned)


def read_kernel_configs(path: Path) -> object:
    with warnings.catch_warnings(action="ignore"):  # about files without a line for this machine
        return ConfigTable(path, HERE).found


# For each format by name, a function that writes a valid file, and the reader.
FORMATS: dict[str, tuple[Callable[[Path], None], Callable[[Path], object]]] = {
    "placement": (
        lambda path: save_placements(path, [PLACEMENT, PLACEMENT]),
        lambda path: load_placements(path, num_experts=3, num_ranks=2, num_layers=2),
    ),
    "counts": (
        lambda path: write_counts(path, [[3, 0, 5], [1, 2, 3]], first_step=1, last_step=9),
        read_counts,
    ),
    "profiles": (write_profiles, read_profiles),
    "tuned kernel configurations": (write_kernel_configs, read_kernel_configs),
}


MAX_S = 2.0  # for one file, as readers are linear and sizes limited
READERS = {name: read for name, (_, read) in FORMATS.items()}
READERS["config"] = lambda path: load_config(path, overrides=[])
each_reader = pytest.mark.parametrize("name", READERS)


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


def _make_unreadable(folder: Path) -> dict[Path, str]:
    """Return paths that no reader can read, each with the reason."""
    os.mkfifo(folder / "pipe")
    (folder / "file").touch()
    (folder / "link").symlink_to(folder / "link")
    (folder / "secret").touch(mode=0)
    paths = {
        folder: "Is a directory",
        folder / "pipe": "Not a regular file",  # without waiting for its writer
        Path("/dev/zero"): "Not a regular file",
        folder / "file" / "below": "Not a directory",
        folder / "link": "Too many levels of symbolic links",
    }
    if os.geteuid() != 0:  # root may read every file
        paths[folder / "secret"] = "Permission denied"
    return paths


@each_reader
def test_what_is_no_readable_file_is_refused(tmp_path: Path, name: str) -> None:
    paths = _make_unreadable(tmp_path)
    if name in ("placement", "counts", "config"):
        paths[tmp_path / "none"] = "No such file or directory"
    for path, reason in paths.items():
        assert _message(name, path) == f"{name} ({path}) must be a readable file: {reason}"


@pytest.mark.parametrize(
    ("name", "value"), [("profiles", (None, None, None)), ("tuned kernel configurations", [])]
)
def test_missing_table_of_measurements_reads_as_empty(
    tmp_path: Path, name: str, value: object
) -> None:
    """A file of measurements may be missing before the first one; the null device is empty."""
    assert READERS[name](tmp_path / "folder" / "none") == value
    assert READERS[name](Path(os.devnull)) == value


@pytest.mark.parametrize("name", FORMATS)
def test_file_beyond_the_limit_is_not_read(tmp_path: Path, name: str) -> None:
    path, max_bytes = tmp_path / "large", 2**26 if name == "profiles" else 2**24
    with path.open("wb") as file:
        file.truncate(max_bytes + 1)  # a sparse file, which takes no space
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
    path.write_bytes(pickle_bomb(marker, protocol=protocol))
    assert str(path) in _message(name, path)
    assert not marker.exists()
    pickle.loads(path.read_bytes())  # a reader that unpickles would run the code
    assert marker.exists()


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
