"""thinpipe: train a model whose layers live on several machines, over links too thin for it."""

from thinpipe.codecs import Codec, codec

__version__ = "0.1.0"
__all__ = ["Codec", "__version__", "codec"]
