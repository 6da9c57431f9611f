"""Writes the tree of modules into docs/architecture.md, one line each, from the first sentence of every module.

A sentence is cut at its colon, semicolon or comma where enough words stand before it: the rest is in the module.
Packages within packages are named alone: whoever reads what is in one starts at its head.

python -m tests.module_tree
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- module tree: written by `python -m tests.module_tree` -->"
END = "<!-- end of the module tree -->"


def summary(path: Path) -> str:
    """Return the first sentence of a module's docstring on one line, without its full stop."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    if not text:
        raise ValueError(f"{path.relative_to(ROOT)}: every module opens with a sentence that says what it is for")
    paragraph = " ".join(text.split("\n\n")[0].split()).replace("``", "`")
    sentence = re.split(r"(?<!\.)\.(?=\s|$)", paragraph, maxsplit=1)[0]  # three dots end no sentence
    for marks, least in ((r"[:;] ", 3), (r", ", 5)):
        start = re.split(marks, sentence, maxsplit=1)[0]
        if len(start.split()) >= least and start.count("(") == start.count(")"):
            sentence = start
    return sentence


def tree(package: Path) -> list[str]:
    """A package and what is in it: modules first, then packages, each by name."""
    return [f"{package.name}/  {summary(package / '__init__.py')}", *_inside(package)]


def _inside(package: Path) -> list[str]:
    modules = sorted(path for path in package.glob("*.py") if path.name != "__init__.py")
    width = max((len(path.name) for path in modules), default=0)
    lines = [f"  {path.name:{width}}  {summary(path)}" for path in modules]
    for inner in sorted(path.parent for path in package.glob("*/__init__.py")):
        lines += [f"  {line}" for line in (tree(inner) if package == ROOT / "thinpipe" else tree(inner)[:1])]
    return lines


def with_tree(page: str) -> str:
    """The page with the tree as it is now between the two markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has no place for the tree: it needs the lines {BEGIN!r} and {END!r}")
    block = "\n".join(tree(ROOT / "thinpipe"))
    return f"{before}{BEGIN}\n```\n{block}\n```\n{END}{after}"


def main() -> None:
    PAGE.write_text(with_tree(PAGE.read_text()))


if __name__ == "__main__":
    main()
