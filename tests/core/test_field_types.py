"""Dataclasses that check their fields: each kind of annotation, right and wrong values."""

from dataclasses import dataclass
from typing import Literal

import pytest

from halley.core.field_types import (
    build,
    build_record,
    check_choice,
    check_fields,
    show,
    show_name,
    unknown_name,
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
    table = {
        "inner": {"number": 3, "rate": 2},
        "kind": "b",
        "path": "x",
        "names": ["m", "n"],
        "points": [[1, 2], [3, 4.5]],
        "times": {"t": 1.5},
        "anything": [1],
    }
    found = build(Outer, table)
    assert found == Outer(
        inner=Inner(number=3, rate=2.0),
        kind="b",
        path="x",
        names=("m", "n"),
        points=((1, 2.0), (3, 4.5)),
        times={"t": 1.5},
        anything=[1],
    )
    assert type(found.inner.rate) is float
    assert type(found.points[0][1]) is float
    assert build(Outer, {"inner": {"number": 1}}) == Outer(inner=Inner(number=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner": 3}, "inner (3) must be a table"),
        ({"inner": {}}, "inner.number is required"),
        ({"inner": {"number": "3"}}, "inner.number ('3') must be of type int"),
        ({"inner": {"number": 3, "rate": True}}, "inner.rate (True) must be of type float"),
        (
            {"inner": {"number": 3, "rat": 1}},
            "key (inner.rat) must be one of inner.number, inner.rate, did you mean inner.rate",
        ),
        ({"kind": "c"}, "kind ('c') must be one of 'a', 'b'"),
        ({"path": 3}, "path (3) must be of type str"),
        ({"names": "mn"}, "names ('mn') must be a list"),
        ({"names": ["m", 3]}, "names[1] (3) must be of type str"),
        ({"points": [[1]]}, "points[0] ([1]) must have 2 items"),
        ({"points": [[1.5, 2]]}, "points[0][0] (1.5) must be of type int"),
        ({"times": [1]}, "times ([1]) must be a table"),
        ({"times": {"t": "1"}}, "times.t ('1') must be of type float"),
        (
            {"other": 1},
            "key (other) must be one of inner, kind, path, names, points, times, anything",
        ),
    ],
)
def test_wrong_tables_are_refused(changes: dict[str, object], message: str) -> None:
    table = {"inner": {"number": 1}} | changes
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        build(Outer, table)
    assert str(caught.value) == message
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        build_record(Outer, table, where="file (f) must be right:")
    assert str(caught.value) == f"file (f) must be right: {message}"


def test_choices_are_compared_with_their_types() -> None:
    """True equals 1 in Python, but it is no allowed value where 1 is one."""
    check_choice(1, (1, 2), name="x")
    with pytest.raises(ValueError, match=r"^x \(True\) must be one of 1, 2$"):
        check_choice(True, (1, 2), name="x")


def test_wrong_values_are_shown_on_one_short_line() -> None:
    deep: list[object] = []
    for _ in range(10_000):
        deep = [deep]
    assert show("a\nb") == r"'a\nb'"
    assert show("x" * 100) == "'" + "x" * 76 + "..."
    assert show(10**5000) == "a very large int"
    assert show(deep) == "a very large list"
    assert show_name("plain") == "plain"
    assert show_name("a\x1b[2J") == r"'a\x1b[2J'"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("numsteps", "num_steps"),
        ("sede", "seed"),
        ("steps", "num_steps"),
        ("size", ""),
        ("", ""),
        ("x" * 10**6, ""),
    ],
)
def test_only_a_similar_name_is_suggested(name: str, near: str) -> None:
    message = unknown_name(name, ["num_steps", "batch_size", "seed"], prefix="train.")
    names = "train.num_steps, train.batch_size, train.seed"
    assert message.endswith(
        f"must be one of {names}" + (f", did you mean train.{near}" if near else "")
    )
