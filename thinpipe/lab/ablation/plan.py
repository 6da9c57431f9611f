"""Ablation plans: a TOML file is expanded to one run per combination of its matrix, checked before the first starts.

title = "digits: what compression costs"

[train]                                   # options of `thinpipe train`, the same in all runs
task = "digits"
epochs = 10

[matrix]                                  # each combination is a run; the last line varies fastest
compress = ["none", "sort:8,4,2+2"]       # four codecs; { forward = ..., backward = ... } is a pair
seed = [0, 1, 2]
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from thinpipe.codecs.recipes import RECIPES, directions, recipe_of
from thinpipe.codecs.spec import split_specs
from thinpipe.links.registry import link_codec
from thinpipe.options import Option, OptionError, flag, options_of, without_aliases, without_synonyms
from thinpipe.system.files import read_toml
from thinpipe.train.running import RunOptions
from thinpipe.train.settings import Settings

_TABLES = ("title", "train", "matrix")
CODEC_KEYS = {"forward": "compress-forward", "backward": "compress-backward"}  # of a plan -> options of thinpipe train


def _key(declared: Option) -> str:
    """Return an option's name in a plan: as on the command line, without the leading dashes."""
    return flag(declared.name).removeprefix("--")


# Options that a plan may set: those that determine a run's outcome, and some of the options of its execution.
_EXECUTION = ("steps", "evaluate_every", "in_process")
_OPTIONS = {
    _key(declared): declared
    for declared in (*options_of(Settings).values(), *(options_of(RunOptions)[name] for name in _EXECUTION))
}
OPTIONS = tuple(sorted({"compress", *_OPTIONS} - set(CODEC_KEYS.values())))
_ALIASES = {flag(alias).removeprefix("--"): key for key, declared in _OPTIONS.items() for alias in declared.aliases}
_DEFAULTS = {each.name: each.default for each in fields(Settings) if each.default is not MISSING}
_KINDS = {str: "a text", int: "an integer", float: "a number", bool: "true or false"}
MOST_RUNS = 10_000  # a minute each is a week
_SPEED_ONLY = {"threads"}  # settings that affect the speed of a run, not its result

Options = Mapping[str, Any]  # by their names as on the command line, without the leading dashes
Resolve = Callable[[dict[str, Any]], Settings]  # resolves the options of thinpipe train; ValueError if it rejects them


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of a plan."""

    name: str  # "digits sort:6+2 seed 1"
    options: Options
    varied: Options  # the options that the matrix varies, without codec and seed
    settings: Mapping[str, Any]  # all that the outcome depends on, presets resolved: equal settings, same run

    def arguments(self) -> list[str]:
        """Return the arguments that follow ``thinpipe train`` on the command line."""
        arguments = []
        for name, value in self.options.items():
            if not isinstance(value, bool):
                arguments += [flag(name), str(value)]
            elif value or _OPTIONS[name].negative:  # without it, a switch is off
                arguments.append(flag(name if value else f"no-{name}"))
        return arguments

    def matches(self, text: str) -> bool:
        """Return True if the name contains ``text``; codecs in ``text`` may be abbreviated."""
        return text in self.name or " ".join(map(in_full, text.split())) in self.name

    @property
    def identity(self) -> str:
        return identity(self.settings)

    @property
    def codec(self) -> str:
        return codec_text(self.settings)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The title, the common options and the runs of a plan file."""

    title: str
    fixed: Options
    runs: tuple[Run, ...]


def identity(settings: Mapping[str, Any]) -> str:
    """Return settings as canonical JSON: equal for equal runs.

    A missing setting has its default, so results of versions without that setting remain valid.
    """
    return json.dumps({**_DEFAULTS, **without_synonyms(Settings, settings)}, sort_keys=True)


def codec_text(settings: Mapping[str, Any]) -> str:
    """Return the codec of both directions, the name of the preset, or ``forward/backward``."""
    forward, backward = str(settings["compress_forward"]), str(settings["compress_backward"])
    return forward if forward == backward else recipe_of(forward, backward) or f"{forward}/{backward}"


