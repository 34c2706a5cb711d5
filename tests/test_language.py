"""Check that code and documents use the terms of the field, in short and plain sentences."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
CODE = sorted(
    path
    for folder in ("halley", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
)
# The log is history: it names things as they were called when an experiment ran.
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")} - {ROOT / "docs" / "LOG.md"})

MAX_FIRST_LINE = 100
MAX_WORDS = 40
SHARED_BASENAMES = {"__init__.py", "__main__.py", "config.py", "op.py"}

# Patterns of words in identifiers that have a standard term, and that term.
IDENTIFIERS = {
    "products?": "gemm",
    "multiprocessors?": "sm",
    "council": "consensus",
    "shadows?": "recompute",
    "tapes?": "recording or replay",
    "mailbox": "flags and routing buffer",
    "knobs?": "config",
    "home": "source rank or combine buffer",
    "stage": "send buffer",
    "staged": "published",
    "sends": "token copies",
    "room": "capacity",
    "rooms": "packages",
    "floor": "lower bound",
    "floors": "layers",
    "guests?": "third-party module",
    "neighbours?": "tensor-parallel group",
    "borders?": "fusion boundary",
    "ties": "control dependencies",
    "turns?": "ordering token",
    "gathered": "all_gather",
}
# Identifiers in which such a word means something else, or a name that users already have.
ALLOWED_IDENTIFIERS = {
    "floor_us",  # key of committed results
    "floor",  # math.floor
    "knobs",  # triton.knobs
    "product",  # itertools.product
    "home",  # pathlib.Path.home
    "stage",  # of DeepSpeed's ZeRO
    "ScaledDotProductAttention",
}
# Phrases of sentences, and the wording to use.
PHRASES = {
    r"products?\b(?<!dot product)(?<!outer product)": "GEMM",
    r"multiprocessors?": "SM",
    r"councils?": "consensus across ranks",
    r"shadows?": "a plain description",
    r"mailbox(es)?": "flags and routing buffer",
    r"tapes?": "launch recording",
    r"knobs?": "kernel configuration",
    r"(at|go|goes|sent|send|sends|bring|brings|way|come|comes) home": "to the source rank",
    r"guests?": "third-party module",
    r"neighbours?": "tensor-parallel group",
    r"hand(s|ed)? over": "gradient-ready hook",
    r"takes? turns": "in order",
    r"whoever|that which": "a noun",
    r"what (none|is left|was left|stands|they|it) (took|takes|take|stands)?": "a noun",
}
ALLOWED_PHRASES = re.compile(r"itertools\.product|triton\.knobs|knobs\.runtime|dot products?")
_FIRST_WORDS = ("What", "Whoever", "Who", "Where", "Which", "That")


def find_words(source: str) -> list[str]:
    """Return identifiers of Python source that contain a word of ``IDENTIFIERS``, and its term."""
    names = {
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.NAME and token.string not in ALLOWED_IDENTIFIERS
    }
    found = []
    for name in sorted(names):
        if "scaled_dot_product" in name:
            continue
        words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_")
        for word in words:
            terms = (term for pattern, term in IDENTIFIERS.items() if re.fullmatch(pattern, word))
            found += [f"{name}: say {term}" for term in terms]
    return found


def read_prose(source: str) -> str:
    """Return the comments and docstrings of Python source."""
    comments = [
        token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    return "\n".join([*comments, *_docstrings(source)])


def find_phrases(prose: str) -> list[str]:
    """Return phrases of ``PHRASES`` in prose, each with its wording."""
    prose = ALLOWED_PHRASES.sub("", prose)
    return [
        f"{match.group()!r}: say {wording}"
        for pattern, wording in PHRASES.items()
        for match in re.finditer(rf"\b({pattern})(?!\w)", prose, re.IGNORECASE)
    ]


def find_first_lines(source: str) -> list[str]:
    """Return first lines of docstrings that are too long or do not begin with a noun or verb."""
    firsts = [text.strip().partition("\n")[0] for text in _docstrings(source)]
    return [
        line
        for line in firsts
        if len(line) > MAX_FIRST_LINE or line.partition(" ")[0] in _FIRST_WORDS
    ]


def find_long_sentences(document: str) -> list[str]:
    """Return sentences of Markdown prose with more than ``MAX_WORDS`` words."""
    text = re.sub(r"```.*?```", "\n\n", document, flags=re.DOTALL)
    text = re.sub(r"^(    |\t| *\|).*$", "\n", text, flags=re.MULTILINE)  # code and tables
    text = re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^#.*$", "\n\n", text, flags=re.MULTILINE)
    sentences = [
        sentence
        for paragraph in re.split(r"\n\s*\n", text)
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))
    ]
    return [sentence for sentence in sentences if len(sentence.split()) > MAX_WORDS]


def _docstrings(source: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_file = pytest.mark.parametrize("path", CODE, ids=_name)
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=_name)


@each_file
def test_code_uses_terms_of_the_field_and_plain_sentences(path: Path) -> None:
    source = path.read_text()
    assert find_words(source) == []
    if path != Path(__file__):  # this file lists the phrases
        assert find_phrases(read_prose(source)) == []
        assert find_first_lines(source) == []


@each_document
def test_documents_are_plain(path: Path) -> None:
    document = path.read_text()
    if path.name != "GLOSSARY.md":  # it names the words that Halley does not use
        assert find_phrases(document) == []
    assert find_long_sentences(document) == []


def test_no_two_files_share_a_basename() -> None:
    names = Counter(path.name for path in (ROOT / "halley").rglob("*.py"))
    repeated = {name for name, count in names.items() if count > 1}
    assert repeated - SHARED_BASENAMES == set()


def test_word_in_an_identifier_is_found() -> None:
    source = "from itertools import product\nnum_sends = product(HomeTokens)\n"
    assert find_words(source) == [
        "HomeTokens: say source rank or combine buffer",
        "num_sends: say token copies",
    ]


def test_phrase_is_found_in_comments_and_docstrings_only() -> None:
    source = '"""A council decides."""\nname = "mailbox"  # sums go home\n'
    assert find_phrases(read_prose(source)) == [
        "'council': say consensus across ranks",
        "'go home': say to the source rank",
    ]
    assert find_phrases("a dot product, and itertools.product") == []


def test_first_line_of_a_docstring_is_checked() -> None:
    source = f'"""What none took."""\ndef f():\n    """{"x" * 101}"""\n'
    assert find_first_lines(source) == ["What none took.", "x" * 101]
    assert find_first_lines('"""Schedule GEMMs under all-to-alls."""') == []


def test_long_sentence_is_found_outside_of_code_and_tables() -> None:
    long = " ".join(["word"] * 41)
    assert find_long_sentences(f"Short. {long}.") == [f"{long}."]
    assert find_long_sentences(f"    {long}\n\n| {long} |\n\n```\n{long}\n```\n") == []
    half = " ".join(["word"] * 30)
    assert find_long_sentences(f"- {half}\n- {half}\n") == []
