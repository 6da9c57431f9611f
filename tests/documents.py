"""Reads Markdown pages: their fenced code blocks, the commands in them, their links and headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/*.md")]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    language: str  # "" if none is named
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(language, text) for language, text in _FENCE.findall(page.read_text())]


def commands(page: Path) -> Iterator[list[str]]:
    """The command lines of a page's blocks, as words: continued lines joined, comments left out."""
    for block in blocks(page):
        if block.language in ("", "bash"):
            for line in block.text.replace("\\\n", " ").splitlines():
                if re.match(r"\s*(thinpipe|torchrun|make|python)\s", line):
                    yield shlex.split(line, comments=True)


def links(page: Path) -> list[str]:
    """What a page links to or shows, outside of code."""
    prose = _FENCE.sub("", page.read_text())
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def anchors(page: Path) -> set[str]:
    """The anchors that headings have where Markdown is shown."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
