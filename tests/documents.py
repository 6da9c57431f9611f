"""Markdown pages: their fenced code blocks, the commands in them, their links, headings and tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(RECORDS.rglob("README.md")),
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    language: str  # "" if none is named
    text: str


@dataclass(frozen=True)
class Table:
    """A table, and the paragraph before it."""

    heads: list[str]
    rows: list[list[str]]
    before: str


def tables(page: Path) -> list[Table]:
    paragraphs = _FENCE.sub("", page.read_text()).split("\n\n")
    found = []
    for number, paragraph in enumerate(paragraphs):
        if paragraph.lstrip("\n").startswith("|"):
            lines = [[cell.strip() for cell in line[1:-1].split(" |")] for line in paragraph.strip().splitlines()]
            found.append(Table(lines[0], lines[2:], paragraphs[number - 1] if number else ""))
    return found


def blocks(page: Path) -> list[Block]:
    return [Block(language, text) for language, text in _FENCE.findall(page.read_text())]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the command lines of a page's blocks, split by the shell's rules, without comments."""
    for block in blocks(page):
        if block.language in ("", "bash"):
            for line in block.text.replace("\\\n", " ").splitlines():
                if re.match(r"\s*(thinpipe|torchrun|make|python)\s", line):
                    yield shlex.split(line, comments=True)


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and pictures, outside of code."""
    prose = _FENCE.sub("", page.read_text())
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
