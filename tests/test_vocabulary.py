"""The vocabulary of source, tests and pages: docstrings state what their object does, in the field's terms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import PAGES, ROOT

SOURCES = sorted(path for folder in ("thinpipe", "tests", "examples") for path in (ROOT / folder).rglob("*.py"))
# Words of an earlier private dialect, in prose and as parts of identifiers.
PRIVATE = re.compile(
    r"(?<![a-z])(so[ _]many|hollow|rehearse|lessons?|suspicion|is_effect|take_clients_word|kept_for|take_back"
    r"|call_off|refuse_others|settle_again|nobody|whoever)(?![a-z])",
    re.IGNORECASE,
)


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield text


@pytest.mark.parametrize("folder", ["thinpipe", "tests", "examples"])
def test_docstrings_do_not_begin_with_a_clause(folder: str) -> None:
    texts = ((path, text) for path in SOURCES if path.is_relative_to(ROOT / folder) for text in docstrings(path))
    found = [f"{path.relative_to(ROOT)}: {text[:60]}" for path, text in texts if re.match(r"(What|Of|Whether)\b", text)]
    assert found == []


def test_source_and_pages_have_the_fields_terms() -> None:
    sources = [path for path in SOURCES if path.is_relative_to(ROOT / "thinpipe")]
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    found = {str(path.relative_to(ROOT)): PRIVATE.findall(path.read_text()) for path in (*sources, *pages)}
    assert {path: words for path, words in found.items() if words} == {}
