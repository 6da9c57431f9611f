"""Splits: some samples of a split, and some of these again."""

from __future__ import annotations

import torch

from thinpipe.train.tasks.splits import Part, Texts, at_most


def test_at_most_of_a_part_is_a_part_of_the_same_split() -> None:
    ids = torch.arange(40)[:, None]
    whole = Texts(ids=ids, mask=torch.ones_like(ids), labels=torch.arange(40) % 2)
    part = Part(whole=whole, indices=torch.arange(0, 40, 2))
    some = at_most(part, 5)
    assert isinstance(some, Part)
    assert some.whole is whole  # so whoever has wrapped a task's data finds labels at part.whole, with --samples too
    assert len(some) == 5
    assert set(some.indices.tolist()) < set(range(0, 40, 2))
    assert torch.equal(some.batch(torch.arange(5)).inputs[0], ids[some.indices])
    assert at_most(part, 20) is part
