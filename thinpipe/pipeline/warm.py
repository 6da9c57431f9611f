"""Codecs compile what they need when they are first used; this is a first use that nobody times."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinpipe.codecs.base import Codec


def warm_codec(codec: Codec, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Encode and decode one tensor. It draws nothing at random of its own, and links count nothing."""
    # Many different values: of a constant tensor some codecs make short work.
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device=device).sin_().to(dtype).view(*shape)
    codec.decode(codec.encode(x, state={}), torch.empty_like(x))
