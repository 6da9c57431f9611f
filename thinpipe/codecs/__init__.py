"""Codecs: a tensor to one uint8 wire buffer and back. They know nothing of pipelines."""

from thinpipe.codecs.base import Codec
from thinpipe.codecs.rounding import rounding_key
from thinpipe.codecs.spec import FAMILIES, codec

__all__ = ["FAMILIES", "Codec", "codec", "rounding_key"]
