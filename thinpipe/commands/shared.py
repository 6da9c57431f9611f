"""From declared options to a command: its parameters for typer follow from dataclasses, see thinpipe/options.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer

from thinpipe.options import Option, flag, flags_in_errors, named, options_of

Command = TypeVar("Command", bound=Callable[..., None])


def takes(*kinds: type, panels: Sequence[str]) -> Callable[[Command], Command]:
    """Give a command ``def verb(**given)`` the options of these dataclasses, in the order of the panels.

    It is called with all of them, by the names users know; what was not given is None. ``options.read`` makes fields of
    them.
    """
    told = [each for kind in kinds for each in options_of(kind).values()]
    told.sort(key=lambda each: (panels.index(each.panel), each.last))
    parameters = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(each))
        for each in told
    ]

    def decorate(command: Command) -> Command:
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _annotation(told: Option) -> Any:
    usual = "" if told.usual is None or isinstance(told.usual, bool) else str(told.usual)
    shown = usual if told.shown is None else told.shown
    with flags_in_errors():
        help_, shown = named(told.help), named(shown)
    name = flag(told.name)
    return Annotated[
        told.kind | None,
        typer.Option(
            f"{name}/--no-{name.removeprefix('--')}" if told.negative else name,
            help=help_,
            rich_help_panel=told.panel,
            metavar=told.metavar,
            show_default=shown or False,
        ),
    ]
