"""Batches have the right bytes, and a global batch does not depend on the number of ranks."""

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halley.core.config import TrainConfig
from halley.train.data import NUM_BYTE_VALUES, BatchLoader, Corpus
from halley.train.text_files import find_text_files
from halley.train.token_files import TokenFile


def _corpus(files: list[Path], *, window: int) -> Corpus:
    pieces = [TokenFile(path=file, num_tokens=file.stat().st_size) for file in files]
    return Corpus(pieces, window=window)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of two visible files with text, 3 and 5 bytes, and some others."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.txt").write_bytes(b"12345")
    (tmp_path / "a.txt").write_bytes(b"abc")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden.txt").write_bytes(b"no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"no")
    return tmp_path


def test_folder_gives_its_visible_files_in_order_and_a_file_itself(folder: Path):
    assert find_text_files(folder) == [folder / "a.txt", folder / "b" / "a.txt"]
    assert find_text_files(folder / ".hidden.txt") == [folder / ".hidden.txt"]


def test_default_is_the_standard_library():
    files = find_text_files(None)
    stdlib = Path(sysconfig.get_path("stdlib"))
    names = [file.relative_to(stdlib).as_posix() for file in files]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or name.startswith("test/")]
    assert all(name.endswith(".py") for name in names)
    assert files == find_text_files(None)
    assert _corpus(files, window=65).num_windows > 10_000


@settings(max_examples=50, deadline=None)
@given(
    texts=st.lists(st.binary(min_size=1, max_size=6), min_size=1, max_size=5),
    window=st.integers(1, 8),
)
def test_windows_are_the_joined_text(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], window: int
):
    folder = tmp_path_factory.mktemp("text")
    files = [folder / str(index) for index in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_bytes(text)
    joined = b"\0".join(texts)
    corpus = _corpus(files, window=window)
    windows = [corpus.read_window(index) for index in range(corpus.num_windows)]
    assert all(each.shape == (window,) and each.dtype == np.int64 for each in windows)
    read = b"".join(bytes(each.tolist()) for each in windows)
    assert read == joined[: len(joined) // window * window]


def test_file_cut_short_is_an_error(folder: Path):
    corpus = _corpus(find_text_files(folder), window=3)
    (folder / "a.txt").write_bytes(b"a")
    with pytest.raises(RuntimeError, match=r"a\.txt has become shorter"):
        corpus.read_window(0)


SEQ_LEN = 4
NUM_WINDOWS = 10


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Return a corpus of ten windows of five bytes; window w holds 10 w, 10 w + 1, ..."""
    rows = 10 * np.arange(NUM_WINDOWS)[:, None] + np.arange(SEQ_LEN + 1)
    (tmp_path / "text").write_bytes(rows.astype(np.uint8).tobytes())
    return _corpus([tmp_path / "text"], window=SEQ_LEN + 1)


def _load(
    corpus: Corpus, *, batch_size: int = 1, rank: int = 0, num_ranks: int = 1, **sizes: Any
) -> BatchLoader:
    config = TrainConfig(batch_size=batch_size, **sizes)
    return BatchLoader(corpus, config, rank=rank, num_ranks=num_ranks)


def test_targets_are_the_next_bytes(corpus: Corpus):
    tokens, targets = _load(corpus, batch_size=3).batch(0, 0)
    assert tokens.shape == targets.shape == (3, SEQ_LEN)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens % 10, torch.arange(SEQ_LEN).expand(3, -1))
    assert torch.equal(targets, tokens + 1)
    assert int(targets.max()) < NUM_BYTE_VALUES


def _windows(loader: BatchLoader, *, step: int, num_microbatches: int = 1) -> list[list[int]]:
    batches = [loader.batch(step, microbatch)[0] for microbatch in range(num_microbatches)]
    return [(tokens[:, 0] // 10).tolist() for tokens in batches]


def test_each_epoch_visits_each_window_once_in_its_own_order(corpus: Corpus):
    loader = _load(corpus, batch_size=5)
    steps = [_windows(loader, step=step)[0] for step in range(4)]
    epochs = [steps[0] + steps[1], steps[2] + steps[3]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM_WINDOWS))] * 2
    assert epochs[0] != epochs[1]
    other = _load(corpus, batch_size=5, seed=1)
    assert _windows(other, step=0)[0] != steps[0]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_global_batch_does_not_depend_on_the_split(corpus: Corpus, num_ranks: int):
    num_microbatches = 4 // num_ranks
    one = _load(corpus, batch_size=2, num_microbatches=4)
    sizes = {"batch_size": 2, "num_microbatches": num_microbatches, "num_ranks": num_ranks}
    ranks = [_load(corpus, rank=rank, **sizes) for rank in range(num_ranks)]
    for step in (0, 1, 7):  # a step reads 8 of 10 windows: step 1 spans two epochs
        expected = _windows(one, step=step, num_microbatches=4)
        by_rank = [_windows(r, step=step, num_microbatches=num_microbatches) for r in ranks]
        dealt = [by_rank[r][m] for m in range(num_microbatches) for r in range(num_ranks)]
        assert dealt == expected


def test_batch_is_the_same_after_any_other(corpus: Corpus):
    loader = _load(corpus, batch_size=2)
    first = loader.batch(9, 0)
    loader.batch(30, 0)
    torch.testing.assert_close(loader.batch(9, 0), first, rtol=0, atol=0)


def test_steps_of_another_size_read_on_where_the_others_ended(corpus: Corpus):
    order = _load(corpus)
    windows = [_windows(order, step=step)[0][0] for step in range(30)]
    before = _load(corpus, batch_size=3, num_microbatches=2)
    assert [before.num_read(step) for step in (0, 1, 2)] == [0, 6, 12]
    later = [_load(corpus, batch_size=2, rank=rank, num_ranks=2) for rank in range(2)]
    for loader in later:
        loader.resume(2, num_read=before.num_read(2))
        assert [loader.num_read(step) for step in (2, 3)] == [12, 16]
    dealt = [_windows(loader, step=step)[0] for step in (2, 3) for loader in later]
    assert [window for batch in dealt for window in batch] == windows[12:20]
    last = _load(corpus, batch_size=5)
    for _ in range(2):  # a second call of ``resume`` changes nothing
        last.resume(4, num_read=later[1].num_read(4))
        assert _windows(last, step=4)[0] == windows[20:25]
