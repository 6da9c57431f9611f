"""Specs of link encodings: codec specs, and those that need a link and are for activations only.

tile:4                              every tensor is encoded with this codec
delta(kmeans:2)                     the change of each sample since it was last sent is encoded with this codec
delta(kmeans:2,first=fp16)          and a sample that was never sent before is encoded with fp16
axes:2                              rows in a PCA basis that the sender learns, with 2 bits per value on average
axes:2+now                          from the first steps on: for a pretrained model
"""

from __future__ import annotations

from pathlib import Path

from thinpipe.codecs.base import Codec
from thinpipe.codecs.spec import codec
from thinpipe.links.delta import DEFAULT_FIRST, Delta, SampleCopies
from thinpipe.links.encoding import Encoding, Plain
from thinpipe.links.learned.axes import Axes


def encoding(spec: str | Codec, *, samples: int | None = None, copies_in: Path | None = None) -> Encoding:
    """Return the encoding of a spec for one link end; ``samples`` is not needed for its sizes alone.

    Args:
        spec: spec of a codec or of a link; recipes are not accepted.
        samples: number of samples, if copies of them are kept.
        copies_in: directory for the copies on disk; None: in memory.
    """
    if isinstance(spec, str) and spec.strip().startswith("axes:"):
        return _axes(spec.strip())
    if not isinstance(spec, str) or not spec.strip().startswith("delta("):
        return Plain(codec(spec))
    try:
        change, first = _delta(spec.strip())
    except ValueError as error:
        raise ValueError(
            f"{spec.strip()!r} makes no sense: {error}; delta takes the codec of changes, and may name the one of a "
            "sample's first pass, as in delta(kmeans:2) or delta(kmeans:2,first=fp16)"
        ) from None
    return Delta(change, first, None if samples is None else SampleCopies(samples, copies_in))


def once(spec: str | Codec) -> str:
    """Return the spec for samples that are sent only once, as in an evaluation: for ``delta(...)``, its first codec."""
    found = encoding(spec)
    return found.first.spec if isinstance(found, Delta) else found.spec


def at_once(spec: str | Codec) -> str:
    """Return the spec for speed measurements, where accuracy does not matter: ``axes:B`` becomes ``axes:B+now``."""
    found = encoding(spec)
    return Axes(found.bits, now=True).spec if isinstance(found, Axes) else found.spec


def learns(spec: str | Codec) -> bool:
    """Return True if a spec needs a basis learned in training."""
    return isinstance(encoding(spec), Axes)


def check_directions(forward: str | Codec, backward: str | Codec) -> None:
    """Raise ValueError unless ``forward`` can encode activations and ``backward`` gradients."""
    encoding(forward)
    gradients = encoding(backward)
    if isinstance(gradients, Delta):
        change = gradients.change.spec
        raise ValueError(
            f"{gradients.spec} is for activations, which settle as training goes on. The gradient of a sample says "
            "little about its next one, so their difference is no smaller than they are. Give gradients another codec, "
            f"as in {change}"
        )
    if isinstance(gradients, Axes):
        raise ValueError(
            f"{gradients.spec} is for activations, whose rows vary along few axes. Gradients do not, and what they "
            "would lose makes training diverge. Give gradients another codec, as in tile:4+zero"
        )


def _axes(spec: str) -> Axes:
    bits, plus, now = spec.removeprefix("axes:").partition("+")
    try:
        if plus and now.strip() != "now":
            raise ValueError(f"its option is now, not {now.strip()!r}")
        return Axes(float(bits), now=bool(plus))
    except ValueError as error:
        raise ValueError(
            f"{spec!r} makes no sense: {error}; axes takes the bits per value on average, from 0.5 to 8, as in axes:2 "
            "or axes:1.5, and +now to begin at once"
        ) from None


def _delta(spec: str) -> tuple[Codec, Codec]:
    """Return the codecs of changes and of first passes."""
    if not spec.endswith(")"):
        raise ValueError("its bracket is not closed")
    inside = spec.removeprefix("delta(")[:-1]
    if "delta(" in inside:
        raise ValueError("a change of changes is not sent: there is one delta in a spec")
    text, *options = inside.split(",")
    if [option.partition("=")[0].strip() for option in options] not in ([], ["first"]):
        raise ValueError(f"{','.join(options)!r} is not first=SPEC")
    change, first = codec(text), codec(options[0].partition("=")[2]) if options else DEFAULT_FIRST
    for each in (change, first):
        if not each.decodes_alike:
            raise ValueError(f"both ends of a link must decode the same bits, and {each.spec} does not promise that")
    if change.spec == "none":
        raise ValueError("a change that travels as it is saves nothing; none alone sends the same bytes")
    if not change.leaves_less:
        raise ValueError(
            f"the two levels of {change.spec} are the ends of what it covers: what it leaves of a change is as wide as "
            "the change was, and copies drift away pass by pass. Take 2 bits or more, or kmeans:1"
        )
    return change, first
