"""Open the data of a run, cut its tokens into windows, and divide the windows over ranks."""

import bisect
import os
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import final

import numpy as np
import torch
import xxhash

from halley.core.config import DataConfig, RunConfig, TrainConfig
from halley.train.text_files import (
    TABLE_SUFFIXES,
    TOKENS_FILE,
    find_text_files,
    read_pieces,
)
from halley.train.token_files import TokenFile, read_token_folder
from halley.train.tokenizer import Tokenizer, load_tokenizer


NUM_BYTE_VALUES = 256  # size of the vocabulary without a tokenizer
BYTES = "bytes"  # in place of a tokenizer's checksum

_MAX_TEXT_BYTES = 256 << 20  # most bytes of a text that each rank parses when a run starts
_NUM_SAMPLED = 4096  # tokens of each place that a fingerprint reads


def open_corpus(config: RunConfig) -> "Corpus":
    """Return the training data of a run.

    ``ValueError`` if the data cannot be read or has fewer than ``data.seq_len`` + 1 tokens, or if
    the model has a smaller vocabulary than the data.
    """
    path = None if config.data.path is None else Path(config.data.path)
    return _open(path, config.data, vocab_size=config.model.vocab_size, key="data.path")


def open_eval_corpus(config: RunConfig, corpus: "Corpus", *, num_ranks: int) -> "Corpus | None":
    """Return the data of the evaluation loss, or None if there is none.

    ``ValueError`` as for ``open_corpus``, if ranks would have no window, or if the tokenizer is not
    that of ``corpus``, the training data.
    """
    if not config.data.eval_path:
        return None
    path, vocab_size = Path(config.data.eval_path), config.model.vocab_size
    held_out = _open(path, config.data, vocab_size=vocab_size, key="data.eval_path")
    if held_out.tokenizer_checksum != corpus.tokenizer_checksum:
        rule = "have the tokenizer of data.path: data.tokenizer can name it"
        raise ValueError(f"data.eval_path ({path}) must {rule}")
    if held_out.num_windows < num_ranks:
        rule = f"at least one for each of {num_ranks} ranks"
        raise ValueError(f"windows of data.eval_path ({held_out.num_windows}) must be {rule}")
    return held_out


def _open(path: Path | None, config: DataConfig, *, vocab_size: int, key: str) -> "Corpus":
    tokenizer = load_tokenizer(Path(config.tokenizer)) if config.tokenizer else None
    if path is not None and os.path.isfile(path / TOKENS_FILE):
        info, pieces = read_token_folder(path)
        if tokenizer is not None and tokenizer.checksum != info.tokenizer_checksum:
            rule = f"the tokenizer that {path} was written with, or left out"
            raise ValueError(f"data.tokenizer ({config.tokenizer}) must be {rule}")
        checksum, least, what = info.tokenizer_checksum, info.vocab_size, f"the tokens of {path}"
    elif tokenizer is not None:
        checksum, least, what = tokenizer.checksum, tokenizer.vocab_size, "data.tokenizer"
        pieces = None
    else:
        checksum, least, what, pieces = BYTES, NUM_BYTE_VALUES, "bytes", None
    if vocab_size < least:
        raise ValueError(f"model.vocab_size ({vocab_size}) must be at least {least}, for {what}")
    if pieces is None:
        pieces = _read_text(find_text_files(path), tokenizer)
    # A window has one token more than a sequence: the target of the last token.
    corpus = Corpus(pieces, window=config.seq_len + 1, tokenizer_checksum=checksum)
    if not corpus.num_windows:
        unit = "bytes" if checksum == BYTES else "tokens"
        rule = f"at least one window of {config.seq_len + 1} {unit}"
        raise ValueError(f"{key} ({path}) must hold {rule}, and has {corpus.num_tokens} {unit}")
    return corpus


def _read_text(files: list[Path], tokenizer: Tokenizer | None) -> "list[TokenFile | np.ndarray]":
    """Return the tokens of files. Only plain text without a tokenizer stays on the disk."""
    # Sizes and times of change are part of the caches' keys.
    stats = [(file, file.stat()) for file in files]
    stamped = tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)
    if tokenizer is not None:
        return [_encode(stamped, tokenizer)]
    pieces: list[TokenFile | np.ndarray] = []
    num_parsed = 0
    for file, size, changed_ns in stamped:
        if file.suffix in TABLE_SUFFIXES:
            rows = _read_rows((file, size, changed_ns), num_before=num_parsed)
            num_parsed += rows.size
            pieces.append(rows)
        else:
            pieces.append(TokenFile(path=file, num_tokens=size))
    return pieces


