"""The registry of link codecs: specs of codecs, and of what needs both ends of a link.

tile:4                              every tensor is encoded with this codec
delta(kmeans:2)                     the change of each sample since it was last sent is encoded with this codec
delta(kmeans:2,first=fp16)          and a sample that was never sent before is encoded with fp16
axes:2                              rows in a PCA basis that the sender learns, with 2 bits per value on average
axes:2+now                          from the first steps on: for a pretrained model
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from thinpipe.codecs.base import Codec
from thinpipe.codecs.spec import codec
from thinpipe.links.activation_cache import SampleCodec, SentSamples
from thinpipe.links.delta import Delta
from thinpipe.links.learned.pca_codec import PCACodec
from thinpipe.links.link_codec import CodecAdapter, LinkCodec

# By the name that a spec begins with.
LINK_CODECS: dict[str, type[LinkCodec]] = {"axes": PCACodec, "delta": Delta}


def link_codec(spec: str | Codec, *, samples: int | None = None, copies_in: Path | None = None) -> LinkCodec:
    """Return the link codec of a spec for one link end; ``samples`` is not needed for its sizes alone.

    Args:
        spec: spec of a codec or of a link codec; presets are not accepted.
        samples: number of samples, if they are cached.
        copies_in: directory for the cache on disk; None: in memory.
    """
    name = re.match(r"\s*(\w+)[:(]", spec) if isinstance(spec, str) else None
    if name and name[1] in LINK_CODECS:
        return LINK_CODECS[name[1]].parse(str(spec).strip(), samples=samples, copies_in=copies_in)
    return CodecAdapter(codec(spec))


def sent_once(spec: str | Codec, sent: SentSamples | None = None, **storage: Any) -> SampleCodec:
    """Return the link codec of activations that are the same in every epoch; ``sent`` is not needed for its sizes."""
    return SampleCodec(link_codec(spec).codecs[0], sent or SentSamples(0), **storage)


def check_directions(forward: str | Codec, backward: str | Codec) -> None:
    """Raise ValueError unless ``forward`` can encode activations and ``backward`` gradients."""
    link_codec(forward).check_direction("forward")
    link_codec(backward).check_direction("backward")
