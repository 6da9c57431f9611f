"""Codecs: encode a tensor into one uint8 wire buffer and decode it; independent of pipelines."""

from thinpipe.codecs.base import Codec
from thinpipe.codecs.rounding import rounding_key
from thinpipe.codecs.spec import FAMILIES, codec

__all__ = ["FAMILIES", "Codec", "codec", "rounding_key"]
