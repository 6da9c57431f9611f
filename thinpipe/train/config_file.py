"""YAML files of options by their long names, for `thinpipe train run.yaml` and `--save-config`.

Every value is read as text and parsed as on the command line, so that 2e-5 is a number and none is a codec.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from thinpipe.options import Option, OptionError, as_typed, flag, nearest, options_of, parse_option, without_aliases
from thinpipe.system.files import OutputError, read_text, replace_file
from thinpipe.system.sizes import parse_size
from thinpipe.train.running import RunOptions
from thinpipe.train.settings import Settings
from thinpipe.train.tasks.panels import PANELS

_WHAT = "a YAML file of options"
_BYTES = 100_000  # limit; all options together take a twentieth of it, and PyYAML parses 100 kB/s
_DEPTH = 10  # of collections; an option is a list at most
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "map", "seq")}
_NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}
_SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# Of this machine; or written for each direction.
_LEFT_OUT = ("rank", "master", "servers", "listen", "address", "save_config", "plan", "compress")


def read_config(path: Path, kinds: Iterable[type]) -> dict[str, Any]:
    """Return the options in a YAML file, by name and as the command line parses them; ``kinds`` declare them.

    Raises ValueError with the file and the key for the first that is invalid.
    """
    declared = {each.name: each for kind in kinds for each in options_of(kind).values()}
    given = {key.replace("-", "_"): node for key, node in _entries(path)}
    aliases = {alias: name for name, each in declared.items() for alias in (*each.aliases, each.old_name) if alias}
    try:
        found, typed = without_aliases(aliases, given)
    except OptionError as error:
        raise ValueError(f"{path}: {error.args[0].replace('{', '').replace('}', '')}") from None
    result = {}
    for name, node in found.items():
        key = typed.get(name, name)
        if name not in declared:
            raise ValueError(
                f"{path}: {key} is no option{nearest(name, [*declared, *aliases])}; keys are the long options of "
                "thinpipe train, with dashes or underscores"
            )
        try:
            value = _value(declared[name], node)
            parsed = None if value is None else parse_option(declared[name], value)
        except ValueError as error:
            raise ValueError(f"{path}: {key}: {error.args[0].replace(f'{{{name}}} ', '')}") from None
        rule = declared[name].rule
        if parsed is not None and rule is not None and not rule.holds(parsed):
            raise ValueError(f"{path}: {key} is {rule.text}; got {as_typed(parsed)}")
        result[name] = value
    return result


def merge(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a file with those of the command line, which win, also between codecs of one direction."""
    typed = {name: value for name, value in given.items() if value not in (None, [])}
    sides = ("compress_forward", "compress_backward")
    config = dict(config)
    if "compress" in typed:
        config = {name: value for name, value in config.items() if name not in sides}
    elif not typed.keys().isdisjoint(sides) and config.get("compress") is not None:
        config |= dict.fromkeys(sides, config.pop("compress"))
    return {**given, **config, **typed}


def write_config(
    path: Path, kinds: Iterable[type], settings: Settings, running: RunOptions, given: Mapping[str, Any]
) -> None:
    """Write all options of a run to a YAML file that ``read_config`` reads back; raise OutputError if that fails.

    Settings are written as they were resolved, other options as they were given: a link may be named by a file.
    """
    declared = {each.name: each for kind in kinds for each in options_of(kind).values()}
    values = {name: value for name, value in given.items() if name not in _LEFT_OUT}
    for name, each in options_of(RunOptions).items():  # those that a resumed run was saved with
        if values.get(each.name) in (None, []) and getattr(running, name) != getattr(RunOptions, name):
            values[each.name] = getattr(running, name)
    unused = {"momentum"} if settings.optimizer != "sgd" else set()
    unused |= {"layout", "schedule"} if settings.parallel != "pipeline" else set()
    settled = {each.name: getattr(settings, name) for name, each in options_of(Settings).items()}
    values = {name: value for name, value in (values | settled).items() if name not in unused}
    text = "# Options of `thinpipe train THIS_FILE`; those on the command line win.\n"
    for panel in PANELS:
        group = {
            flag(name).removeprefix("--"): _plain(declared[name], value)
            for name, value in values.items()
            if declared[name].panel == panel and value not in (None, [], ())
        }
        if group:
            text += f"\n# {panel}\n{yaml.safe_dump(group, sort_keys=False, allow_unicode=True)}"
    try:
        with replace_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path} is not written: {error.strerror or error}") from None


def _entries(path: Path) -> Iterator[tuple[str, yaml.Node]]:
    """Yield the keys of a file with their nodes; raise ValueError unless it is a mapping without anchors and tags."""
    text = read_text(path, _WHAT, limit=_BYTES)
    try:
        # An alias is text that may expand without end; found before anything is built from it.
        depth = 0
        for event in yaml.parse(text, Loader=yaml.BaseLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEPTH:  # PyYAML's time grows with its square
                raise ValueError(f"{path} cannot be read as {_WHAT}: it is nested too deeply")
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"{path}, line {event.start_mark.line + 1}: *{event.anchor}: write the value itself")
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"{path}{where} cannot be read as {_WHAT}: {problem}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path} is no mapping of options to values, as in task: digits")
    seen: dict[str, Any] = {}
    for key, value in root.value:
        name, line = str(key.value), key.start_mark.line + 1
        if not {key.tag, value.tag} <= _TAGS or not isinstance(key, yaml.ScalarNode):
            raise ValueError(f"{path}, line {line}: keys are names of options, and values have no tags")
        first = seen.setdefault(name.replace("-", "_"), key.start_mark)
        if first is not key.start_mark:
            raise ValueError(f"{path}, line {line}: {name} is in line {first.line + 1} already; leave one out")
        yield name, value


def _value(declared: Option, node: yaml.Node) -> Any:
    """Return a value as the command line parses the option; None for null, which is an option that was not given."""
    if isinstance(node, yaml.ScalarNode):
        texts = [str(node.value)]
        if node.value in ("", "null", "~") and node.style is None:
            return None
    elif isinstance(node, yaml.SequenceNode) and all(isinstance(each, yaml.ScalarNode) for each in node.value):
        texts = [str(each.value) for each in node.value]
    else:
        raise ValueError("it is one value, or a list of them; got a mapping or nested lists")
    if declared.kind == list[str]:
        return texts
    text = ",".join(texts)  # pairs of numbers and lists of names are one text
    if declared.kind is bool:
        if text.lower() not in _SWITCH:
            raise ValueError(f"it is true or false; got {text}")
        return _SWITCH[text.lower()]
    if declared.kind in _NUMBERS:
        try:
            return declared.kind(text)
        except ValueError:
            raise ValueError(f"it is {_NUMBERS[declared.kind]}; got {text}") from None
    return Path(text) if declared.kind is Path else text


def _plain(declared: Option, value: Any) -> Any:
    """Return a value as YAML has it: the same text as on the command line, or a number, a switch or a list."""
    if declared.kind == list[str]:
        return list(value)
    if declared.parse is parse_size and isinstance(value, int):
        return f"{value}B"
    return value if isinstance(value, bool | int | float | str) else as_typed(value)
