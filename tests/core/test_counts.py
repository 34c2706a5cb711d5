"""Files of counts: what is written is read, other forms too, and what is wrong is named."""

from pathlib import Path

import pytest

from halley.core.counts import read_counts, write_counts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "counts.json"


def test_what_is_written_is_read(path: Path) -> None:
    write_counts(path, [[3, 0, 1], [2, 2, 0]], first_step=1, last_step=7)
    assert read_counts(path) == [[3, 0, 1], [2, 2, 0]]
    assert [file.name for file in path.parent.iterdir()] == ["counts.json"]


@pytest.mark.parametrize(
    ("text", "want"),
    [("[3, 0.5]", [[3, 0.5]]), ("[[3, 0], [1, 2]]", [[3, 0], [1, 2]])],
)
def test_lists_are_read_too(path: Path, text: str, want: list[list[float]]) -> None:
    path.write_text(text)
    assert read_counts(path) == want


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[3,", "must be JSON"),
        ('{"version": 0, "counts": [[1]]}', "must be of version 1 and is of 0"),
        ('{"version": 1}', "must be as halley train writes it: first_step is required"),
        ("7", "must be numbers of each expert"),
        ("[]", "must be numbers of each expert"),
        ("[[1], []]", "must be numbers of each expert"),
        ("[[1], 2]", "must be numbers of each expert"),
        ('[1, "2"]', "must be numbers of at least 0, and '2' is none"),
        ("[1, true]", "and True is none"),
        ("[1, -2]", "and -2 is none"),
        ("[1, NaN]", "must be JSON: NaN is not a finite number"),
        ("[1, Infinity]", "must be JSON: Infinity is not a finite number"),
        ("[[1, 2], [3]]", "of layer 1 must have 2 experts, as layer 0, and have 1"),
        ("[[1, 2], [0, 0]]", "of layer 1 must not all be 0"),
    ],
)
def test_wrong_counts_are_named(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=r"counts \(.*counts\.json\)") as caught:
        read_counts(path)
    assert message in str(caught.value)


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(ValueError, match="must be a readable file: No such file"):
        read_counts(path)
