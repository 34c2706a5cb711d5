"""Find the text files of a data path, and read the documents of text, JSON-lines and Parquet."""

import math
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from halley.core.validation import Table, check_package, parse_json


TOKENS_FILE = "tokens.json"  # the last file that halley tokenize writes
KEY = "text"  # key of JSON lines, and column of Parquet files, that has the text of a document
TABLE_SUFFIXES = (".jsonl", ".parquet")  # files with one document per row; others are plain text

_NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_BLOCK_BYTES = 1 << 20  # least size of a piece of a plain text file, except the last one
_NUM_ROWS = 256  # rows of a Parquet file that are read together


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
        if file.suffix == ".npy":
            rule = "text: data.path names the whole folder that halley tokenize wrote"
            if file.match("tokens-*") and not file.with_name(TOKENS_FILE).exists():
                rule = f"beside {TOKENS_FILE}: halley tokenize has not finished there"
            raise ValueError(f"text ({file}) must be {rule}")
        if file.suffix in _COMPRESSED:
            raise ValueError(f"text ({file}) must be decompressed")
    files = [file for file in files if file.stat().st_size > 0]
    if not files:
        raise ValueError(f"text ({path}) must hold at least one byte; no file with text is there")
    return files


def _walk(folder: Path, *, left_out: set[str]) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise ValueError(f"text ({error.filename}) must be readable: {error.strerror}") from error

    files = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and name not in left_out]
        files += [Path(parent, name) for name in names if name[0] != "."]
    return sorted(
        (file for file in files if file.is_file()), key=lambda file: file.relative_to(folder).parts
    )


def read_pieces(
    files: Iterable[Path], *, max_bytes: float = math.inf, num_before: int = 0
) -> Iterator[tuple[str, bool]]:
    """Yield pieces of the documents of files, and whether each piece is the last of its document.

    A row of a JSON-lines or Parquet file is a document of one piece; rows with an empty text are
    left out. A plain text file is one document, in pieces of whole lines of at least 1 MiB. A file
    that cannot be read so is a ``ValueError`` that names the file, and the line if there is one. So
    is a file with which the text and ``num_before`` exceed ``max_bytes`` bytes of UTF-8.
    """
    num_bytes = num_before
    for file in files:
        for text, is_last in _read_file(file):
            num_bytes += len(text.encode("utf-8"))
            if num_bytes > max_bytes:
                rule = f"at most {max_bytes} bytes of text, with all files before it"
                raise ValueError(f"text ({file}) must have {rule}: halley tokenize has no limit")
            yield text, is_last


def _read_file(file: Path) -> Iterator[tuple[str, bool]]:
    if file.suffix in TABLE_SUFFIXES:
        read_rows = _read_json_rows if file.suffix == ".jsonl" else _read_parquet_rows
        yield from ((text, True) for text in read_rows(file) if text)
        return
    offset = 0
    with file.open("rb") as lines:
        while block := lines.readlines(_BLOCK_BYTES):
            content = b"".join(block)
            try:
                yield content.decode("utf-8"), False
            except UnicodeDecodeError as error:
                where = offset + error.start
                rule = f"UTF-8 for a tokenizer: the byte at offset {where} is not"
                raise ValueError(f"text ({file}) must be {rule}") from error
            offset += len(content)
    yield "", True


def _read_json_rows(file: Path) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}:{number}"
            try:
                value = parse_json(line.decode("utf-8"), where=where)
                text = cast(Table, value).get(KEY) if isinstance(value, dict) else None
                if not isinstance(text, str):
                    raise ValueError(f"{where} must be a JSON object with a string {KEY!r}")
                text.encode("utf-8")  # JSON can escape half of a surrogate pair
            except UnicodeError as error:
                raise ValueError(f"{where} must be UTF-8 without lone surrogates") from error
            yield text


def _read_parquet_rows(file: Path) -> Iterator[str]:
    check_package("pyarrow", extra="data", option=f"text ({file})")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            schema = table.schema_arrow
            if KEY not in schema.names:
                names = ", ".join(schema.names)
                raise ValueError(f"text ({file}) must have a column {KEY}, and has {names}")
            kind = schema.field(KEY).type
            if kind not in (pa.string(), pa.large_string()):
                rule = f"have strings in the column {KEY}, and has {kind}"
                raise ValueError(f"text ({file}) must {rule}")
            for batch in table.iter_batches(_NUM_ROWS, columns=[KEY]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
        problem = str(error).partition("\n")[0]
        raise ValueError(f"text ({file}) must be a Parquet file: {problem}") from error
