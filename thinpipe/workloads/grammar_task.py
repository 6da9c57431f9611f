"""The sentences of ``grammar.py`` with a small RoBERTa: embedded, and trained in about a minute on two cores."""

from __future__ import annotations

import torch
from torch import nn

from thinpipe.workloads.grammar import WORDS, Pair, pairs
from thinpipe.workloads.options import positive, refuse_others
from thinpipe.workloads.roberta import ENDS, ROBERTA_MODULES, SMALL, new_roberta, roberta_bytes
from thinpipe.workloads.splits import Texts, at_most
from thinpipe.workloads.task import Data, Recipe, Shape, Source, Task
from thinpipe.workloads.words import WordTokenizer

TRAIN_PAIRS, VALIDATION_PAIRS = 4000, 500
TOKENS = 17  # the longest sentence, 15 words, and the two tokens around it


class Grammar(Task):
    """8000 sentences to train with, 1000 to validate; half of each are acceptable (class 1), half are not (class 0)."""

    name = "grammar"
    summary = "acceptable and unacceptable sentences of a small grammar, embedded; small RoBERTa from scratch"
    metric = "accuracy"
    modules = ROBERTA_MODULES
    recipe = Recipe(
        batch_size=128,
        chunks=4,
        epochs=12,
        optimizer="adamw",
        lr=1e-3,
        lr_schedule="cosine",
        warmup=0.1,
        weight_decay=0.01,
        clip_norm=1.0,
        client_layers=(1, 1),
    )

    def look_for(self, source: Source) -> int:
        self._check(source)
        return SMALL.layers + ENDS

    def load(self, source: Source) -> tuple[Data, Shape]:
        """The same sentences on every machine; the two of a pair on the same side of the split."""
        tokens = self._check(source)
        tokenizer = WordTokenizer(WORDS)
        made = pairs(TRAIN_PAIRS + VALIDATION_PAIRS)
        data = Data(
            train=at_most(_held(made[:TRAIN_PAIRS], tokenizer, tokens), source.samples),
            validation=_held(made[TRAIN_PAIRS:], tokenizer, tokens),
            classes=2,
        )
        return data, Shape(classes=2, tokens=tokens, vocabulary=tokenizer.vocabulary)

    def weight_bytes(self, source: Source) -> int:
        return roberta_bytes(SMALL, source.width)

    def build(self, shape: Shape, source: Source) -> nn.Module:
        """From scratch."""
        self._check(source)
        return new_roberta(shape, SMALL, source.width)

    def _check(self, source: Source) -> int:
        """The length of texts, if everything else can be had as well."""
        refuse_others(self.name, source, ("tokens", "width", "samples"), "it is embedded and trained from scratch")
        return positive("tokens", source.tokens, TOKENS, least=TOKENS)  # a cut sentence could be of either class


def _held(made: list[Pair], tokenizer: WordTokenizer, tokens: int) -> Texts:
    sentences = [(" ".join(words),) for pair in made for words in (pair.acceptable, pair.unacceptable)]
    ids, mask = tokenizer.encode(sentences, tokens)
    return Texts(ids=ids, mask=mask, labels=torch.tensor([1, 0]).repeat(len(made)))
