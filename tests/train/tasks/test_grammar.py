"""Grammar: pairs of the same words, of which one is acceptable; no sentence on both sides of the split."""

from __future__ import annotations

from collections import Counter

import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from thinpipe.train.tasks.grammar import RULES, TOKENS, TRAIN_PAIRS, VOCABULARY, pairs
from thinpipe.train.tasks.roberta import SPECIAL, UNKNOWN
from thinpipe.train.tasks.task import Data, Source, Split
from thinpipe.train.tasks.tasks import task

FIRST_UNACCEPTABLE = [
    "this owl beside these birds were tired here",
    "these goats behind the owl followed itself",
    "the owls that no small dog followed ever ran",
    "no cat near bears the ever ran",
]


def loaded() -> Data:
    return task("grammar").load(Source())[0]


def whole(split: Split) -> tuple[Tensor, Tensor]:
    batch = split.batch(torch.arange(len(split)))
    return batch.inputs[0], batch.labels


def test_both_sentences_of_a_pair_have_the_same_words_in_another_order() -> None:
    for pair in pairs(200):
        assert Counter(pair.acceptable) == Counter(pair.unacceptable)
        assert pair.acceptable != pair.unacceptable


def test_the_rules_take_turns_and_every_word_is_used() -> None:
    made = pairs(400)
    assert Counter(pair.rule for pair in made) == dict.fromkeys(RULES, 100)
    assert {word for pair in made for word in pair.acceptable} == set(VOCABULARY)


def test_the_sentences_are_the_same_on_every_machine() -> None:
    assert [" ".join(pair.unacceptable) for pair in pairs(4)] == FIRST_UNACCEPTABLE
    assert pairs(10, seed=1) != pairs(10)


def test_no_sentence_is_both_acceptable_and_unacceptable_or_in_both_splits() -> None:
    data = loaded()
    train, validation = ([tuple(row.tolist()) for row in whole(split)[0]] for split in (data.train, data.validation))
    assert len({*train, *validation}) == len(train) + len(validation)


def test_no_sentence_is_cut_and_no_word_unknown() -> None:
    ids, _ = whole(loaded().train)
    assert ids.shape == (2 * TRAIN_PAIRS, TOKENS)
    assert not (ids == UNKNOWN).any()
    assert ((ids == 2).sum(1) == 1).all()  # each ends


def test_a_bag_of_words_is_right_half_of_the_time() -> None:
    data = loaded()
    (ids, labels), (others, truth) = whole(data.train), whole(data.validation)
    model = LogisticRegression(max_iter=200).fit(bags(ids), labels)
    assert abs(model.score(bags(others), truth) - 0.5) < 0.02


def bags(ids: Tensor) -> Tensor:
    counts = torch.zeros(len(ids), SPECIAL + len(VOCABULARY))
    return counts.scatter_add_(1, ids, torch.ones(ids.shape))
