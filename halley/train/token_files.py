"""Store tokens in a folder of ``.npy`` files, and read ranges of them from the disk."""

import json
import os
import tokenize
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, final

import numpy as np

from halley.core.validation import build_record, check_fields, make_empty_folder, read_json
from halley.train.text_files import TOKENS_FILE
from halley.train.tokenizer import TOKENIZER_FILE, Tokenizer


_SHARD_TOKENS = 1 << 26
_MAX_BYTES = 16 << 20
_WHAT = "tokens"


@dataclass(frozen=True, kw_only=True)
class TokenInfo:
    """Content of ``tokens.json``: the tokenizer's facts, and the number of tokens of each file."""

    version: Literal[1] = 1
    tokenizer_checksum: str
    vocab_size: int
    end_of_text: str | None
    num_tokens: tuple[int, ...]  # of tokens-00000.npy, tokens-00001.npy, ...

    def __post_init__(self) -> None:
        check_fields(self)


@final
@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """Consecutive tokens in a file, which stay on the disk until ``read``."""

    path: Path
    num_tokens: int
    dtype: np.dtype | type[np.unsignedinteger] = np.uint8
    offset: int = 0  # bytes before the first token

    def read(self, first: int, last: int) -> np.ndarray:
        """Return tokens ``first`` to ``last`` - 1; ``RuntimeError`` if the file has lost them."""
        # Read by ``fromfile``: a memory map raises SIGBUS if the file is truncated meanwhile.
        offset = self.offset + first * np.dtype(self.dtype).itemsize
        tokens = np.fromfile(self.path, dtype=self.dtype, count=last - first, offset=offset)
        if tokens.size != last - first:
            raise RuntimeError(f"{self.path} has become shorter while it was read")
        return tokens


def write_tokens(
    batches: Iterable[np.ndarray],
    folder: Path,
    *,
    tokenizer: Tokenizer,
    shard_tokens: int = _SHARD_TOKENS,
) -> TokenInfo:
    """Write tokens into an empty folder, with the tokenizer; return the content of ``tokens.json``.

    Files have ``shard_tokens`` tokens, except the last one. ``tokens.json`` is written last, so
    that an unfinished folder is refused. ``ValueError`` if the folder is in use or there is no
    token.
    """
    make_empty_folder(folder)
    shard, filled, sizes = np.empty(shard_tokens, dtype=tokenizer.dtype), 0, list[int]()
    for tokens in batches:
        while tokens.size:
            part, tokens = np.split(tokens, [shard_tokens - filled])
            shard[filled : filled + part.size] = part
            filled += part.size
            if filled == shard_tokens:
                np.save(_shard_path(folder, len(sizes)), shard)
                sizes.append(filled)
                filled = 0
    if filled:
        np.save(_shard_path(folder, len(sizes)), shard[:filled])
        sizes.append(filled)
    if not sizes:
        raise ValueError("text must have at least one token")
    info = TokenInfo(
        tokenizer_checksum=tokenizer.checksum,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        num_tokens=tuple(sizes),
    )
    (folder / TOKENIZER_FILE).write_text(tokenizer.text, encoding="utf-8")
    draft = folder / f"{TOKENS_FILE}.tmp"
    draft.write_text(json.dumps(asdict(info)) + "\n", encoding="utf-8")
    os.replace(draft, folder / TOKENS_FILE)
    return info


def read_token_folder(folder: Path) -> tuple[TokenInfo, list[TokenFile]]:
    """Return the content of ``tokens.json`` and the files of tokens; ``ValueError`` if damaged."""
    path = folder / TOKENS_FILE
    table = read_json(path, what=_WHAT, max_bytes=_MAX_BYTES)
    info = build_record(
        TokenInfo, table, where=f"{_WHAT} ({path}) must be as halley tokenize writes it:"
    )
    return info, [
        _open_shard(_shard_path(folder, index), num_tokens=num_tokens)
        for index, num_tokens in enumerate(info.num_tokens)
    ]


def _shard_path(folder: Path, index: int) -> Path:
    return folder / f"tokens-{index:05d}.npy"


def _open_shard(path: Path, *, num_tokens: int) -> TokenFile:
    try:
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            offset, num_bytes = file.tell(), os.fstat(file.fileno()).st_size
    except (OSError, ValueError, SyntaxError, tokenize.TokenError) as error:
        problem = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise ValueError(f"{_WHAT} ({path}) must be a .npy file: {problem}") from error
    is_whole = num_bytes == offset + num_tokens * dtype.itemsize
    if shape != (num_tokens,) or dtype not in (np.uint16, np.uint32) or not is_whole:
        rule = f"hold {num_tokens} tokens of uint16 or uint32, as {TOKENS_FILE} says"
        raise ValueError(f"{_WHAT} ({path}) must {rule}")
    return TokenFile(path=path, num_tokens=num_tokens, dtype=dtype, offset=offset)
