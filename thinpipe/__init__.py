"""thinpipe: train a model whose layers live on several machines, over links too thin for it."""

from thinpipe.codecs import Codec, codec
from thinpipe.version import __version__

__all__ = ["Codec", "__version__", "codec"]
