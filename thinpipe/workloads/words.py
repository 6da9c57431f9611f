"""A tokenizer for models from scratch: a word is a token, with RoBERTa's special tokens and layout."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

START, PADDING, END, UNKNOWN = range(4)  # RoBERTa's own numbers
SPECIAL = 4
_WORD = re.compile(r"\w+|[^\w\s]")


class WordTokenizer:
    """Words to numbers; words that are not in the vocabulary share one."""

    def __init__(self, words: Iterable[str]) -> None:
        self._numbers = {word: SPECIAL + place for place, word in enumerate(words)}

    @classmethod
    def of_texts(cls, texts: Iterable[str], most: int) -> WordTokenizer:
        """A tokenizer that knows the words of these texts, the ``most`` frequent ones."""
        counts = Counter(word for text in texts for word in _words(text))
        return cls(sorted(counts, key=lambda word: (-counts[word], word))[:most])

    @property
    def vocabulary(self) -> int:
        """Different tokens, the special ones too."""
        return SPECIAL + len(self._numbers)

    def encode(self, texts: Sequence[tuple[str, ...]], tokens: int) -> tuple[Tensor, Tensor]:
        """Token ids and attention mask, both [N, tokens], of texts or pairs of texts: ``<s> a </s> </s> b </s>``.

        What is too long loses words at the end of its longer text.
        """
        ids = torch.full((len(texts), tokens), PADDING, dtype=torch.int64)
        for row, parts in zip(ids, texts, strict=True):
            numbers = [[self._numbers.get(word, UNKNOWN) for word in _words(part)] for part in parts]
            while sum(map(len, numbers)) + 2 * len(numbers) > tokens:
                max(numbers, key=len).pop()
            line = [number for part in numbers for number in (END, *part, END)]
            row[: len(line)] = torch.tensor([START, *line[1:]])
        return ids, (ids != PADDING).to(torch.int64)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
