"""Encode documents with a ``tokenizer.json`` of the library tokenizers."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from halley.core.validation import check_package, read_text


TOKENIZER_FILE = "tokenizer.json"

# Names of the token that ends a document in the vocabularies of published models. "</s>" is last,
# because Gemma's vocabulary has it as a tag of HTML.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>")  # noqa: RUF001
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

    def encode(self, pieces: Iterator[tuple[str, bool]]) -> Iterator[np.ndarray]:
        """Yield the tokens of the pieces of ``read_pieces``, in order, each 1-D of ``dtype``.

        The end-of-text token, if there is one, follows each document. The tokenizer adds no other
        special tokens, and cuts no document. The name of a special token in a text is encoded as
        text, except by Unigram models, whose vocabulary has it as a piece.

        Each piece of a plain text file is encoded as a text of its own. A tokenizer that begins
        each text with a prefix, such as Metaspace's, adds the prefix to each piece, of about 1 MiB.
        """
        end = [] if self.end_of_text is None else [self.backend.token_to_id(self.end_of_text)]
        for batch in _batches(pieces):
            texts = [text for text, _ in batch]
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
            for encoding, (_, is_last) in zip(encodings, batch, strict=True):
                yield np.array(encoding.ids + end * is_last, dtype=self.dtype)


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a ``tokenizer.json``, or of a folder that contains one.

    ``ValueError`` if the file is no tokenizer, or if the package tokenizers is missing.
    """
    check_package("tokenizers", extra="data", option=f"tokenizer ({path})")
    file = path / TOKENIZER_FILE if os.path.isdir(path) else path
    return _parse(read_text(file, what="tokenizer", max_bytes=_MAX_BYTES), file=file)


@lru_cache(maxsize=1)  # a command and its run load the tokenizer several times
def _parse(text: str, *, file: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises no narrower type
        rule = f"a {TOKENIZER_FILE} of the library tokenizers"
        raise ValueError(f"tokenizer ({file}) must be {rule}: {error}") from error
    backend.no_truncation()  # the file may have a length for inference
    backend.no_padding()
    backend.encode_special_tokens = True  # of a text: a document must not contain its own end
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ValueError(f"tokenizer ({file}) must have at least one token")
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    found = [name for names in (special, vocabulary) for name in _END_OF_TEXT if name in names]
    return Tokenizer(
        checksum=xxhash.xxh3_128_hexdigest(text.encode("utf-8")),
        vocab_size=max(vocabulary.values()) + 1,
        end_of_text=found[0] if found else None,
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
