"""Read the wrong inputs under ``data/``: one case per line, its last item is the expected message.

A text with a long repetition is stored in pieces: ``["a = ", ["[", 20000]]`` is ``a = `` and then
20,000 brackets. Words in braces, such as ``{folder}``, are filled in by the test.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


DATA = Path(__file__).parent / "data"


def read_cases(*names: str) -> list[tuple[Any, ...]]:
    """Return the cases of files ``data/<name>.jsonl``, in order."""
    lines = [line for name in names for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
    return [tuple(json.loads(line)) for line in lines]


def expand(text: str | list[Any]) -> str:
    """Return a text, which may be stored in pieces."""
    pieces = [text] if isinstance(text, str) else text
    return "".join(each if isinstance(each, str) else each[0] * each[1] for each in pieces)


def fill(text: str, words: Mapping[str, str]) -> str:
    """Return a text with each ``{word}`` replaced by its value."""
    for word, value in words.items():
        text = text.replace(f"{{{word}}}", value)
    return text
