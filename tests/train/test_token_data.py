"""Tokens of each data format, worked out by hand; token files; and errors of wrong files."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from halley.cli.main import main
from halley.core.config import RunConfig
from halley.train.data import BYTES, BatchLoader, Corpus, open_corpus, open_eval_corpus
from halley.train.text_files import read_pieces
from halley.train.token_files import read_token_folder, write_tokens
from halley.train.tokenizer import load_tokenizer
from tests.train.run_case import make_config
from tests.train.tokenizer_case import (
    DOCUMENTS,
    TOKENS,
    VOCABULARY,
    write_documents,
    write_tokenizer,
)


SUFFIXES = [".txt", ".jsonl", ".parquet"]


def _config(path: Path, *, seq_len: int = 1, **data: str) -> RunConfig:
    config = make_config(path)
    return dataclasses.replace(
        config, data=dataclasses.replace(config.data, seq_len=seq_len, **data)
    )


def _tokens(corpus: Corpus) -> list[int]:
    return [int(token) for i in range(corpus.num_windows) for token in corpus.read_window(i)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_tokens_of_documents_end_with_the_end_of_text_token(tmp_path: Path, suffix: str) -> None:
    tokenizer = write_tokenizer(tmp_path)
    path = write_documents(tmp_path / "text", suffix)
    for name in (str(tokenizer), str(tmp_path)):  # the file, or its folder
        corpus = open_corpus(_config(path, tokenizer=name))
        assert corpus.num_tokens == len(TOKENS)
        assert _tokens(corpus) == TOKENS[:10]  # windows of 2 tokens


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_bytes_of_documents_have_a_zero_byte_between_them(tmp_path: Path, suffix: str) -> None:
    corpus = open_corpus(_config(write_documents(tmp_path / "text", suffix)))
    joined = "\0".join(DOCUMENTS).encode()
    assert corpus.num_tokens == len(joined) == 18
    assert bytes(_tokens(corpus)) == joined
    assert corpus.tokenizer_checksum == BYTES


def test_a_folder_may_mix_formats_and_its_files_are_sorted_by_name(tmp_path: Path) -> None:
    text = write_documents(tmp_path / "text", ".jsonl", ["b", "", "c"]).parent
    (text / "a.txt").write_text("a")
    write_documents(text, ".parquet", ["c a"])
    corpus = open_corpus(_config(text, tokenizer=str(write_tokenizer(tmp_path))))
    assert _tokens(corpus) == [1, 4, 2, 4, 3, 4, 3, 1]  # and 4; the empty row has no token


def test_a_batch_has_the_tokens_and_the_next_tokens(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    path = write_documents(tmp_path / "text", ".jsonl")
    config = _config(path, seq_len=3, tokenizer=str(tokenizer))
    loader = BatchLoader(open_corpus(config), config.train, rank=0, num_ranks=1)
    tokens, targets = loader.batch(0, 0)
    pairs = sorted(zip(tokens.tolist(), targets.tolist(), strict=True))
    assert pairs == [([1, 2, 3], [2, 3, 4]), ([2, 4, 3], [4, 3, 2])]


def test_large_text_files_are_read_in_pieces_of_whole_lines(tmp_path: Path) -> None:
    line = "ab\u00e9 " * 2000 + "\n"
    path = tmp_path / "text.txt"
    path.write_text(line * 200, encoding="utf-8")  # 2 MB
    *pieces, last = read_pieces([path])
    assert len(pieces) == 2
    assert all(text.endswith("\n") and not is_last for text, is_last in pieces)
    assert "".join(text for text, _ in pieces) == line * 200
    assert last == ("", True)


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "end"),
    [(VOCABULARY, np.uint16, "<|endoftext|>"), ({"<unk>": 0, "a": 70000}, np.uint32, None)],
)
def test_tokenize_writes_tokens_that_training_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], vocabulary: dict[str, int],
    dtype: type[np.unsignedinteger], end: str | None,
) -> None:  # fmt: skip
    tokenizer = write_tokenizer(tmp_path, vocabulary=vocabulary)
    text, output = write_documents(tmp_path / "text", ".parquet"), tmp_path / "tokens"
    assert main(["tokenize", str(text), str(output), "--tokenizer", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    number = len(TOKENS) if end else 8
    size = max(vocabulary.values()) + 1
    facts = {"end_of_text": end, "num_tokens": number, "vocab_size": size}
    assert told == {"output": str(output), **facts}
    written = np.load(output / "tokens-00000.npy")
    assert written.dtype == dtype
    assert written.tolist() == (TOKENS if end else [70000, 0, 0, 0, 0, 0, 0, 70000])
    assert (output / "tokenizer.json").read_text() == tokenizer.read_text()
    config = _config(output)
    model = dataclasses.replace(config.model, vocab_size=max(size, 256))
    config = dataclasses.replace(config, model=model)
    corpus = open_corpus(config)
    plain = open_corpus(dataclasses.replace(config, data=_config(
        text, tokenizer=str(tokenizer)).data))  # fmt: skip
    assert _tokens(corpus) == _tokens(plain)
    assert corpus.tokenizer_checksum == plain.tokenizer_checksum
    with pytest.raises(ValueError, match="window") as caught:
        open_corpus(dataclasses.replace(config, data=_config(output, seq_len=20).data))
    assert str(caught.value) == (
        f"data.path ({output}) must hold at least one window of 21 tokens, and has {number} tokens"
    )
    assert main(["tokenize", str(text), str(output), "--tokenizer", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"halley: error: output ({output}) must be empty, or not there yet"
    )


def test_files_of_tokens_follow_each_other_without_a_gap(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    folder = tmp_path / "tokens"
    batches = [np.array(TOKENS[:1]), np.array(TOKENS[1:9]), np.array(TOKENS[9:])]
    info = write_tokens(batches, folder, tokenizer=tokenizer, shard_tokens=3)
    assert info.num_tokens == (3, 3, 3, 2)
    assert read_token_folder(folder)[0] == info
    assert _tokens(open_corpus(_config(folder, seq_len=10))) == TOKENS


def test_another_text_or_tokenizer_has_another_fingerprint(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "text", ".jsonl")
    tokenizer = str(write_tokenizer(tmp_path))
    first = open_corpus(_config(path, tokenizer=tokenizer))
    longer_windows = open_corpus(_config(path, seq_len=4, tokenizer=tokenizer))
    assert longer_windows.fingerprint == first.fingerprint
    write_documents(tmp_path / "text", ".jsonl", ["a b c", "a", *DOCUMENTS[2:]])
    assert open_corpus(_config(path, tokenizer=tokenizer)).fingerprint != first.fingerprint
    write_tokenizer(tmp_path, vocabulary={**VOCABULARY, "d": 5})
    other = open_corpus(_config(path, tokenizer=tokenizer))
    assert other.tokenizer_checksum != first.tokenizer_checksum


LINE = '{"text": "a"}\n'
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", LINE + "{", "{}:2 must be JSON: Expecting property name"),
        ("a.jsonl", LINE * 2 + '{"txt": "a"}', "{}:3 must be a JSON object with a string 'text'"),
        ("a.jsonl", '{"text": 3}', "{}:1 must be a JSON object with a string 'text'"),
        ("a.jsonl", '["text"]', "{}:1 must be a JSON object with a string 'text'"),
        ("a.jsonl", '{"text": "\\ud800"}', "{}:1 must be UTF-8 without lone surrogates"),
        ("a.jsonl", '{"text": "\xff"}', "{}:1 must be UTF-8 without lone surrogates"),
        ("a.parquet", "no table", "text ({}) must be a Parquet file: "),
        (
            "a.txt",
            "abc\xff",
            "text ({}) must be UTF-8 for a tokenizer: the byte at offset 3 is not",
        ),
        ("a.npy", "x", "text ({}) must be text: data.path names the whole folder that"),
        (
            "tokens-00000.npy",
            "x",
            "text ({}) must be beside tokens.json: halley tokenize has",
        ),
        *((f"a.txt{end}", "x", "text ({}) must be decompressed") for end in COMPRESSED),
    ],
)
def test_a_wrong_text_file_is_named(tmp_path: Path, name: str, content: str, told: str) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode("latin-1"))
    config = _config(path, tokenizer=str(write_tokenizer(tmp_path)))
    with pytest.raises(ValueError, match=f"^{re.escape(told.format(path))}") as caught:
        open_corpus(config)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"body": ["a"], "id": [1]}, "must have a column text, and has body, id"),
        ({"text": [1, 2]}, "must have strings in the column text, and has int64"),
    ],
)
def test_a_wrong_column_is_named(tmp_path: Path, columns: dict[str, list[object]], told: str):
    pa = pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), path)
    with pytest.raises(ValueError, match=re.escape(f"text ({path}) {told}")):
        open_corpus(_config(path))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "tokens.json",
            b"{}",
            "tokens ({}) must be as halley tokenize writes it: tokenizer_checksum is req",
        ),
        ("tokens.json", b"[", "tokens ({}) must be JSON: "),
        ("tokens-00000.npy", b"", "tokens ({}) must be a .npy file: EOF: "),
        (
            "tokens-00000.npy",
            b"abcdefghi",
            "tokens ({}) must be a .npy file: the magic string is n",
        ),
        (
            "tokens-00000.npy",
            b"\x93NUMPY\x01\x00\x0b\x00{'descr': (\n",
            "tokens ({}) must be a .npy file: ",
        ),
        ("tokens-00000.npy", None, "tokens ({}) must be a .npy file: No such file or directory"),
    ],
)
def test_damaged_token_files_are_named(
    tmp_path: Path, old: str, new: bytes | None, told: str
) -> None:
    folder = tmp_path / "tokens"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    write_tokens([np.array(TOKENS)], folder, tokenizer=tokenizer)
    (folder / old).unlink()
    if new is not None:
        (folder / old).write_bytes(new)
    with pytest.raises(ValueError, match=f"^{re.escape(told.format(folder / old))}"):
        open_corpus(_config(folder))


@pytest.mark.parametrize(
    "array", [np.arange(10), np.zeros(9, np.uint16), np.zeros((5, 2), np.uint16)]
)
def test_token_files_have_the_size_and_type_that_tokens_json_says(
    tmp_path: Path, array: np.ndarray
) -> None:
    folder = tmp_path / "tokens"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    write_tokens([np.array(TOKENS[:10])], folder, tokenizer=tokenizer)
    path = folder / "tokens-00000.npy"
    whole = path.read_bytes()
    np.save(path, array)
    rule = re.escape(f"tokens ({path}) must hold 10 tokens of uint16 or uint32, as tokens.json")
    with pytest.raises(ValueError, match=rule):
        open_corpus(_config(folder))
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rule):
        open_corpus(_config(folder))


def test_the_model_has_the_vocabulary_of_the_tokens(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, vocabulary={**VOCABULARY, "z": 299})
    text, tokens = write_documents(tmp_path / "text", ".jsonl"), tmp_path / "tokens"
    write_tokens([np.array(TOKENS)], tokens, tokenizer=load_tokenizer(tokenizer))
    for config, what in (
        (_config(text, tokenizer=str(tokenizer)), "data.tokenizer"),
        (_config(tokens), f"the tokens of {tokens}"),
    ):
        with pytest.raises(ValueError, match="vocab_size") as caught:
            open_corpus(config)
        told = f"model.vocab_size (256) must be at least 300, for {what}"
        assert str(caught.value) == told


def test_training_and_evaluation_have_one_tokenizer(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    text, tokens = write_documents(tmp_path / "text", ".jsonl"), tmp_path / "tokens"
    write_tokens([np.array(TOKENS)], tokens, tokenizer=load_tokenizer(tokenizer))
    both = _config(tokens, eval_path=str(text), tokenizer=str(tokenizer))
    training = open_corpus(both)
    corpus = open_eval_corpus(both, training, num_ranks=5)
    assert corpus is not None
    assert _tokens(corpus) == TOKENS[:10]
    rule = re.escape("windows of data.eval_path (5) must be at least one for each of 6 ranks")
    with pytest.raises(ValueError, match=f"^{rule}$"):
        open_eval_corpus(both, training, num_ranks=6)
    bytes_beside_tokens = _config(tokens, eval_path=str(text))
    with pytest.raises(ValueError, match=r"must have the tokenizer of data\.path: "):
        open_eval_corpus(bytes_beside_tokens, training, num_ranks=1)
    other = write_tokenizer(tmp_path, vocabulary={**VOCABULARY, "d": 5})
    rule = re.escape(f"({other}) must be the tokenizer that {tokens} was written with, or left out")
    with pytest.raises(ValueError, match=rule):
        open_corpus(_config(tokens, tokenizer=str(other)))


def test_too_much_text_to_parse_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A Parquet file is smaller than its text, and a JSON-lines file is larger."""
    monkeypatch.setattr("halley.train.data._MAX_TEXT_BYTES", 6000)
    tokenizer = str(write_tokenizer(tmp_path))
    path = write_documents(tmp_path / "text", ".parquet", ["a b c a b "] * 601)
    assert path.stat().st_size < 6000
    rule = f"text ({path}) must have at most 6000 bytes of text, with all files before it: "
    for name in ("", tokenizer):
        with pytest.raises(ValueError, match=re.escape(rule)):
            open_corpus(_config(path, tokenizer=name))
    lines = write_documents(tmp_path / "text", ".jsonl", ["a" * 100] * 20)  # the first file
    write_documents(tmp_path / "text", ".parquet", ["a b c a b "] * 401)
    for name in ("", tokenizer):
        with pytest.raises(ValueError, match=re.escape(rule)):
            open_corpus(_config(path.parent, tokenizer=name))
    write_documents(tmp_path / "text", ".jsonl", ["a" * 10] * 100)
    assert lines.stat().st_size + 401 * 10 > 6000
    for name, number in (("", 1099 + 1 + 4410), (tokenizer, 200 + 401 * 6)):
        assert open_corpus(_config(path.parent, tokenizer=name)).num_tokens == number
    write_documents(tmp_path / "plain", ".txt", ["abc"] * 2000)
    assert open_corpus(_config(tmp_path / "plain")).num_tokens == 7999  # this text is not parsed


