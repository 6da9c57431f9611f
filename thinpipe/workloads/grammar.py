"""Sentences of a small grammar, acceptable or not: an embedded text task that no bag of words can solve.

Sentences come in pairs of the same words. One is acceptable; in the other, two phrases or words have changed places,
and that breaks one rule:

    agreement    these dogs near the cat are asleep         the cat near these dogs are asleep
    reflexive    this owl that saw the cats liked itself    the cats that saw this owl liked itself
    licensing    no cow behind the goat ever slept          the cow behind no goat ever slept
    order        the old bear near the cows was tired       old the bear near the cows was tired

Both sentences of a pair are on the same side of the split, so whatever looks only at which words there are is right
for exactly half of every set of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

T = TypeVar("T")

# Forms for one and for many, in this order.
ANIMALS = tuple((name, name + "s") for name in ("dog", "cat", "bird", "horse", "cow", "goat", "owl", "bear"))
ARTICLES = (("this", "these"), ("the", "the"))
IS = (("is", "are"), ("was", "were"))
REFLEXIVES = ("itself", "themselves")

STATES = ("asleep", "hungry", "awake", "tired")
SLEPT = ("slept", "ran", "sang", "waited")
MET = ("saw", "heard", "followed", "liked")  # with an object; past, so that it agrees with all
PREPOSITIONS = ("near", "behind", "beside")
ADJECTIVES = ("old", "young", "small")
AFTER = ("today", "here", "again")
WORDS = (
    *("the", "this", "these", "no", "ever", "that"),
    *(form for pair in (*ANIMALS, *IS) for form in pair),
    *(*REFLEXIVES, *STATES, *SLEPT, *MET, *PREPOSITIONS, *ADJECTIVES, *AFTER),
)
RULES = ("agreement", "reflexive", "licensing", "order")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same words twice: as they may stand, and with two of them swapped."""

    rule: str  # that the second sentence breaks
    acceptable: tuple[str, ...]
    unacceptable: tuple[str, ...]


def pairs(count: int, seed: int = 0) -> list[Pair]:
    """So many pairs, no sentence twice, the rules in turn; the same for the same seed on every machine."""
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
    """Draws sentences. Uses ``Random.random`` alone, whose numbers Python promises to keep."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def pair(self, rule: str) -> Pair:
        """A sentence and what breaks this rule in it."""
        if rule == "order":
            words, _ = self._sentences(RULES[self._below(3)])
            places = [place for place, word in enumerate(words) if word in ("the", "this", "these", "no")]
            article = self._one_of(places)
            broken = [*words[:article], words[article + 1], words[article], *words[article + 2 :]]
        else:
            words, broken = self._sentences(rule)
        return Pair(rule=rule, acceptable=tuple(words), unacceptable=tuple(broken))

    def _sentences(self, rule: str) -> tuple[list[str], list[str]]:
        """An acceptable sentence, and one in which the subject and another noun phrase changed places.

        The other is of the other number, and may be nearer to what agrees with the subject.
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
        """What joins the other noun phrase to the subject: words before it and words behind it."""
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
