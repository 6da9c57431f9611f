"""Key-value caches from which the last tokens of each text can be removed again.

After a block of tokens was verified, each text keeps another number of them. Its keys and values move to the end of the
cache, so that all texts stay aligned at their last tokens, as texts with padding on the left::

    a b c d e x        the last 1 and 3 tokens were rejected        a b c d e
    f g h x x x                         ------>                     . . f g h
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.train.models.blocks import UncuttableError
from thinpipe.train.models.forward import takes


def new_cache(model: Any, *, rewindable: bool = False) -> Any:
    """Return a new cache, made as ``generate`` makes it; one with ``rewindable`` layers keeps all tokens.

    Raises UncuttableError if layers keep a state in place of keys and values.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    if rewindable:
        if other := {type(layer) for layer in cache.layers} - {DynamicLayer, DynamicSlidingWindowLayer}:
            raise UncuttableError(
                f"{type(model).__name__} does not generate with drafts: tokens cannot be removed from its "
                f"{other.pop().__name__}"
            )
        cache.layers = [DynamicLayer() for _ in cache.layers]  # masks limit what layers with a window see
    return cache


def cache_name(model: nn.Module) -> str:
    return "cache_params" if takes(model, "cache_params") else "past_key_values"


def roll_back(cache: Any, rejected: Sequence[int]) -> None:
    """Remove the last ``rejected`` tokens of each text from a rewindable cache."""
    for layer in cache.layers:
        if layer.is_initialized:
            layer.keys, layer.values = (without_last(each, rejected, -2) for each in (layer.keys, layer.values))


def without_last(tensor: Tensor, rejected: Sequence[int], dim: int = -1) -> Tensor:
    """Return [texts, ...] without the last entries of each text along ``dim``; zeros fill up the shorter ones."""
    fewest = min(rejected)
    kept = tensor.narrow(dim, 0, tensor.shape[dim] - fewest)
    if max(rejected) == fewest:
        return kept
    rows = []
    for row, count in zip(kept, rejected, strict=True):
        missing = count - fewest
        zeros = torch.zeros_like(row.narrow(dim, 0, missing))
        rows.append(torch.cat([zeros, row.narrow(dim, 0, row.shape[dim] - missing)], dim))
    return torch.stack(rows)


class CachedTexts:
    """Several texts in the cache of a model; before a forward adds tokens to all, the last of each can be removed."""

    def __init__(self, model: Any) -> None:
        self._model = model
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._last_position = most - 1 if isinstance(most, int) else None
        self._cache = new_cache(model, rewindable=True)
        self._mask = torch.empty(0)

    def begin(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the logits after texts, padded on the left."""
        self._mask = mask
        return self._logits(tokens)[:, -1:]

    def extend(self, tokens: Tensor, rejected: Sequence[int]) -> Tensor:
        """Remove the last ``rejected`` tokens of each text, add ``tokens`` [texts, n], and return logits after each."""
        roll_back(self._cache, rejected)
        self._mask = torch.cat([without_last(self._mask, rejected), torch.ones_like(tokens)], 1)
        return self._logits(tokens)

    def _logits(self, tokens: Tensor) -> Tensor:
        options: dict[str, Any] = {cache_name(self._model): self._cache, "use_cache": True}
        if len(tokens) > 1 and takes(self._model, "attention_mask"):  # one text has no padding
            options["attention_mask"] = self._mask
        if takes(self._model, "position_ids"):
            # Of a block that goes beyond the last position only tokens before it are accepted.
            positions = (self._mask.cumsum(1) - 1).clamp(0, self._last_position)
            options["position_ids"] = positions[:, -tokens.shape[1] :]
        logits: Tensor = self._model(tokens, **options).logits
        return logits
