"""Encode documents with a ``tokenizer.json`` of the library tokenizers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from halley.core.validation import check_package, read_text
from halley.train.text_files import read_pieces


TOKENIZER_FILE = "tokenizer.json"

# Names of the token that ends a document in the vocabularies of published models.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>")  # noqa: RUF001
_MAX_BYTES = 256 << 20
_BATCH_SIZE = 4 << 20  # characters that are encoded together, in parallel


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer; two tokenizers are equal if their files are."""

    checksum: str  # XXH3-128 of the file's text, in hex
    vocab_size: int  # largest token plus one
    end_of_text: str | None  # token that ends each document; None if the vocabulary has none
    text: str = field(compare=False, repr=False)  # content of the file
    backend: Any = field(compare=False, repr=False)  # ``tokenizers.Tokenizer``

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """Return the smallest of uint16 and uint32 that has all tokens."""
        return np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def encode(self, files: Sequence[Path]) -> Iterator[np.ndarray]:
        """Yield the tokens of the documents of text files, in order, each 1-D of ``dtype``.

        The end-of-text token, if there is one, follows each document. The tokenizer adds no other
        special tokens, and cuts no document.
        """
        end = [] if self.end_of_text is None else [self.backend.token_to_id(self.end_of_text)]
        for batch in _batches(chain.from_iterable(map(read_pieces, files))):
            texts = [text for text, _ in batch]
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
            for encoding, (_, is_last) in zip(encodings, batch, strict=True):
                yield np.array(encoding.ids + end * is_last, dtype=self.dtype)


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a ``tokenizer.json``, or of a folder that contains one.

    ``ValueError`` if the file is no tokenizer, or if the package tokenizers is missing.
    """
    check_package("tokenizers", extra="data", option=f"tokenizer ({path})")
    from tokenizers import Tokenizer as Backend

    file = path / TOKENIZER_FILE if path.is_dir() else path
    text = read_text(file, what="tokenizer", max_bytes=_MAX_BYTES)
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises no narrower type
        rule = f"a {TOKENIZER_FILE} of the library tokenizers"
        raise ValueError(f"tokenizer ({file}) must be {rule}: {error}") from error
    backend.no_truncation()  # the file may have a length for inference
    backend.no_padding()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ValueError(f"tokenizer ({file}) must have at least one token")
    return Tokenizer(
        checksum=xxhash.xxh3_128_hexdigest(text.encode("utf-8")),
        vocab_size=max(vocabulary.values()) + 1,
        end_of_text=next((name for name in _END_OF_TEXT if name in vocabulary), None),
        text=text,
        backend=backend,
    )


def _batches(pieces: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= _BATCH_SIZE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
