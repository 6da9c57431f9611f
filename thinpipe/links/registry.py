"""The registry of link codecs: specs of codecs, and of what needs both ends of a link.

tile:4        every tensor is encoded with this codec
axes:2        rows in a PCA basis that the sender learns, with 2 bits per value on average
axes:2+now    from the first steps on: for a pretrained model
auto:2-8      2 to 8 bits per value, as set between steps; auto:2-8+gradients for gradients
"""

from __future__ import annotations

import re
from typing import Any

from thinpipe.codecs.base import Codec
from thinpipe.codecs.spec import codec
from thinpipe.links.activation_cache import SampleCodec, SentSamples
from thinpipe.links.learned.adaptive_codec import AdaptiveCodec
from thinpipe.links.learned.pca_codec import PCACodec
from thinpipe.links.link_codec import CodecAdapter, LinkCodec

# By the name that a spec begins with.
LINK_CODECS: dict[str, type[LinkCodec]] = {"axes": PCACodec, "auto": AdaptiveCodec}


def link_codec(spec: str | Codec) -> LinkCodec:
    """Return the link codec of a spec, of a codec or of a link codec, for one link end; presets are not accepted."""
    name = re.match(r"\s*(\w+):", spec) if isinstance(spec, str) else None
    if name and name[1] in LINK_CODECS:
        return LINK_CODECS[name[1]].parse(str(spec).strip())
    return CodecAdapter(codec(spec))


def sent_once(spec: str | Codec, sent: SentSamples | None = None, **storage: Any) -> SampleCodec:
    """Return the link codec of activations that are the same in every epoch; ``sent`` is not needed for its sizes."""
    return SampleCodec(link_codec(spec).codecs[0], sent or SentSamples(0), **storage)


def check_directions(forward: str | Codec, backward: str | Codec) -> None:
    """Raise ValueError unless ``forward`` can encode activations and ``backward`` gradients."""
    link_codec(forward).check_direction("forward")
    link_codec(backward).check_direction("backward")
