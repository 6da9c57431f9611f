"""Declarations of options: help text, validation rule and parser are metadata of the fields of a frozen dataclass.

The command line, its help, validation, the keys of an ablation plan and what may change on resume derive from it::

    @dataclass(frozen=True, kw_only=True)
    class Settings:
        lr: float = option("Highest learning rate.", rule=above(0, 1e6))

        def __post_init__(self) -> None:
            check(self)  # Settings(lr=0): lr is above 0 and at most 1e+06; got 0

``from_facts`` reads such a dataclass back from JSON.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_MARKED = re.compile(r"\{([a-z][a-z_]*)\}")
_flags = [False]  # a stack: True if names are shown as flags; the last entry applies
_typed: dict[str, str] = {}  # option -> the alias that the user typed for it
_T = TypeVar("_T")


class OptionError(ValueError):
    """An invalid option or combination of options. Option names are marked in its text, ``{lr}``: see ``named``."""

    def __str__(self) -> str:
        return named(str(self.args[0]))


def named(text: str) -> str:
    """Replace ``{batch_size}`` by the caller's form: ``batch_size`` in Python, ``--batch-size`` on the command line."""
    return _MARKED.sub(lambda marked: (flag if _flags[-1] else _keyword)(_typed.get(marked[1], marked[1])), text)


def flag(name: str) -> str:
    return "--" + name.rstrip("_").replace("_", "-")  # from_ is the option --from


def _keyword(name: str) -> str:
    return f"{name.removeprefix('no_')}=False" if name.startswith("no_") else name


@contextmanager
def flags_in_errors() -> Iterator[None]:
    """Show option names in errors as flags: used by the command line and the workers it starts."""
    _flags.append(True)
    try:
        yield
    finally:
        _flags.pop()


@contextmanager
def aliases_in_errors(typed: Mapping[str, str]) -> Iterator[None]:
    """Show an option in errors by the alias that the user typed: ``typed`` maps names to aliases."""
    before = dict(_typed)
    _typed.update(typed)
    try:
        yield
    finally:
        _typed.clear()
        _typed.update(before)


@dataclass(frozen=True)
class Rule:
    """The valid values of an option: a predicate, and its description, which follows "is" in errors."""

    text: str
    holds: Callable[[Any], bool]


def between(least: float, most: float) -> Rule:
    return Rule(f"from {least} to {most}", lambda value: least <= value <= most)


def above(least: float, most: float) -> Rule:
    return Rule(f"above {least:g} and at most {most:g}", lambda value: least < value <= most)


def below(most: float, *, least: float = 0, most_text: str = "") -> Rule:
    return Rule(f"from {least} to below {most_text or most}", lambda value: least <= value < most)


@dataclass(frozen=True, kw_only=True)
class Option:
    """The metadata of an option, in addition to the type and the default of its field."""

    help: str
    panel: str = ""  # of the help
    metavar: str | None = None
    rule: Rule | None = None
    default_value: Any = None  # the default, unless the user or the task sets another value
    default_text: str | None = None  # text of the default in the help, if not that of ``default_value``
    advanced: bool = False  # True: --help of a long command leaves it to --help-all
    movable: bool = False  # True if it may change when a run is resumed
    # True if the value may differ between workers: a path, or a property of the machine. "presence": a path that may
    # differ, but has to be given on all workers or on none.
    per_machine: bool | Literal["presence"] = False
    training_only: bool = False  # True: an option of a model that `evaluate` does not have
    evaluates: bool = False  # True: `evaluate` has this option of a run, too
    # An evaluation of a saved run keeps the value: "always", or with the same parallelism only.
    kept: Literal["", "always", "same parallel"] = ""
    kind: Any = None  # type that the command line parses, if not the field's type
    parse: Callable[[Any], Any] | None = None  # from that type to the field's value; raises OptionError
    name: str = ""  # name for users, if not the field's name
    negative: bool = False  # a switch that also has --no-NAME
    at_end: bool = False  # listed at the end of its panel
    old_name: str = ""  # an older name, which the command line still accepts
    aliases: tuple[str, ...] = ()  # other names that the command line and plans accept
    synonyms: Mapping[str, str] = field(default_factory=dict)  # alternative values -> the values that they mean


def option(help: str, *, default: Any = MISSING, **facts: Any) -> Any:
    """Return a dataclass field that declares an option."""
    usual = {} if default in (MISSING, None) else {"default_value": default}
    return field(default=default, metadata={"option": Option(help=help, **{**usual, **facts})})


def like(kind: type, name: str, *, default: Any = MISSING, **facts: Any) -> Any:
    """Return a field that reuses an option of another dataclass; ``facts`` override its metadata."""
    usual = {} if default is MISSING else {"default_value": default}
    return field(default=default, metadata={"option": replace(options_of(kind)[name], **{**usual, **facts})})


