"""Drafts: guesses of the next tokens of each text, made on the client, which a model verifies in one forward.

prompt lookup    the tokens that followed the last occurrence of the text's last tokens
a small model    with the same tokenizer; it goes on while a block is on its way around the ring
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from thinpipe.train.models.rollback import CachedTexts

Texts = Sequence[list[int]]  # the tokens of each text: prompt with its padding, and what followed
Scores = Callable[[list[int], Tensor], Tensor]  # of a text and the logits after its last n tokens: logits to choose by
_LONGEST_MATCH = 3


@dataclass
class Draft:
    """Tokens that may follow one text."""

    tokens: list[int] = field(default_factory=list)
    chances: list[Tensor | None] = field(default_factory=list)  # what each was drawn from; None: it was certain


class Drafter(Protocol):
    """A source of drafts for a batch of texts."""

    def begin(self, texts: Texts, mask: Tensor) -> None:
        """Start with prompts, padded on the left."""

    def draft(self, texts: Texts, count: int) -> list[Draft]:
        """Return at most ``count`` tokens for each text."""

    def go_on(self, count: int, seconds: float) -> None:
        """Draft on, up to ``count`` tokens in all and for about this time, in case that all are accepted."""


class PromptLookup:
    """Drafts copied from an earlier part of the same text."""

    def begin(self, texts: Texts, mask: Tensor) -> None:
        self._starts = (mask.shape[1] - mask.sum(1)).tolist()

    def draft(self, texts: Texts, count: int) -> list[Draft]:
        found = (self._following(text[start:], count) for text, start in zip(texts, self._starts, strict=True))
        return [Draft(tokens, [None] * len(tokens)) for tokens in found]

    def go_on(self, count: int, seconds: float) -> None:
        """Do nothing: a lookup takes no time."""

    @staticmethod
    def _following(text: list[int], count: int) -> list[int]:
        for length in range(min(_LONGEST_MATCH, len(text) - 1), 0, -1):
            last = text[-length:]
            for start in range(len(text) - length - 1, -1, -1):
                if text[start] == last[0] and text[start : start + length] == last:
                    copied = text[start + length :]
                    return (copied * (count // len(copied) + 1))[:count]  # a repeating text goes on repeating
        return []


class ModelDrafter:
    """Drafts of a small causal model with a cache of its own."""

    def __init__(self, model: Any, vocabulary: int, scores: Scores, *, sampling: bool) -> None:
        """``vocabulary``: size of that of the verifying model; without ``sampling`` the likeliest are drafted."""
        self._model, self._vocabulary, self._scores, self._sampling = model, vocabulary, scores, sampling

    def begin(self, texts: Texts, mask: Tensor) -> None:
        self._seed = int(torch.randint(1 << 62, ())) if self._sampling else 0
        self._cache, self._device = CachedTexts(self._model), mask.device
        self._cache.begin(torch.tensor(texts, device=self._device), mask)
        self._cached = [list(text) for text in texts]
        self._texts, self._drafts = [list(text) for text in texts], [Draft() for _ in texts]

    def draft(self, texts: Texts, count: int) -> list[Draft]:
        left = [self._left(number, text) for number, text in enumerate(texts)]
        ahead = min(len(each.tokens) for each in left)
        self._drafts = [Draft(each.tokens[:ahead], each.chances[:ahead]) for each in left]
        self._texts = [list(text) for text in texts]
        while len(self._drafts[0].tokens) < count:
            self._next()
        return [Draft(each.tokens[:count], each.chances[:count]) for each in self._drafts]

    def go_on(self, count: int, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while len(self._drafts[0].tokens) < count and time.perf_counter() < end:
            self._next()

    def _left(self, number: int, text: list[int]) -> Draft:
        """Return the tokens that were drafted after ``text``, if it goes on as drafted."""
        drafted, before = self._drafts[number], self._texts[number]
        new = text[len(before) :]
        if new != drafted.tokens[: len(new)]:
            return Draft()
        return Draft(drafted.tokens[len(new) :], drafted.chances[len(new) :])

    def _next(self) -> None:
        """Draft one more token for each text."""
        texts = [text + draft.tokens for text, draft in zip(self._texts, self._drafts, strict=True)]
        for number, (text, logits) in enumerate(zip(texts, self._logits(texts), strict=True)):
            scores, draft = self._scores(text, logits[None, : self._vocabulary])[0], self._drafts[number]
            if not self._sampling:
                draft.tokens.append(int(scores.argmax()))
                draft.chances.append(None)
                continue
            chances = scores.softmax(-1).cpu()
            # Seeded by position, so that texts do not depend on how far there was time to draft ahead. What was drawn
            # for a position before was not verified, or this position would not be drafted again.
            drawn = torch.Generator().manual_seed(hash((self._seed, number, len(text))))
            draft.tokens.append(int(torch.multinomial(chances, 1, generator=drawn)))
            draft.chances.append(chances)

    def _logits(self, texts: Texts) -> Tensor:
        """Return the logits after each text; feed what the cache does not have, and remove what is not in the texts."""
        common = [_common(*both) for both in zip(self._cached, texts, strict=True)]
        new = max(len(text) - count for text, count in zip(texts, common, strict=True))
        rejected = [len(held) - len(text) + new for held, text in zip(self._cached, texts, strict=True)]
        block = torch.tensor([text[-new:] for text in texts], device=self._device)
        self._cached = list(texts)
        return self._cache.extend(block, rejected)[:, -1]


def _common(held: list[int], text: list[int]) -> int:
    """Return how many first tokens are the same, leaving at least the last one of ``text``."""
    count = min(len(held), len(text) - 1)
    if held[:count] == text[:count]:
        return count
    return next(place for place in range(count) if held[place] != text[place])
