"""Training text as bytes: files concatenated to a corpus, cut into windows, divided over ranks."""

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


VOCAB_SIZE = 256

_NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}


def find_text_files(path: Path | None) -> list[Path]:
    """List the training files, in an order that is the same on every rank and machine.

    Args:
        path: a file; a folder, for all non-hidden, non-empty files below it; or None for the Python
            sources of the standard library.

    Raises:
        ValueError: there is no text at ``path``, or it cannot be read.
    """
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _walk(folder, left_out=_NOT_TEXT) if file.suffix == ".py"]
        path = folder
    else:
        files = _find_files(path)
    for file in files:
        if not os.access(file, os.R_OK):
            raise ValueError(f"text ({file}) must be readable")
    files = [file for file in files if file.stat().st_size > 0]
    if not files:
        raise ValueError(f"text ({path}) must hold at least one byte; no file with text is there")
    return files


def _find_files(path: Path) -> list[Path]:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a null character
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"text ({path}) must be a file or a folder: {reason}") from error
    if stat.S_ISREG(mode):
        return [path]
    if stat.S_ISDIR(mode):
        return _walk(path, left_out=set())
    raise ValueError(f"text ({path}) must be a file or a folder, and is a pipe or a device")


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
    """Files concatenated with one zero byte between two, read one window at a time.

    It holds no text in memory and no open files: each read opens the files that it needs.
    """

    def __init__(self, files: Sequence[Path], *, window: int) -> None:
        """Read the sizes of the files.

        Args:
            files: files in order.
            window: bytes of one window; windows do not overlap and may span files.

        Raises:
            ValueError: the files hold less than one window.
        """
        self.window = window
        self._files = list(files)
        self._sizes = [file.stat().st_size for file in self._files]
        ends = accumulate(size + 1 for size in self._sizes)
        self._starts = [0, *ends]
        num_bytes = self._starts[-1] - 1
        if num_bytes < window:
            raise ValueError(
                f"text of {num_bytes} bytes in {len(self._files)} files must hold at least one "
                f"window of {window} bytes"
            )
        self.num_windows = num_bytes // window

    def read_window(self, index: int) -> np.ndarray:
        """Return window ``index``, uint8 (window,), a new array.

        Raises:
            RuntimeError: a file has become shorter since the corpus was created.
        """
        assert 0 <= index < self.num_windows
        out = np.zeros(self.window, dtype=np.uint8)
        begin, end = index * self.window, (index + 1) * self.window
        first = bisect.bisect_right(self._starts, begin) - 1
        last = bisect.bisect_left(self._starts, end)
        for file, start, size in zip(
            self._files[first:last], self._starts[first:last], self._sizes[first:last], strict=True
        ):
            lower, upper = max(begin, start), min(end, start + size)
            if lower >= upper:
                continue
            # Not a memory map: if a file is truncated meanwhile, a read would raise SIGBUS.
            piece = np.fromfile(file, dtype=np.uint8, count=upper - lower, offset=lower - start)
            if piece.size != upper - lower:
                raise RuntimeError(f"{file} has become shorter while it was read")
            out[lower - begin : upper - begin] = piece
        return out


@final
class BatchLoader:
    """Gives each rank its batches; a batch depends on the step and on the windows read before.

    The global batch of a step has the same windows in the same order for any number of ranks:
    microbatch m of a single rank is the batch of rank m of several ranks.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        seq_len: int,
        batch_size: int,
        num_microbatches: int,
        rank: int,
        num_ranks: int,
        seed: int,
    ) -> None:
        """Create the loader of one rank.

        Args:
            corpus: its window is ``seq_len + 1`` bytes, so that each token has a next one.
            seq_len: tokens of a sequence.
            batch_size: sequences of one microbatch of one rank.
            num_microbatches: microbatches of a step.
            rank: this rank.
            num_ranks: ranks that read different data.
            seed: seed of the shuffle, at least 0.

        Raises:
            ValueError: a size does not fit.
        """
        if corpus.window != seq_len + 1:
            raise ValueError(
                f"window ({corpus.window}) of the corpus must be seq_len + 1 ({seq_len + 1})"
            )
        for name, size in [("batch_size", batch_size), ("num_microbatches", num_microbatches)]:
            if size < 1:
                raise ValueError(f"{name} ({size}) must be at least 1")
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank ({rank}) must be in [0, num_ranks), num_ranks is {num_ranks}")
        if seed < 0:
            raise ValueError(f"seed ({seed}) must be at least 0")
        self._corpus = corpus
        self._batch_size = batch_size
        self._num_microbatches = num_microbatches
        self._rank = rank
        self._num_ranks = num_ranks
        self._seed = seed
        self._num_more = 0  # windows read before, in excess of steps of this size

    def resume(self, step: int, *, num_read: int) -> None:
        """Continue at ``step`` after earlier steps, possibly of other batch sizes.

        Args:
            step: the next step, from 0.
            num_read: result of ``num_read`` for this step in the earlier run.
        """
        self._num_more += num_read - self.num_read(step)

    def num_read(self, step: int) -> int:
        """Return how many windows all ranks have read before ``step``."""
        num_batches = step * self._num_microbatches * self._num_ranks
        return self._num_more + num_batches * self._batch_size

    def batch(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens and the targets of one microbatch of this rank.

        Args:
            step: the step, from 0 over the whole training.
            microbatch: in ``[0, num_microbatches)``.

        Returns:
            Tokens, and targets shifted by one position; both int64 (batch_size, seq_len), on the
            CPU.
        """
        assert 0 <= microbatch < self._num_microbatches
        index = microbatch * self._num_ranks + self._rank
        first = self.num_read(step) + index * self._batch_size
        windows = np.stack(
            [self._corpus.read_window(self._window_of(first + i)) for i in range(self._batch_size)]
        )
        text = torch.from_numpy(windows).long()
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def _window_of(self, sample: int) -> int:
        num_windows = self._corpus.num_windows
        epoch, index = divmod(sample, num_windows)
        return int(_shuffle(num_windows, seed=self._seed, epoch=epoch)[index])


@lru_cache(maxsize=2)  # a batch may span two epochs
def _shuffle(num_windows: int, *, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_windows)
