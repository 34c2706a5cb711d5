"""Adapt Halley's docstrings to the API reference: an extension of Griffe, which parses them."""

import re
import textwrap
from typing import Any

import griffe


_CODE = re.compile(r"::\n\n((?: {4}.*\n?|\n)+)")
_NAMES = re.compile(r"^    (\w+(?:, \w+)+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def fence_code(text: str) -> str:
    """Return a docstring with fenced code blocks instead of indented ones after two colons."""

    def fence(match: re.Match[str]) -> str:
        return f":\n\n```python\n{textwrap.dedent(match[1]).strip()}\n```\n\n"

    return _CODE.sub(fence, text)


def split_names(text: str) -> str:
    """Return a docstring in which each entry of a section has one name.

    "width, height: in pixels" becomes two entries with the same text.
    """

    def split(match: re.Match[str]) -> str:
        return "\n".join(f"    {name}: {match[2]}" for name in match[1].split(", "))

    return _NAMES.sub(split, text)


def describe_fields(text: str, cls: griffe.Class) -> str:
    """Return the docstring of a dataclass with the comments behind its fields as attributes."""
    comments = {
        name: field.lines[-1].partition("  # ")[2]
        for name, field in cls.attributes.items()
        if field.lines
    }
    added = [
        f"    {name}: {comment}"
        for name, comment in comments.items()
        if comment and not re.search(rf"^    {name}: ", text, re.MULTILINE)
    ]
    if added and "\nAttributes:\n" not in text:
        added.insert(0, "\nAttributes:")
    return "\n".join([text.rstrip(), *added])


class Docstrings(griffe.Extension):
    """Changes docstrings before Griffe parses them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one object after its module is loaded."""
        if obj.docstring is None:
            return
        text = split_names(fence_code(obj.docstring.value))
        if isinstance(obj, griffe.Class) and "dataclass" in obj.labels:
            text = describe_fields(text, obj)
        obj.docstring.value = text
