"""A tokenizer of a few words, and documents in every format whose tokens are worked out by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest


VOCABULARY = {"<unk>": 0, "a": 1, "b": 2, "c": 3, "<|endoftext|>": 4}
DOCUMENTS = ["a b c", "b", "c b what a"]
TOKENS = [1, 2, 3, 4, 2, 4, 3, 2, 0, 1, 4]  # of DOCUMENTS: a document ends with 4


def write_tokenizer(
    folder: Path,
    *,
    vocabulary: dict[str, int] = VOCABULARY,
    added: Sequence[tuple[str, bool]] = (),
) -> Path:
    """Write a ``tokenizer.json`` that has one token for each word, and return it.

    ``added`` has tokens that follow the vocabulary, and whether they are special.
    """
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([tokenizers.AddedToken(name, special=flag) for name, flag in added])
    tokenizer.enable_truncation(2)  # a file may have the length of some use; Halley ignores it
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def write_documents(folder: Path, suffix: str, documents: list[str] = DOCUMENTS) -> Path:
    """Write documents to ``folder``: a file with the suffix, or several text files for ".txt"."""
    folder.mkdir(exist_ok=True)
    path = folder / f"part{suffix}"
    if suffix == ".txt":
        for index, document in enumerate(documents):
            (folder / f"part-{index}.txt").write_text(document)
        return folder
    if suffix == ".jsonl":
        lines = [json.dumps({"id": 7, "text": document}) + "\n" for document in documents]
        path.write_text("".join(lines))
        return path
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"id": [7] * len(documents), "text": documents}), path)
    return path
