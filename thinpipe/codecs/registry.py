"""Codec families: the syntax of a name in specs; families of other packages, by entry point or by class.

A package registers a codec as an entry point of the group ``thinpipe.codecs``: a name, and a subclass of ``Codec`` or a
function of the spec's argument that returns a codec. Without registration a spec names the class itself,
``package.module:Class`` or ``package.module:Class:ARGUMENT``. Both import code: such a spec must come from the user,
or from a checkpoint whose code the user trusts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata

from thinpipe.codecs.base import Codec
from thinpipe.system.imports import error_text, import_object

GROUP = "thinpipe.codecs"
_CLASS = re.compile(r"([A-Za-z_][\w.]*:[A-Za-z_]\w*)(?::(.*))?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A codec family: the syntax and parser of one name before the colon."""

    usage: str  # how it is written, with an example
    rule: str  # the valid arguments, in prose
    parse: Callable[[str], Codec]  # the argument -> Codec; raises ValueError if it is invalid


@cache
def entry_points(taken: tuple[str, ...]) -> dict[str, metadata.EntryPoint]:
    """Return the registered codecs by name; raise ValueError if a name is among the ``taken`` ones or there twice."""
    found: dict[str, metadata.EntryPoint] = {}
    for point in metadata.entry_points(group=GROUP):
        if point.name in taken or point.name in found:
            owner = found[point.name].value if point.name in found else "thinpipe"
            raise ValueError(
                f"{point.value} is registered as codec {point.name!r} in the entry points {GROUP}, a name already "
                f"taken by {owner}: uninstall its package or rename its entry point"
            )
        found[point.name] = point
    return found


def external_family(spec: str, taken: tuple[str, ...]) -> tuple[Family, str] | None:
    """Return the family of a spec that names none of thinpipe's, and its argument; None if there is none.

    Raise ValueError if it names what cannot be imported or is no codec.
    """
    name, _, argument = spec.partition(":")
    if point := entry_points(taken).get(name):
        try:
            made = point.load()
        except Exception as error:  # another package may raise anything
            raise ValueError(
                f"codec {name!r} is {point.value}, which cannot be imported: {error_text(error)}"
            ) from None
        if not isinstance(made, type) and callable(made):
            return _family(name, made, taken), argument
        return _family(name, _codec_class(made, point.value).parse, taken), argument
    if (match := _CLASS.fullmatch(spec)) is None:
        return None
    name = match[1]
    try:
        made = import_object(name)
    except ImportError as error:
        raise ValueError(
            f"{spec!r} names none of thinpipe's codecs and, as package.module:Class, cannot be imported: {error}"
        ) from None
    return _family(name, _codec_class(made, name).parse, taken), match[2] or ""


def _codec_class(made: object, name: str) -> type[Codec]:
    if isinstance(made, type) and issubclass(made, Codec):
        return made
    raise ValueError(f"{name} is not a subclass of thinpipe.Codec: {made!r}")


def _family(name: str, parse: Callable[[str], Codec], taken: tuple[str, ...]) -> Family:
    rule = "the arguments that its class defines"
    return Family(usage=name, rule=rule, parse=partial(_parse_checked, (name, *taken), parse))


def _parse_checked(names: Sequence[str], parse: Callable[[str], Codec], argument: str) -> Codec:
    try:
        made = parse(argument)
    except ValueError:
        raise
    except Exception as error:  # a method may be missing, or the class may need arguments
        raise ValueError(f"it raised {error_text(error)}") from None
    if not isinstance(made, Codec):
        raise ValueError(f"it returned {type(made).__name__}, not a codec")
    if made.spec.partition(":")[0] not in names and _imported_class(made.spec) is not type(made):
        raise ValueError(
            f"the property spec of its codec is {made.spec!r}, from which other workers cannot create it; leave spec "
            f"to thinpipe.Codec, or let it begin with {names[0]}"
        )
    return made


def _imported_class(spec: str) -> object:
    """Return the class that a spec names; None if there is none."""
    match = _CLASS.fullmatch(spec)
    try:
        return None if match is None else import_object(match[1])
    except ImportError:
        return None
