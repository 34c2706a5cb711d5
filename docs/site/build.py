"""Build the documentation site in build/site, and fail on any warning.

The site generator wants all pages in one folder. The repository has Markdown files in two, and they
link to Python files. This script copies the Markdown files and pictures to build/pages, writes a
page for each example and each linked Python file, and rewrites the links. Then it runs Zensical.
"""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ROOT / "build" / "pages"

_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)[^)#\s]+")  # target of a link to a file
# The indent of a table row, or of the first line of another block, in a list item.
_IN_ITEM = re.compile(r"^  (?=\|)|(?<=\n\n)  (?=\S)", re.MULTILINE)


def place(path: Path) -> Path:
    """Return the path in the site of a file of the repository."""
    if path == ROOT / "README.md":
        return Path("index.md")
    if path.suffix == ".py":
        return Path("source", path.relative_to(ROOT)).with_suffix(".md")
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT)


def adapt(text: str, source: Path) -> tuple[str, set[Path]]:
    """Return the text of a Markdown file for the site, and the files that it links to.

    Raises:
        ValueError: a link names a file that does not exist or has no page.
    """
    linked = set()

    def rewrite(match: re.Match[str]) -> str:
        target = (source.parent / match[0]).resolve()
        if not target.is_file() or target.suffix not in (".md", ".py", ".png", ".svg"):
            raise ValueError(f"{source.relative_to(ROOT)}: no page for the link {match[0]}")
        linked.add(target)
        return "../" * (len(place(source).parts) - 1) + place(target).as_posix()

    parts = _CODE.split(text)  # code is at odd indices
    # GitHub wants two spaces before a block in a list item, Python-Markdown four.
    parts[::2] = [_LINK.sub(rewrite, _IN_ITEM.sub("    ", part)) for part in parts[::2]]
    return "".join(parts), linked


def show_source(path: Path) -> str:
    """Return a page with the source of a Python file, under the first line of its docstring."""
    source = path.read_text(encoding="utf-8")
    first = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return f"# {path.relative_to(ROOT)}\n\n{first}\n\n```python\n{source}```\n"


def find_undocumented() -> set[str]:
    """Return the names in ``halley.__all__`` that no page of docs/api describes."""
    source = (ROOT / "halley" / "__init__.py").read_text(encoding="utf-8")
    exported = re.search(r"^__all__ = (\[.*?\])", source, re.DOTALL | re.MULTILINE)
    assert exported is not None
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.glob("api/*.md"))
    described = re.findall(r"^::: halley\.(\w+)$", pages, re.MULTILINE)
    return {*ast.literal_eval(exported[1])} - {*described, "__version__"}


def write_pages() -> None:
    """Write all pages anew.

    Raises:
        ValueError: a link of a page is wrong, or mkdocs.yml does not list a page.
    """
    shutil.rmtree(PAGES, ignore_errors=True)
    texts, sources = {}, set(ROOT.glob("examples/*.py"))
    for path in (*ROOT.glob("*.md"), *DOCS.rglob("*.md")):
        texts[path], linked = adapt(path.read_text(encoding="utf-8"), path)
        sources |= {target for target in linked if target.suffix == ".py"}
    listed = set((ROOT / "mkdocs.yml").read_text(encoding="utf-8").split())
    if unlisted := [str(path) for path in map(place, texts) if str(path) not in listed]:
        raise ValueError(f"mkdocs.yml does not list {', '.join(sorted(unlisted))}")
    texts |= {path: show_source(path) for path in sources}
    for path, text in texts.items():
        page = PAGES / place(path)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    shutil.copy(DOCS / "site" / "site.css", PAGES)
    shutil.copytree(DOCS / "figures", PAGES / "figures", ignore=shutil.ignore_patterns("*.py"))


def main() -> None:
    """Build the site; exit with an error message if anything is wrong with a page."""
    if missing := find_undocumented():
        sys.exit(f"no page of docs/api describes {', '.join(sorted(missing))}")
    try:
        write_pages()
    except ValueError as error:
        sys.exit(str(error))
    # Zensical is next to this interpreter, whose environment need not be active.
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    output = built.stdout + built.stderr
    sys.stdout.write(output)
    # The option --strict does not count the warnings of Griffe, which parses the docstrings.
    if built.returncode or "griffe: " in output:
        sys.exit("the site has warnings")


if __name__ == "__main__":
    main()