# The caches serve a command, which checks the data before its run opens them.
@lru_cache(maxsize=2)  # training and evaluation
def _encode(files: tuple[tuple[Path, int, int], ...], tokenizer: Tokenizer) -> np.ndarray:
    texts = read_pieces([file for file, _, _ in files], max_bytes=_MAX_TEXT_BYTES)
    tokens = tokenizer.encode(texts)
    return np.concatenate([np.empty(0, dtype=tokenizer.dtype), *tokens])


@lru_cache(maxsize=4096)
def _read_rows(file: tuple[Path, int, int], *, num_before: int) -> np.ndarray:
    pieces = read_pieces([file[0]], max_bytes=_MAX_TEXT_BYTES, num_before=num_before)
    text = b"\0".join(text.encode("utf-8") for text, _ in pieces)
    return np.frombuffer(text, dtype=np.uint8)


@final
class Corpus:
    """Concatenated tokens, read in windows of ``window`` tokens. Windows do not overlap.

    A window may span pieces. Between pieces of bytes there is a zero byte. Pieces of a tokenizer's
    tokens follow each other, because documents end with the end-of-text token.
    """

    def __init__(
        self,
        pieces: Sequence[TokenFile | np.ndarray],
        *,
        window: int,
        tokenizer_checksum: str = BYTES,
    ) -> None:
        """Record sizes of pieces. Without a tokenizer, the checksum is ``BYTES``."""
        self.tokenizer_checksum = tokenizer_checksum
        self._window = window
        self._pieces = list(pieces)
        self._sizes = [
            each.size if isinstance(each, np.ndarray) else each.num_tokens for each in pieces
        ]
        gap = int(tokenizer_checksum == BYTES)
        self._starts = [0, *accumulate(size + gap for size in self._sizes)]
        self.num_tokens = self._starts[-1] - gap
        self.num_windows = self.num_tokens // window
        # Checksum of the number of tokens, and of the first, middle and last 4096 tokens.
        self.fingerprint = self._fingerprint()

    def read_window(self, index: int) -> np.ndarray:
        """Return window ``index``, counted from 0, as int64 ``(window,)``."""
        assert 0 <= index < self.num_windows
        return self._read(index * self._window, (index + 1) * self._window)

    def read_batch(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens and the targets of windows; targets are shifted by one position.

        Both are int64 ``(len(indices), window - 1)``, on the CPU.
        """
        text = torch.from_numpy(np.stack([self.read_window(index) for index in indices]))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def _fingerprint(self) -> str:
        digest = xxhash.xxh3_128(str(self.num_tokens).encode())
        last = max(self.num_tokens - _NUM_SAMPLED, 0)
        for begin in (0, last // 2, last):
            tokens = self._read(begin, min(begin + _NUM_SAMPLED, self.num_tokens))
            digest.update(tokens.astype("<i8").tobytes())
        return digest.hexdigest()

    def _read(self, begin: int, end: int) -> np.ndarray:
        out = np.zeros(end - begin, dtype=np.int64)
        first = bisect.bisect_right(self._starts, begin) - 1
        last = bisect.bisect_left(self._starts, end)
        for piece, start, size in zip(
            self._pieces[first:last], self._starts[first:last], self._sizes[first:last], strict=True
        ):
            lower, upper = max(begin, start), min(end, start + size)
            if lower >= upper:
                continue
            place = slice(lower - start, upper - start)
            is_array = isinstance(piece, np.ndarray)
            tokens = piece[place] if is_array else piece.read(place.start, place.stop)
            out[lower - begin : upper - begin] = tokens
        return out


@final
class BatchLoader:
    """Reads one rank's microbatches (tokens and targets) of any step, with windows in random order.

    W microbatches on one rank have the same windows as one microbatch on each of W ranks.
    """

    def __init__(self, corpus: Corpus, config: TrainConfig, *, rank: int, num_ranks: int) -> None:
        self.corpus, self._config = corpus, config
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
        batch_size, num_windows = self._config.batch_size, self.corpus.num_windows
        first = (microbatch * self._num_ranks + self._rank) * batch_size + self.num_read(step)
        windows: list[int] = []
        for sample in range(first, first + batch_size):
            epoch, index = divmod(sample, num_windows)
            order = _shuffle(num_windows, seed=self._config.seed, epoch=epoch)
            windows.append(int(order[index]))
        return self.corpus.read_batch(windows)


@lru_cache(maxsize=2)  # a batch may span two epochs
def _shuffle(num_windows: int, *, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_windows)
