"""The pages: links resolve, commands have valid options, the module tree is up to date, the length has a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import module_tree
from tests.documents import PAGES, ROOT, anchors, commands, links
from thinpipe.cli.app import VERBS, load
from thinpipe.codecs.recipes import RECIPES
from thinpipe.codecs.spec import FAMILIES
from thinpipe.train.tasks.tasks import TASKS


def check_options(arguments: list[str]) -> None:
    """Raise unless the command line accepts these arguments: verbs and options exist, values have their types."""
    count = 2 if arguments[0] == "bench" else 1
    load(" ".join(arguments[:count])).make_context("thinpipe", arguments[count:])


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_listed_with_the_first_line_of_its_help(verb: str) -> None:
    assert load(verb).help.startswith(VERBS[verb][1] + "\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), link
        if anchor:
            assert anchor in anchors(path), link


def verb_commands(page: Path) -> list[list[str]]:
    """Return the arguments of thinpipe in a page's commands, also through ``-m thinpipe``."""
    found = [line[line.index("thinpipe") + 1 :] for line in commands(page) if "thinpipe" in line]
    return [[each for each in line if each not in ("&", "...")] for line in found]


def test_the_pages_have_commands() -> None:
    assert sum(len(verb_commands(page)) for page in PAGES) > 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_options_that_exist(page: Path) -> None:
    for arguments in verb_commands(page):
        check_options(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("train --compres 8bit", "No such option"), ("train --epochs ten", "valid integer"), ("trian", "trian")],
)
def test_the_check_rejects_unknown_options(arguments: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        check_options(arguments.split())


def test_the_tree_of_modules_is_fresh() -> None:
    page = module_tree.PAGE.read_text()
    assert page == module_tree.with_tree(page), "run `python -m tests.module_tree`"


@pytest.mark.parametrize(
    ("page", "names"),
    [("codec-reference.md", FAMILIES), ("few-bits.md", RECIPES), ("tasks.md", TASKS)],
    ids=lambda x: str(x)[:9],
)
def test_the_page_names_all_of_them(page: str, names: dict[str, object]) -> None:
    text = (ROOT / "docs" / page).read_text()
    for name in names:
        assert f"`{name}" in text, name


def test_readme_and_docs_stay_short() -> None:
    readme, docs = ROOT / "README.md", (ROOT / "docs").glob("*.md")
    assert len(readme.read_text().splitlines()) <= 150
    generated = len("\n".join(module_tree.tree(ROOT / "thinpipe")).split())  # one line a module, in one of the pages
    assert sum(len(page.read_text().split()) for page in (readme, *docs)) - generated <= 18_650