def read_plan(path: Path, resolve: Resolve, overrides: Sequence[str] = ()) -> Plan:
    """Read a plan file; ``overrides`` are ``NAME=VALUE`` and take precedence over the file.

    Raise ValueError that names the file and the error in it.
    """
    content = read_toml(path, "a plan, a TOML file")
    try:
        return _plan(content, path.stem, resolve, dict(map(_override, overrides)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _plan(content: Mapping[str, Any], name: str, resolve: Resolve, overrides: Options) -> Plan:
    _check_names("a plan", content, _TABLES)
    title, train, matrix = content.get("title", name), content.get("train", {}), content.get("matrix", {})
    if not isinstance(title, str):
        raise ValueError(f"title is a text, got {title!r}")
    for table, entries in (("train", train), ("matrix", matrix)):
        if not isinstance(entries, dict):
            raise ValueError(f"[{table}] is a table of options, got {entries!r}")
    overrides, train, matrix = (
        _known(where, given) for where, given in (("{set}", overrides), ("[train]", train), ("[matrix]", matrix))
    )
    repeated = [option for option in matrix if option in train]
    if repeated:
        raise ValueError(
            f"{repeated[0]} is in [train], the same for all runs, and in [matrix]: leave it in one of them"
        )
    fixed = {**train, **overrides}
    varied = {name: values for name, values in matrix.items() if name not in overrides}
    _check_count(varied)
    axes = {name: _axis(name, values) for name, values in varied.items()}
    if "compress" in fixed:  # a list of one, so that codecs have the same form in both tables
        axes["compress"] = expand_codecs([fixed.pop("compress")])
    _check_count(axes)  # again: an entry may expand to several codecs
    for option, value in fixed.items():
        _check_type(option, value, _kind(option))
    runs = tuple(_runs(fixed, axes, resolve))
    _check_apart(runs)
    return Plan(title=title, fixed=fixed, runs=runs)


def _runs(fixed: Options, axes: Mapping[str, Sequence[Any]], resolve: Resolve) -> Iterator[Run]:
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        options = {**fixed, **chosen}
        options |= options.pop("compress", {})
        try:
            settings = resolve({name.replace("-", "_"): value for name, value in options.items()}).to_json()
        except ValueError as error:
            raise ValueError(f"{_combination(chosen)}{error}") from None
        known = {name: value for name, value in settings.items() if name not in _SPEED_ONLY}
        known = json.loads(json.dumps(known | {"steps": options.get("steps")}))  # as read from JSON: tuples are lists
        known |= {name: value for name, value in _paths_as_given(options) if Path(str(known.get(name))).is_absolute()}
        varied = {name: value for name, value in chosen.items() if name not in ("task", "compress", "seed")}
        parts = (known["task"], codec_text(known), *(f"{name} {value}" for name, value in varied.items()))
        yield Run(
            name=" ".join((*parts, f"seed {known['seed']}")),
            options=options,
            varied=varied,
            settings=known,
        )


def _paths_as_given(options: Options) -> Iterator[tuple[str, str]]:
    """Yield text options as the plan writes them: a run keeps its identity if model and data folders move."""
    return ((name.replace("-", "_"), value) for name, value in options.items() if isinstance(value, str))


def _combination(chosen: Options) -> str:
    """Return the prefix of an error message that names the combination; empty if there is only one."""
    codecs = ("compress", *CODEC_KEYS.values())
    parts = [f"{name} {'/'.join(value.values()) if name in codecs else value}" for name, value in chosen.items()]
    return f"the run with {', '.join(parts)}: " if parts else ""


def _check_count(axes: Mapping[str, Any]) -> None:
    """Raise ValueError if the matrix has more than MOST_RUNS runs; the runs are counted, not created."""
    sizes = {name: len(values) for name, values in axes.items() if isinstance(values, list)}
    count = math.prod(sizes.values())
    if count > MOST_RUNS:
        product_ = " x ".join(f"{size} {name}" for name, size in sizes.items() if size > 1)
        raise ValueError(f"a plan has at most {MOST_RUNS:,} runs; [matrix] makes {count:,}: {product_}. Vary less")


def _axis(name: str, values: Any) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise ValueError(f"[matrix] has a list of values for each option, as in seed = [0, 1, 2]; {name} is {values!r}")
    if name == "compress":
        return expand_codecs(values)
    kind = _kind(name)
    for value in values:
        _check_type(name, value, kind)
    return values


def _known(where: str, given: Options) -> Options:
    """Return options under their canonical names; raise OptionError if one is unknown or given twice."""
    try:
        found, _ = without_aliases(_ALIASES, given)
    except OptionError as error:
        raise OptionError(f"{where}: {error.args[0]}") from None
    _check_names(where, found, OPTIONS)
    return found


def _check_names(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise OptionError(f"{where} has no {', '.join(unknown)}; there is: {', '.join(known)}")


def _check_type(name: str, value: Any, kind: type) -> None:
    """Raise ValueError if a value has another type than its option, as ``thinpipe train`` does on the command line."""
    fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not fits or (isinstance(value, bool) and kind is not bool):  # bool is a subclass of int
        raise ValueError(f"{name} is {_KINDS[kind]}, got {value!r}")


def _kind(name: str) -> type:
    kind = _OPTIONS[name].kind
    return kind if kind in _KINDS else str  # choices and paths are strings in TOML


def _check_apart(runs: Sequence[Run]) -> None:
    first: dict[str, str] = {}
    for run in runs:
        other = first.setdefault(run.identity, run.name)
        if other is not run.name:
            raise ValueError(f"two runs are the same: {other!r} and {run.name!r}; leave one out of [matrix]")


def _override(text: str) -> tuple[str, Any]:
    """Parse ``epochs=2``: the value is TOML, or else text, so that paths and specs need no quotes."""
    name, equals, value = text.partition("=")
    if not (equals and name.strip() and value.strip()):
        raise OptionError(f"{{set}} takes an option of thinpipe train and its value, as in epochs=2; got {text!r}")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    return name.strip(), parsed


def expand_codecs(entries: Sequence[Any]) -> list[dict[str, str]]:
    """Return the options of thinpipe train for each codec of a list.

    ``["fp16", "sort:8,2+2"]`` becomes ``fp16``, ``sort:6+2``, ``sort:2+2``, each in both directions. Specs are written
    in full, so that two spellings of a codec are one run.
    """
    return [options for entry in entries for options in _entry(entry)]


def _entry(entry: Any) -> list[dict[str, str]]:
    if isinstance(entry, str) and entry in RECIPES:
        return [dict(zip(CODEC_KEYS.values(), map(in_full, directions(entry)), strict=True))]
    if isinstance(entry, str):
        return [{"compress": spec} for spec in _specs(entry)]
    if isinstance(entry, dict) and entry.keys() == CODEC_KEYS.keys():
        sides = [[(CODEC_KEYS[side], spec) for spec in _specs(entry[side])] for side in CODEC_KEYS]
        return [dict(pairs) for pairs in product(*sides)]
    raise ValueError(
        'a codec is a spec for both directions, as in "sort:8", a preset, as in "4bit", or '
        '{ forward = "kmeans:2", backward = "sort:8" }; '
        f"got {entry!r}"
    )


def _specs(text: Any) -> list[str]:
    if not isinstance(text, str):
        raise ValueError(f'a codec is named by its spec, as in "sort:8"; got {text!r}')
    if "(" in text:  # commas in parentheses do not separate specs
        return [link_codec(spec).spec for spec in split_specs(text)]
    name, colon, arguments = text.partition(":")
    return [link_codec(f"{name}{colon}{argument.strip()}").spec for argument in arguments.split(",")]


def in_full(text: str) -> str:
    """Return ``sort:8`` as ``sort:6+2``; return text that is not a spec unchanged."""
    try:
        return link_codec(text).spec
    except ValueError:
        return text
