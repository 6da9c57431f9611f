"""Terminal functions that all commands share: declared options, one-line errors, a progress bar, output files."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from thinpipe.cli.help import HELP_ALL, MOST, show_all
from thinpipe.comm.errors import Terminated, ended_by
from thinpipe.lab.records import report
from thinpipe.lab.records.plot import Plot
from thinpipe.lab.records.record import Record
from thinpipe.options import (
    Option,
    OptionError,
    aliases_in_errors,
    as_typed,
    flag,
    flags_in_errors,
    named,
    option,
    options_of,
    without_aliases,
)
from thinpipe.system.files import OutputError, check_writable, write_output
from thinpipe.system.sanitize import printable

Command = Callable[..., None]
RESULTS = "Output"  # the help panel of output files


def takes(
    *kinds: type | Sequence[Option],
    panels: Sequence[str],
    but: Sequence[str] = (),
    titles: Mapping[str, str] | None = None,
) -> Callable[[Command], Command]:
    """Give a command ``def verb(..., **given)`` the options of these dataclasses, in the order of the panels.

    The command is called with all of them by name; an option that was not given is None. ``options.read`` makes fields
    of them. ``kinds``: a dataclass, or options of one. ``but``: options that this command lacks. ``titles``: other
    titles of panels.
    """
    groups = [options_of(kind).values() if isinstance(kind, type) else kind for kind in kinds]
    options = [each for group in groups for each in group if each.name not in but]
    options.sort(key=lambda each: (panels.index(each.panel), each.at_end))
    options = [replace(each, panel=(titles or {}).get(each.panel, each.panel)) for each in options]
    renamed = {each.old_name: each.name for each in options if each.old_name}
    aliases = {alias: each.name for each in options for alias in each.aliases}
    parameters = [_parameter(each.name, each) for each in options]
    parameters += [_parameter(each.old_name, each, hidden=True) for each in options if each.old_name]
    # Hidden, and named in the help text instead: in the help's first column they would make all texts narrower.
    parameters += [_parameter(alias, each, hidden=True) for each in options for alias in each.aliases]
    advanced = frozenset(each.name for each in options if each.advanced and len(options) > MOST)
    if advanced:
        parameters.append(_help_all())

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(**given: Any) -> None:
            given.pop("help_all", None)
            given = _by_new_names(given, renamed)
            with one_line_errors():
                chosen = {name: value for name, value in given.items() if value not in (None, [])}
                chosen, typed = without_aliases(aliases, chosen)
            with _signal_reported(), aliases_in_errors(typed):
                command(**{name: chosen.get(name, given[name]) for name in given if name not in aliases})

        own = inspect.signature(command, eval_str=True).parameters.values()
        arguments = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        run.__signature__ = inspect.Signature([*arguments, *parameters])  # type: ignore[attr-defined]
        run.advanced = advanced  # type: ignore[attr-defined]
        return run

    return decorate


def _parameter(name: str, declared: Option, hidden: bool = False) -> inspect.Parameter:
    value, text = declared.default_value, declared.default_text
    if text is None:
        text = "" if value is None or isinstance(value, bool) else as_typed(value)
    with flags_in_errors():
        also = f" Also {', '.join(map(flag, declared.aliases))}." if declared.aliases else ""
        help_, shown = named(declared.help) + also, named(text)
    described = typer.Option(
        f"{flag(name)}/{flag('no_' + name)}" if declared.negative else flag(name),
        help=f"{help_} [default: {shown}]" if shown else help_,
        rich_help_panel=declared.panel,
        metavar=declared.metavar,
        show_default=False,
        hidden=hidden,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[declared.kind | None, described]
    )


def _help_all() -> inspect.Parameter:
    described = typer.Option(HELP_ALL, help="List all options and exit.", is_eager=True, callback=show_all)
    return inspect.Parameter(
        "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, described]
    )


def _by_new_names(given: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return options given under an old name under the new one, with a line on stderr."""
    result = {name: value for name, value in given.items() if name not in renamed}
    for old, new in renamed.items():
        if given[old] not in (None, []):
            typer.echo(f"thinpipe: {flag(old)} is called {flag(new)} now", err=True)
            result[new] = given[old]
    return result


@contextmanager
def _signal_reported() -> Iterator[None]:
    """Report the signal that ended a command and its workers, and exit with its code."""
    try:
        yield
    except Terminated as error:
        code = error.code
    except KeyboardInterrupt as error:
        code = 128 + getattr(error, "number", signal.SIGINT)
    else:
        return
    typer.echo(f"thinpipe: {ended_by(code - 128)}", err=True)
    raise SystemExit(code)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a ValueError about user input into one line on stderr and exit code 2.

    Only input checks belong inside: a ValueError of the work itself is a bug and keeps its traceback.
    """
    with flags_in_errors():
        try:
            yield
        except ValueError as error:
            typer.echo(f"thinpipe: {printable(str(error))}", err=True)
            raise typer.Exit(2) from None


def progress_bar() -> Progress:
    """Return a bar on stderr that disappears when done; disabled if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def duration(seconds: float) -> str:
    """Return seconds as ``1:05`` or ``2:03:04``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The output files of a command."""

    json: Path | None = option(
        "File for the record; `thinpipe diff` compares two.", panel=RESULTS, metavar="FILE", default=None
    )
    markdown: Path | None = option("File for the tables in Markdown.", panel=RESULTS, metavar="FILE", default=None)
    plot: Path | None = option("File for a plot of the results.", panel=RESULTS, metavar="FILE.png", default=None)

    def check(self) -> None:
        """Raise ValueError for a file that cannot be written: before a long run, not after it."""
        if self.plot is not None and self.plot.suffix.lower() != ".png":
            raise OptionError(f"{{plot}} writes PNG: name a file that ends in .png, not {self.plot}")
        for path in (self.json, self.markdown, self.plot):
            if path is not None:
                check_writable(path)

    def save(self, record: Record, tables: Sequence[report.Table], title: str, plot: Plot | None = None) -> None:
        """Write the output files and report each on stderr; exit with code 1 if a write fails.

        If the record cannot be written, it is printed on stdout, so that a long run is not lost: all else follows from
        it.
        """
        writes: list[Callable[[], None]] = []
        if self.json is not None:
            writes.append(partial(record.write_or_print, self.json))
        if self.markdown is not None:
            page = report.markdown(title, record, tables)
            writes.append(partial(write_output, self.markdown, lambda temporary: temporary.write_text(page)))
        if self.plot is not None and plot is not None:
            writes.append(partial(write_output, self.plot, plot.draw))
        lost = []
        for write in writes:
            try:
                write()
            except OutputError as error:
                lost.append(str(error))
        if lost:
            typer.echo(f"thinpipe: {'; '.join(lost)}", err=True)
            raise typer.Exit(1)