def test_a_parquet_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Bytes that are no UTF-8, two columns of one name, and a page without a header."""
    pa, path = pytest.importorskip("pyarrow"), tmp_path / "a.parquet"
    write_table = pytest.importorskip("pyarrow.parquet").write_table

    def check() -> None:
        rule = re.escape(f"text ({path}) must be a Parquet file: ")
        with pytest.raises(ValueError, match=f"^{rule}"):
            open_corpus(_config(path))

    text = pa.array([b"\xff\xfe"]).view(pa.string())
    write_table(pa.table({"text": text}), path)
    check()
    write_table(pa.table([text, text], names=["text", "text"]), path)
    check()
    write_table(pa.table({"text": ["abc" * 1000]}), path, use_dictionary=False)
    damaged = bytearray(path.read_bytes())
    damaged[4:40] = b"\xff" * 36
    path.write_bytes(damaged)
    check()


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    """Its path is longer than systems allow, which fails for every user, unlike permissions."""
    (tmp_path / "a.txt").write_text("abc")
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(17):
        os.mkdir("d" * 250, dir_fd=folder)
        inner = os.open("d" * 250, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    rule = r"text \(.*d\) must be readable: File name too long"
    with pytest.raises(ValueError, match=f"^{rule}$"):
        open_corpus(_config(tmp_path))
    shutil.rmtree(tmp_path / ("d" * 250))


def test_tokenize_shows_the_number_of_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the first token beyond 100,000; the next line would come ten seconds later."""
    text = write_documents(tmp_path / "text", ".jsonl", ["a " * 30_000] * 8)
    tokenizer = str(write_tokenizer(tmp_path))
    assert main(["tokenize", str(text), str(tmp_path / "out"), "--tokenizer", tokenizer]) == 0
    assert capsys.readouterr().err == "halley: tokens (120004)\n"


@pytest.mark.parametrize("package", ["tokenizers", "pyarrow"])
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_documents(tmp_path / "text", ".parquet")
    tokenizer = write_tokenizer(tmp_path)
    config = _config(path, tokenizer=str(tokenizer) if package == "tokenizers" else "")
    monkeypatch.setattr("halley.core.validation.find_spec", lambda name: None)
    rule = rf"must have the package {package}: pip install '\.\[data\]' in a checkout of Halley$"
    with pytest.raises(ValueError, match=rule):
        open_corpus(config)
