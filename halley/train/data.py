"""Concatenate text files, cut their bytes into sequences, and divide the sequences over ranks."""

import bisect
import os
import stat
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import final

import numpy as np
import torch

from halley.core.config import RunConfig, TrainConfig


VOCAB_SIZE = 256

_NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}


def open_corpus(config: RunConfig) -> "Corpus":
    """Return the ``Corpus`` of a run; ``ValueError`` if its text or vocabulary is too small.

    The text must have at least ``data.seq_len`` + 1 bytes, and the vocabulary at least 256 entries.
    """
    if config.model.vocab_size < VOCAB_SIZE:
        raise ValueError(
            f"model.vocab_size ({config.model.vocab_size}) must be at least {VOCAB_SIZE}, for bytes"
        )
    path = None if config.data.path is None else Path(config.data.path)
    # A window has one byte more than a sequence: the target of the last token.
    return Corpus(find_text_files(path), window=config.data.seq_len + 1)


def find_text_files(path: Path | None) -> list[Path]:
    """Return the non-empty training files, in the same order on every rank and machine.

    ``path`` is a file; a folder, for all non-hidden files below it; or None for the Python sources
    of the standard library without its tests.
    """
    left_out, suffix = (_NOT_TEXT, ".py") if path is None else (set[str](), "")
    path = path or Path(sysconfig.get_path("stdlib"))
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError if the path has a null character
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"text ({path}) must be a file or a folder: {reason}") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError(f"text ({path}) must be a file or a folder, and is a pipe or a device")
    files = [path] if stat.S_ISREG(mode) else _walk(path, left_out=left_out)
    files = [file for file in files if file.name.endswith(suffix)]
    for file in files:
        if not os.access(file, os.R_OK):
            raise ValueError(f"text ({file}) must be readable")
    files = [file for file in files if file.stat().st_size > 0]
    if not files:
        raise ValueError(f"text ({path}) must hold at least one byte; no file with text is there")
    return files


def _walk(folder: Path, *, left_out: set[str]) -> list[Path]:
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and name not in left_out]
        files += [Path(parent, name) for name in names if name[0] != "."]
    return sorted(
        (file for file in files if file.is_file()), key=lambda file: file.relative_to(folder).parts
    )


@final
class Corpus:
    """Files concatenated with a zero byte between them, read in windows of ``window`` bytes.

    Windows do not overlap and may span files. No text stays in memory.
    """

    def __init__(self, files: Sequence[Path], *, window: int) -> None:
        """Record file sizes; ``ValueError`` if the concatenated files are shorter than a window."""
        self._window = window
        self._files = list(files)
        self._sizes = [file.stat().st_size for file in self._files]
        self._starts = [0, *accumulate(size + 1 for size in self._sizes)]
        num_bytes = self._starts[-1] - 1
        if num_bytes < window:
            raise ValueError(
                f"text of {num_bytes} bytes in {len(self._files)} files must hold at least one "
                f"window of {window} bytes"
            )
        self.num_windows = num_bytes // window

    def read_window(self, index: int) -> np.ndarray:
        """Read window ``index``, counted from 0, from the files; return uint8 ``(window,)``."""
        assert 0 <= index < self.num_windows
        out = np.zeros(self._window, dtype=np.uint8)
        begin, end = index * self._window, (index + 1) * self._window
        first = bisect.bisect_right(self._starts, begin) - 1
        last = bisect.bisect_left(self._starts, end)
        for file, start, size in zip(
            self._files[first:last], self._starts[first:last], self._sizes[first:last], strict=True
        ):
            lower, upper = max(begin, start), min(end, start + size)
            if lower >= upper:
                continue
            # Read by ``fromfile``: a memory map raises SIGBUS if the file is truncated meanwhile.
            piece = np.fromfile(file, dtype=np.uint8, count=upper - lower, offset=lower - start)
            if piece.size != upper - lower:
                raise RuntimeError(f"{file} has become shorter while it was read")
            out[lower - begin : upper - begin] = piece
        return out


@final
class BatchLoader:
    """Reads one rank's microbatches (tokens and targets) of any step, with windows in random order.

    W microbatches on one rank have the same windows as one microbatch on each of W ranks.
    """

    def __init__(self, corpus: Corpus, config: TrainConfig, *, rank: int, num_ranks: int) -> None:
        self._corpus, self._config = corpus, config
        self._rank, self._num_ranks = rank, num_ranks
        # Windows read before the resumed step, minus those of as many steps at this batch size.
        self._num_more = 0

    def resume(self, step: int, *, num_read: int) -> None:
        """Continue at ``step``, before which all ranks together have read ``num_read`` windows."""
        self._num_more += num_read - self.num_read(step)

    def num_read(self, step: int) -> int:
        """Return how many windows all ranks together read before ``step``, over all epochs."""
        num_batches = step * self._config.num_microbatches * self._num_ranks
        return self._num_more + num_batches * self._config.batch_size

    def batch(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens and the targets of one microbatch of this rank.

        Targets are shifted by one position. Both are int64 (batch_size, seq_len), on the CPU.
        """
        batch_size, num_windows = self._config.batch_size, self._corpus.num_windows
        first = (microbatch * self._num_ranks + self._rank) * batch_size + self.num_read(step)
        windows: list[np.ndarray] = []
        for sample in range(first, first + batch_size):
            epoch, index = divmod(sample, num_windows)
            order = _shuffle(num_windows, seed=self._config.seed, epoch=epoch)
            windows.append(self._corpus.read_window(int(order[index])))
        text = torch.from_numpy(np.stack(windows)).long()
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@lru_cache(maxsize=2)  # a batch may span two epochs
def _shuffle(num_windows: int, *, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_windows)