@cache
def options_of(kind: type) -> dict[str, Option]:
    """Return the options of a dataclass by field name; the rule of a Literal is its choices."""
    hints, found = get_type_hints(kind), {}
    for each in fields(kind):
        if "option" in each.metadata:
            declared: Option = each.metadata["option"]
            hint = _without_none(hints[each.name])
            choices = get_args(hint) if get_origin(hint) is Literal else ()
            rule = Rule(", ".join(choices), choices.__contains__) if choices else declared.rule
            read_as = declared.kind or (str if declared.parse else hint)
            found[each.name] = replace(declared, name=declared.name or each.name, rule=rule, kind=read_as)
    return found


def check(settings: Any) -> None:
    """Raise OptionError for the first option whose value violates its rule; None is not checked."""
    kind: type = type(settings)
    for name, declared in options_of(kind).items():
        value, rule = getattr(settings, name), declared.rule
        if value is not None and rule is not None and not rule.holds(value):
            raise OptionError(f"{{{declared.name}}} is {rule.text}; got {as_typed(value)}")


def shared_values(settings: Any) -> dict[str, Any]:
    """Return the values that have to be equal on all workers, by field; for paths, whether there is one."""
    result = {}
    kind: type = type(settings)
    for name, declared in options_of(kind).items():
        if declared.per_machine is not True:
            value = getattr(settings, name)
            result[name] = value is not None if declared.per_machine == "presence" else value
    return result


def read(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of ``kind`` from options by user names, as parsed by the command line; None means not given."""
    values = {name: given.get(declared.name) for name, declared in options_of(kind).items()}
    return {name: parse_option(options_of(kind)[name], value) for name, value in values.items() if value is not None}


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return `` (did you mean X?)`` for the choice closest to a misspelt name; an empty string if none is close."""
    found = get_close_matches(name, choices, n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def pair(name: str, number: Callable[[str], _T], example: str) -> Callable[[str], tuple[_T, _T]]:
    """Return a parser for an option of two numbers, each parsed by ``number``."""

    def parse(text: str) -> tuple[_T, _T]:
        try:
            first, last = map(number, text.split(","))
        except ValueError:
            raise OptionError(f"{{{name}}} is two numbers, as in {example}; got {text}") from None
        return first, last

    return parse


def as_typed(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def parse_option(declared: Option, value: Any) -> Any:
    """Return the field's value for an option as the command line parses it; raise OptionError if it is invalid."""
    kind = get_origin(declared.kind) or declared.kind
    as_read = isinstance(value, kind if isinstance(kind, type) else str)  # a choice is a string
    if declared.synonyms:
        value = declared.synonyms.get(value, value)
    return declared.parse(value) if declared.parse is not None and as_read else value


def without_aliases(aliases: Mapping[str, str], given: Mapping[str, _T]) -> tuple[dict[str, _T], dict[str, str]]:
    """Return the given values by option name, and the alias that was typed for each name given by an alias.

    ``aliases`` maps aliases to names. Raises OptionError if an option was given under two names.
    """
    result: dict[str, _T] = {}
    typed: dict[str, str] = {}
    for called, value in given.items():
        name = aliases.get(called, called)
        if name in result:
            both = " and ".join(f"{{{each.replace('-', '_')}}}" for each in (typed.get(name, name), called))
            raise OptionError(f"{both} are the same option: give one of them")
        result[name] = value
        if name != called:
            typed[name] = called
    return result, typed


def without_synonyms(kind: type, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts of ``kind`` with synonyms replaced by the values that they mean."""
    found = {name: declared.synonyms for name, declared in options_of(kind).items()}
    return {
        name: found.get(name, {}).get(value, value) if isinstance(value, str) else value
        for name, value in facts.items()
    }


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(each for each in get_args(hint) if each is not type(None))
    return hint


def from_facts(kind: type[_T], facts: Any, what: str) -> _T:
    """Return a dataclass from the JSON of its ``asdict``; raise ValueError for a wrong type or an unknown field.

    A missing field takes its default, if it has one. So the default of a field added in a later version must be the
    behavior of earlier versions.
    """
    if not isinstance(facts, Mapping):
        raise ValueError(f"{what} should be an object, got {_text(facts)}")
    facts = without_synonyms(kind, facts)
    hints = get_type_hints(kind)
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(facts.keys() - known.keys())
    if unknown:
        raise ValueError(f"{what} have {', '.join(map(repr, unknown))}, which thinpipe does not know in this version")
    values: dict[str, Any] = {}
    for name, each in known.items():
        if name in facts:
            if not _fits(facts[name], hints[name]):
                raise ValueError(f"{what}: {name} cannot be {_text(facts[name])}")
            values[name] = _as_field(facts[name], hints[name])
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{what} have no {name!r}")
    return kind(**values)


def _as_field(value: Any, hint: Any) -> Any:
    """Return a value of JSON as a field has it: tuples in place of lists, paths in place of text."""
    if isinstance(value, str) and Path in (hint, *get_args(hint)):
        return Path(value)
    return tuple(value) if isinstance(value, list) else value


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False
        if inner[-1] is Ellipsis:
            return all(_fits(each, inner[0]) for each in value)
        return len(value) == len(inner) and all(map(_fits, value, inner))
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return type(value) is (str if hint is Path else hint)  # so that bool is not accepted as int; paths are text in JSON


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
