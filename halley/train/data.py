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

from halley.core.config import RunConfig, TrainConfig


VOCAB_SIZE = 256

_NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}


def check_vocabulary(config: RunConfig) -> None:
    """Raise ``ValueError`` unless the model's vocabulary has every byte."""
    if config.model.vocab_size < VOCAB_SIZE:
        raise ValueError(
            f"model.vocab_size ({config.model.vocab_size}) must be at least {VOCAB_SIZE}, for bytes"
        )


def open_corpus(config: RunConfig) -> "Corpus":
    """Open the training text of a run.

    Raises:
        ValueError: it is missing, or too short for one sequence.
    """
    path = None if config.data.path is None else Path(config.data.path)
    return Corpus(find_text_files(path), window=config.data.seq_len + 1)  # each token has a next


def find_text_files(path: Path | None) -> list[Path]:
    """List the training files, in an order that is the same on every rank and machine.

    Args:
        path: a file; a folder, for all non-hidden, non-empty files below it; or None for the Python
            sources of the standard library.

    Raises:
        ValueError: there is no text at ``path``, or it cannot be read.
    """
    if path is None:
        path = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _walk(path, left_out=_NOT_TEXT) if file.suffix == ".py"]
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

    Windows do not overlap and may span files. Each read opens the files that it needs; no text
    stays in memory.
    """

    def __init__(self, files: Sequence[Path], *, window: int) -> None:
        """Read the sizes of the files; ValueError if they hold less than ``window`` bytes."""
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
        """Return a window, uint8 (window,); RuntimeError if a file has become shorter."""
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

    def __init__(self, corpus: Corpus, config: TrainConfig, *, rank: int, num_ranks: int) -> None:
        """Create the loader of one rank; ``config`` has the batch sizes and the shuffle's seed."""
        self._corpus, self._config = corpus, config
        self._rank, self._num_ranks = rank, num_ranks
        # Windows that earlier steps, of other batch sizes, have read beyond steps of this size.
        self._num_more = 0

    def resume(self, step: int, *, num_read: int) -> None:
        """Continue at ``step`` after steps of other batch sizes, which read ``num_read``."""
        self._num_more += num_read - self.num_read(step)

    def num_read(self, step: int) -> int:
        """Return how many windows all ranks have read before ``step``."""
        num_batches = step * self._config.num_microbatches * self._num_ranks
        return self._num_more + num_batches * self._config.batch_size

    def batch(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens and the targets of one microbatch of this rank.

        Targets are shifted by one position. Both are int64 (batch_size, seq_len), on the CPU.
        """
        batch_size = self._config.batch_size
        first = (microbatch * self._num_ranks + self._rank) * batch_size + self.num_read(step)
        windows = [self._read_sample(first + index) for index in range(batch_size)]
        text = torch.from_numpy(np.stack(windows)).long()
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def _read_sample(self, sample: int) -> np.ndarray:
        num_windows = self._corpus.num_windows
        epoch, index = divmod(sample, num_windows)
        order = _shuffle(num_windows, seed=self._config.seed, epoch=epoch)
        return self._corpus.read_window(int(order[index]))


@lru_cache(maxsize=2)  # a batch may span two epochs
def _shuffle(num_windows: int, *, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_windows)
