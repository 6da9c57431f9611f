"""RoBERTa for classification: a small one from scratch with a word-level tokenizer, or a checkpoint's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinpipe.options import OptionError
from thinpipe.train.tasks.task import Shape

START, PADDING, END, UNKNOWN = range(4)  # as in RoBERTa
SPECIAL = 4
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a RoBERTa from scratch."""

    states: int  # hidden size
    layers: int
    heads: int
    inner: int  # width of a layer's feed-forward part, as a multiple of states
    dropout: float
    positions: int = 0  # minimum; the longest text may need more


ROBERTA_MODULES = ("transformers.models.roberta.modeling_roberta",)
ENDS = 2  # units in addition to the layers: embeddings and classifier
SMALL = Size(states=64, layers=4, heads=4, inner=2, dropout=0.0)  # six units; few epochs need no dropout
BASE = Size(states=768, layers=12, heads=12, inner=4, dropout=0.1)  # as roberta-base


def roberta_bytes(size: Size, width: float | None) -> int:
    """Return a lower bound of the weights' bytes: the matrices of its layers."""
    states = size.states * (1.0 if width is None else width)
    return int(4 * size.layers * (4 + 2 * size.inner) * states**2)


def new_roberta(shape: Shape, size: Size, width: float | None = None) -> nn.Module:
    """Return a randomly initialized RoBERTa for the word-level tokenizer; ``width`` is a factor on its hidden size."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    states = round(size.states * (1.0 if width is None else width))
    if states < size.heads or states % size.heads:
        raise OptionError(
            f"{{width}} times {size.states} values must be a multiple of {size.heads}, one part for each head; "
            f"got {width}, which makes {states}"
        )
    assert shape.vocabulary is not None
    assert shape.tokens is not None
    config = RobertaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=states,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.inner * states,
        # Positions are counted from the padding index plus one.
        max_position_embeddings=max(size.positions, shape.tokens + PADDING + 1),
        type_vocab_size=1,
        hidden_dropout_prob=size.dropout,
        attention_probs_dropout_prob=size.dropout,
        bos_token_id=START,
        pad_token_id=PADDING,
        eos_token_id=END,
    )
    config.num_labels = shape.classes
    return RobertaForSequenceClassification(config)


class WordTokenizer:
    """A word-level tokenizer with RoBERTa's special tokens; unknown words share one id."""

    def __init__(self, vocabulary: Iterable[str]) -> None:
        self._numbers = {word: SPECIAL + place for place, word in enumerate(vocabulary)}

    @classmethod
    def of_texts(cls, texts: Iterable[str], most: int) -> WordTokenizer:
        """Return a tokenizer of the ``most`` most frequent words of these texts."""
        counts = Counter(word for text in texts for word in _split(text))
        return cls(sorted(counts, key=lambda word: (-counts[word], word))[:most])

    @property
    def vocabulary(self) -> int:
        """The number of different tokens, including special ones."""
        return SPECIAL + len(self._numbers)

    def encode(self, texts: Sequence[tuple[str, ...]], tokens: int) -> tuple[Tensor, Tensor]:
        """Return token ids and attention mask, both [N, tokens], of texts or of pairs: ``<s> a </s> </s> b </s>``.

        A sample that is too long is truncated at the end of its longer text.
        """
        ids = torch.full((len(texts), tokens), PADDING, dtype=torch.int64)
        for row, parts in zip(ids, texts, strict=True):
            numbers = [[self._numbers.get(word, UNKNOWN) for word in _split(part)] for part in parts]
            while sum(map(len, numbers)) + 2 * len(numbers) > tokens:
                max(numbers, key=len).pop()
            line = [number for part in numbers for number in (END, *part, END)]
            row[: len(line)] = torch.tensor([START, *line[1:]])
        return ids, (ids != PADDING).to(torch.int64)


def _split(text: str) -> list[str]:
    return _WORD.findall(text.lower())
