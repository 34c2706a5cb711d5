"""The token that ends a document, names of special tokens in text, and wrong tokenizer files."""

import re
from pathlib import Path

import pytest

from halley.train.tokenizer import load_tokenizer
from tests.train.tokenizer_case import write_tokenizer


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "BPE"}}', "\0"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    rule = "must be a tokenizer.json of the library tokenizers: "
    with pytest.raises(ValueError, match=f"^{re.escape(f'tokenizer ({path}) {rule}')}.+$"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("added", "want"),
    [
        ([("</s>", False), ("<eos>", True)], "<eos>"),  # Gemma: "</s>" is a tag of HTML
        ([("</s>", True)], "</s>"),
        ([("<|endoftext|>", False), ("</s>", True)], "</s>"),  # a special token goes first
        ([("<|endoftext|>", False)], "<|endoftext|>"),
        ([("<end>", True)], None),
    ],
)
def test_the_end_of_text_token_is_a_special_one(
    tmp_path: Path, added: list[tuple[str, bool]], want: str | None
) -> None:
    path = write_tokenizer(tmp_path, vocabulary={"<unk>": 0, "a": 1}, added=added)
    assert load_tokenizer(path).end_of_text == want


def test_the_name_of_a_special_token_in_a_text_is_text(tmp_path: Path) -> None:
    """Else a document that mentions the end-of-text token would end there."""
    path = write_tokenizer(
        tmp_path, vocabulary={"<unk>": 0, "a": 1}, added=[("</s>", True), ("<h1>", False)]
    )
    (tokens,) = load_tokenizer(path).encode(iter([("a </s> a</s> <h1> a", True)]))
    assert tokens.tolist() == [1, 0, 0, 3, 1, 2]
