"""The version of thinpipe, apart from everything else so that any room may name it."""

__version__ = "0.2.0"
