"""The layout of `--help`: option names in one column, their texts in the next, without truncation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

NAMES = 26  # width of an option and its metavar; a longer one has its own line, above its text
SETTINGS = {"max_content_width": 100}  # on a wide terminal


class Verb(TyperCommand):
    """A command with its options under the titles of their panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parameters: list[Any] = list(self.get_params(ctx))
        panels: dict[str, list[tuple[str, str]]] = {}
        for each in parameters:
            record = each.get_help_record(ctx)
            if each.param_type_name == "argument":
                panels.setdefault("Arguments", []).append((each.metavar, each.help or ""))
            elif record is not None:  # None for hidden options
                panels.setdefault(each.rich_help_panel or "Options", []).append(record)
        for title, rows in panels.items():
            _write(formatter, title, rows)


class Group(TyperGroup):
    """A group of commands."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write(formatter, "Commands", [(name, self.commands[name].help or "") for name in self.list_commands(ctx)])
        records = [each.get_help_record(ctx) for each in self.get_params(ctx)]
        _write(formatter, "Options", [each for each in records if each is not None])


def _write(formatter: Any, title: str, rows: Iterable[tuple[str, str]]) -> None:
    margin = " " * (NAMES + 4)
    with formatter.section(title):
        for name, text in rows:
            first = f"  {name}".ljust(len(margin))
            if len(name) > NAMES:
                formatter.write(f"{first}\n")
                first = margin
            # Names of options contain hyphens.
            lines = textwrap.wrap(text, formatter.width - len(margin), break_on_hyphens=False)
            formatter.write(first + f"\n{margin}".join(lines) + "\n")
