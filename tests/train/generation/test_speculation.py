"""The acceptance rule: whatever drafts, texts have the distribution of the model that verifies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinpipe.train.generation.drafting import Draft, PromptLookup
from thinpipe.train.generation.speculation import choose

DRAWS = 20_000
WANTED = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]])  # after 0, 1, 2 drafts
DRAWN_FROM = torch.tensor([[0.1, 0.1, 0.2, 0.6], [0.25, 0.25, 0.5, 0.0]])


def drawn() -> Draft:
    return Draft([int(torch.multinomial(each, 1)) for each in DRAWN_FROM], list(DRAWN_FROM))


def certain() -> Draft:
    return Draft([2, 3], [None, None])


def frequencies(tokens: list[int]) -> Tensor:
    return torch.bincount(torch.tensor(tokens), minlength=4) / len(tokens)


@pytest.mark.parametrize("draft", [drawn, certain])
def test_accepted_and_other_tokens_have_the_distribution_of_the_model(draft: object) -> None:
    torch.manual_seed(0)
    texts = [choose(draft(), WANTED.log(), sampling=True) for _ in range(DRAWS)]  # type: ignore[operator]
    for place, wanted in enumerate(WANTED):
        tokens = [text[place] for text in texts if len(text) > place]
        spread = (wanted * (1 - wanted) / len(tokens)).sqrt()
        assert len(tokens) > DRAWS / 100
        assert ((frequencies(tokens) - wanted).abs() < 4.5 * spread).all(), place


def test_the_share_of_accepted_tokens_is_the_overlap_of_both_distributions() -> None:
    torch.manual_seed(0)
    texts = [choose(drawn(), WANTED.log(), sampling=True) for _ in range(DRAWS)]
    share = sum(len(text) > 1 for text in texts) / DRAWS
    assert share == pytest.approx(float(torch.minimum(WANTED[0], DRAWN_FROM[0]).sum()), abs=0.015)


def test_greedy_decoding_accepts_what_it_would_have_chosen() -> None:
    scores = WANTED.log()  # the likeliest: 0, 3, 0
    for tokens, accepted in (([0, 3], [0, 3, 0]), ([0, 1], [0, 3]), ([1, 3], [0]), ([], [0])):
        assert choose(Draft(tokens, [None] * len(tokens)), scores, sampling=False) == accepted


def test_a_lookup_copies_what_followed_the_last_occurrence() -> None:
    texts = [[0, 1, 2, 3, 4, 5, 1, 2, 3], [0, 5, 6, 7, 8, 5, 9, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [0] * 7 + [7, 7]]
    lookup = PromptLookup()
    lookup.begin(texts, (torch.tensor(texts) > 0).long())
    found = lookup.draft(texts, 4)
    assert [each.tokens for each in found] == [[4, 5, 1, 2], [8, 5, 9, 6], [], [7, 7, 7, 7]]
