"""The layout of `--help`: option names in one column, their texts in the next, without truncation.

A command with more than MOST options lists the common ones with `--help`, and all of them with `--help-all`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

NAMES = 26  # width of an option and its metavar; a longer one has its own line, above its text
SETTINGS = {"max_content_width": 100}  # on a wide terminal
MOST = 32
HELP_ALL = "--help-all"


def show_all(ctx: typer.Context, wanted: bool) -> None:
    """Print the help of a command with all options, and exit."""
    if wanted:
        ctx.meta[HELP_ALL] = True
        typer.echo(ctx.get_help(), color=ctx.color)
        raise typer.Exit


class Verb(TyperCommand):
    """A command with its options under the titles of their panels."""

    @property
    def advanced(self) -> frozenset[str]:
        """The names of options that only ``--help-all`` lists."""
        found: frozenset[str] = getattr(self.callback, "advanced", frozenset())
        return found

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception:  # of click, of which some versions of typer have their own copy
            if self.advanced:
                ctx.help_option_names = [HELP_ALL, "--help"]  # which messages name
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        left_out = frozenset() if ctx.meta.get(HELP_ALL) else self.advanced
        parameters: list[Any] = list(self.get_params(ctx))
        panels: dict[str, list[tuple[str, str]]] = {}
        for each in parameters:
            record = each.get_help_record(ctx)
            if each.param_type_name == "argument":
                panels.setdefault("Arguments", []).append((each.metavar, each.help or ""))
            elif record is not None and each.name not in left_out:  # None for hidden options
                panels.setdefault(each.rich_help_panel or "Options", []).append(record)
        for title, rows in panels.items():
            _write(formatter, title, rows)


class CommandGroup(TyperGroup):
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
