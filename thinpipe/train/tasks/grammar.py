"""Sentences of a small grammar, acceptable or not: an embedded text task that no bag-of-words model can solve.

Sentences come in pairs of the same words. One is acceptable; in the other, two phrases or words are swapped, and that
breaks one rule:

    agreement    these dogs near the cat are asleep         the cat near these dogs are asleep
    reflexive    this owl that saw the cats liked itself    the cats that saw this owl liked itself
    licensing    no cow behind the goat ever slept          the cow behind no goat ever slept
    order        the old bear near the cows was tired       old the bear near the cows was tired

Both sentences of a pair are on the same side of the split, so a model that sees only the set of words is right for
exactly half of any set of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import torch
from torch import nn

from thinpipe.train.tasks.roberta import ENDS, ROBERTA_MODULES, SMALL, WordTokenizer, new_roberta, roberta_bytes
from thinpipe.train.tasks.sources import check_tokens, positive, reject_unused_options
from thinpipe.train.tasks.splits import Texts, at_most
from thinpipe.train.tasks.task import Data, Shape, Source, Task, TaskDefaults

T = TypeVar("T")

# Singular and plural, in this order.
ANIMALS = tuple((name, name + "s") for name in ("dog", "cat", "bird", "horse", "cow", "goat", "owl", "bear"))
ARTICLES = (("this", "these"), ("the", "the"))
IS = (("is", "are"), ("was", "were"))
REFLEXIVES = ("itself", "themselves")

STATES = ("asleep", "hungry", "awake", "tired")
SLEPT = ("slept", "ran", "sang", "waited")
MET = ("saw", "heard", "followed", "liked")  # take an object; past tense, so that they agree with singular and plural
PREPOSITIONS = ("near", "behind", "beside")
ADJECTIVES = ("old", "young", "small")
AFTER = ("today", "here", "again")
VOCABULARY = (
    *("the", "this", "these", "no", "ever", "that"),
    *(form for pair in (*ANIMALS, *IS) for form in pair),
    *(*REFLEXIVES, *STATES, *SLEPT, *MET, *PREPOSITIONS, *ADJECTIVES, *AFTER),
)
RULES = ("agreement", "reflexive", "licensing", "order")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same words twice: in an acceptable order, and with two phrases or words swapped."""

    rule: str  # the rule that the second sentence breaks
    acceptable: tuple[str, ...]
    unacceptable: tuple[str, ...]


def pairs(count: int, seed: int = 0) -> list[Pair]:
    """Return ``count`` pairs without repeated sentences, the rules in turn; a seed gives the same pairs anywhere."""
    writer = _Writer(seed)
    found: list[Pair] = []
    seen: set[tuple[str, ...]] = set()
    while len(found) < count:
        pair = writer.pair(RULES[len(found) % len(RULES)])
        if not seen & {pair.acceptable, pair.unacceptable}:
            seen |= {pair.acceptable, pair.unacceptable}
            found.append(pair)
    return found


