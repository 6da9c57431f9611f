"""The version of thinpipe, in a separate module so that any package can import it."""

__version__ = "0.2.0"
