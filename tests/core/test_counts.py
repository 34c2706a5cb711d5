"""Files of expert counts. tests/hostile/data has the refused ones."""

from pathlib import Path

import pytest

from halley.core.placement import read_counts, write_counts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "counts.json"


def test_written_counts_are_read(path: Path) -> None:
    write_counts(path, [[3, 0, 1], [2, 2, 0]], first_step=1, last_step=7)
    assert read_counts(path) == [[3, 0, 1], [2, 2, 0]]
    assert [file.name for file in path.parent.iterdir()] == ["counts.json"]


@pytest.mark.parametrize(
    ("text", "want"),
    [("[3, 0.5]", [[3, 0.5]]), ("[[3, 0], [1, 2]]", [[3, 0], [1, 2]])],
)
def test_plain_lists_are_accepted(path: Path, text: str, want: list[list[float]]) -> None:
    path.write_text(text)
    assert read_counts(path) == want


@pytest.mark.parametrize("text", ["7", "[]", "[[1], []]", "[[1], 2]"])
def test_other_nesting_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match="must be numbers of each expert, or lists of them"):
        read_counts(path)