class _Writer:
    """A generator of sentences. Uses only ``Random.random``, whose sequence Python guarantees."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def pair(self, rule: str) -> Pair:
        """Return an acceptable sentence and one that breaks this rule."""
        if rule == "order":
            sentence, _ = self._sentences(RULES[self._below(3)])
            places = [place for place, word in enumerate(sentence) if word in ("the", "this", "these", "no")]
            article = self._one_of(places)
            broken = [*sentence[:article], sentence[article + 1], sentence[article], *sentence[article + 2 :]]
        else:
            sentence, broken = self._sentences(rule)
        return Pair(rule=rule, acceptable=tuple(sentence), unacceptable=tuple(broken))

    def _sentences(self, rule: str) -> tuple[list[str], list[str]]:
        """Return an acceptable sentence, and one in which the subject and another noun phrase are swapped.

        The other phrase has the other grammatical number, and may be closer to the word that agrees with the subject.
        """
        number = self._below(2)
        subject, other = self._noun_phrase(number), self._noun_phrase(1 - number)
        end = self._predicate(rule, number)
        if rule == "licensing":
            subject[0], other[0] = "no", "the"
            swapped = ["the", *subject[1:]], ["no", *other[1:]]
        else:
            swapped = other, subject
        if rule != "licensing" and self._chance(0.2):  # in front: the first noun is not the subject
            start = [self._one_of(PREPOSITIONS)]
            return [*start, *other, *subject, *end], [*start, *subject, *other, *end]
        between, behind = self._between()
        after = [self._one_of(PREPOSITIONS), *self._noun_phrase(self._below(2))] if self._chance(0.3) else []
        rest = [*behind, *after, *end]
        return [*subject, *between, *other, *rest], [*swapped[0], *between, *swapped[1], *rest]

    def _between(self) -> tuple[list[str], list[str]]:
        """Return the words before and after the other noun phrase that join it to the subject."""
        if self._chance(0.5):
            return [self._one_of(PREPOSITIONS)], []
        met = self._one_of(MET)
        return (["that"], [met]) if self._chance(0.5) else (["that", met], [])

    def _predicate(self, rule: str, number: int) -> list[str]:
        after = [self._one_of(AFTER)] if self._chance(0.5) else []
        if rule == "agreement":
            return [self._one_of(IS)[number], self._one_of(STATES), *after]
        if rule == "reflexive":
            return [self._one_of(MET), REFLEXIVES[number], *after]
        return ["ever", self._one_of(SLEPT), *after]

    def _noun_phrase(self, number: int) -> list[str]:
        adjective = [self._one_of(ADJECTIVES)] if self._chance(0.3) else []
        return [self._one_of(ARTICLES)[number], *adjective, self._one_of(ANIMALS)[number]]

    def _chance(self, part: float) -> bool:
        return self._random.random() < part

    def _below(self, end: int) -> int:
        return int(self._random.random() * end)

    def _one_of(self, choices: Sequence[T]) -> T:
        return choices[self._below(len(choices))]


TRAIN_PAIRS, VALIDATION_PAIRS = 4000, 500
TOKENS = 17  # the longest sentence has 15 words, plus two special tokens


class Grammar(Task):
    """8000 training and 1000 validation sentences; half of each are acceptable (class 1), half are not (class 0)."""

    name = "grammar"
    summary = "acceptable and unacceptable sentences of a small grammar, embedded; small RoBERTa from scratch"
    metric = "accuracy"
    modules = ROBERTA_MODULES
    defaults = TaskDefaults(
        batch_size=128,
        chunks=4,
        epochs=12,
        optimizer="adamw",
        lr=1e-3,
        lr_schedule="cosine",
        warmup=0.1,
        weight_decay=0.01,
        clip_norm=1.0,
    )

    def preflight(self, source: Source) -> int:
        self._check(source)
        return SMALL.layers + ENDS

    def load(self, source: Source) -> tuple[Data, Shape]:
        """Return the same sentences on every machine; both of a pair are on the same side of the split."""
        tokens = self._check(source)
        tokenizer = WordTokenizer(VOCABULARY)
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
        """Return a randomly initialized model."""
        self._check(source)
        return new_roberta(shape, SMALL, source.width)

    def _check(self, source: Source) -> int:
        """Return the length of texts after validating all options."""
        reject_unused_options(
            self.name, source, ("tokens", "width", "samples"), "it is embedded and trained from scratch"
        )
        tokens = positive("tokens", source.tokens, TOKENS, least=TOKENS)  # a cut sentence could be of either class
        check_tokens(tokens, 2 * (TRAIN_PAIRS + VALIDATION_PAIRS))
        return tokens


def _held(made: list[Pair], tokenizer: WordTokenizer, tokens: int) -> Texts:
    sentences = [(" ".join(sentence),) for pair in made for sentence in (pair.acceptable, pair.unacceptable)]
    ids, mask = tokenizer.encode(sentences, tokens)
    return Texts(ids=ids, mask=mask, labels=torch.tensor([1, 0]).repeat(len(made)))
